"""The compiled kernel, compiled once for all tests that compare with it."""

from __future__ import annotations

import functools

import pytest

from trainer_hooks.compare.kernel import Kernel, _load_kernel


@functools.cache
def compiled() -> Kernel:
    """Return the kernel; skips the test where numba is missing."""
    pytest.importorskip("numba")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("DELTA_SNAPSHOT_KERNEL", "1")
        kernel = _load_kernel.__wrapped__()
    assert kernel is not None
    return kernel
