"""Unit tests compare with numpy alone unless told otherwise, and wait for no disk: both take longer than most tests."""

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from trainer_hooks.compare.kernel import _load_kernel

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


@pytest.fixture(scope="package", autouse=True)
def _without_waiting_for_the_disk() -> Iterator[None]:
    """Let files be synced in name only; tests/contract syncs them, and so do the processes that tests start."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", os.fstat)  # which fails where there is no such file too
        yield


@pytest.fixture
def nowhere() -> Iterator[str]:
    """Return the URL of a server that is not there."""
    with contextlib.closing(socket.socket()) as bound:  # taken, but nobody listens
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
