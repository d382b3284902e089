"""Unit tests compare with numpy alone unless told otherwise: compiling the kernel takes longer than most of them."""

import os
from collections.abc import Iterator

import pytest

from trainer_hooks.kernel import _load_kernel

SWITCH = "DELTA_SNAPSHOT_KERNEL"


@pytest.fixture(scope="package", autouse=True)
def _without_kernel() -> Iterator[None]:
    if SWITCH in os.environ:
        yield
        return
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(SWITCH, "0")
        _load_kernel.cache_clear()
        yield
    _load_kernel.cache_clear()
