"""Small file systems of a test's own: full, or read-only."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[Path]:
    """Mount a tmpfs of this size; skips the test, with the reason, where that is not allowed."""
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if os.geteuid() != 0 or mount is None or umount is None:
        pytest.skip("needs root and mount, to make a small tmpfs")
    folder.mkdir(parents=True)
    done = subprocess.run(
        [mount, "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run([umount, "-l", str(folder)], check=True)


def make_read_only(folder: Path) -> None:
    """Remount a `tmpfs` read-only."""
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
