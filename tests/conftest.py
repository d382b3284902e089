"""What every test shares: one hypothesis profile, the same examples on every machine."""

import contextlib
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "fixed",
    derandomize=True,
    deadline=None,
    max_examples=30,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("fixed")


@pytest.fixture
def ram_path(tmp_path: Path) -> Iterator[Path]:
    """Return a folder in memory where there is one: for tests that sync thousands of files to disk."""
    with _in_memory(tmp_path) as folder:
        yield folder


@pytest.fixture(scope="module")
def ram_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return such a folder for all tests of a module."""
    with _in_memory(tmp_path_factory.mktemp("root")) as folder:
        yield folder


@contextlib.contextmanager
def _in_memory(otherwise: Path) -> Iterator[Path]:
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK) or shutil.disk_usage(shared).free < 64 << 20:
        yield otherwise
        return
    with tempfile.TemporaryDirectory(prefix="delta-snapshot-tests-", dir=shared) as folder:
        yield Path(folder)


def pytest_sessionstart() -> None:
    """Spare the garbage collector what stays until the end: modules, and thousands of tests."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Have it begin with what comes now."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Let it work again, in a process that has tests run by others too."""
    gc.enable()


def pytest_unconfigure() -> None:
    """Let libraries clean up after themselves."""
    gc.unfreeze()
