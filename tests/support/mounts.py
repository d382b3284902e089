"""File systems of a test's own: full, read-only, behind a FUSE layer that fails, or after a power cut."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import eventually


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


class FuseMount:
    """A folder behind `tests.support.fusefault`.

    Attributes:
        path: where it is mounted.
        source: the folder itself.
    """

    def __init__(self, path: Path, source: Path) -> None:
        self.path = path
        self.source = source
        self._control = source.with_name(f"{source.name}.faults")
        self._writes = 0
        self.set()

    def set(self, **faults: Any) -> None:
        """Have it do this from now on, and nothing else wrong."""
        self._writes += 1
        fresh = self._control.with_suffix(".new")
        fresh.write_text(json.dumps(faults))
        os.utime(fresh, ns=(self._writes, self._writes))
        fresh.replace(self._control)


@contextlib.contextmanager
def fuse_mount(folder: Path) -> Iterator[FuseMount]:
    """Mount a `FuseMount` under `folder`; skips the test, with the reason, where that is not possible."""
    if os.geteuid() != 0 or not os.access("/dev/fuse", os.W_OK):
        pytest.skip("needs root and /dev/fuse, to mount a FUSE file system")
    pytest.importorskip("mfusepy", reason="needs mfusepy and libfuse (apt install libfuse3-3)", exc_type=Exception)
    source, path = folder / "behind", folder / "mount"
    source.mkdir(parents=True)
    path.mkdir()
    mount = FuseMount(path, source)
    command = [sys.executable, "-m", "tests.support.fusefault", str(source), str(path)]
    with (folder / "fuse.log").open("wb") as log:
        server = subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=log, stderr=log)
        try:
            with contextlib.suppress(AssertionError):
                eventually(lambda: path.is_mount() or server.poll() is not None, 30)
            if not path.is_mount():
                pytest.skip(f"cannot mount with FUSE: {(folder / 'fuse.log').read_text()[-300:]}")
            yield mount
        finally:
            subprocess.run(["umount", "-l", str(path)], check=False)
            server.kill()
            server.wait()


_SHUTDOWN = 0x8004587D
"""FS_IOC_SHUTDOWN: the file system stops on the spot, as if the power had gone."""
_NO_LOG_FLUSH = 2


class PowerCut:
    """An ext4 file system in a file, whose power can be cut.

    Attributes:
        path: where it is mounted.
    """

    def __init__(self, path: Path, image: Path) -> None:
        self.path = path
        self._image = image

    def mount(self) -> None:
        """Mount it, which replays its journal."""
        done = subprocess.run(
            ["mount", "-o", "loop", str(self._image), str(self.path)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            pytest.skip(f"cannot mount ext4 over a loop device: {done.stderr.strip()}")

    def unmount(self) -> None:
        """Unmount it."""
        subprocess.run(["umount", str(self.path)], check=True)

    def cut(self) -> None:
        """Cut the power: what was not synced is gone. Mount again to see what is left."""
        descriptor = os.open(self.path, os.O_RDONLY)
        libc = ctypes.CDLL(None, use_errno=True)
        argument = ctypes.c_uint32(_NO_LOG_FLUSH)
        failed = libc.ioctl(descriptor, ctypes.c_ulong(_SHUTDOWN), ctypes.byref(argument))
        number = ctypes.get_errno()
        os.close(descriptor)
        if failed:
            pytest.skip(f"this file system cannot be shut down: {os.strerror(number)}")
        self.unmount()
        self.mount()


@contextlib.contextmanager
def power_cut(folder: Path) -> Iterator[PowerCut]:
    """Make a `PowerCut` under `folder`; skips the test, with the reason, where that is not possible."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("needs root and mkfs.ext4, to make a file system whose power can be cut")
    image, path = folder / "disk", folder / "power"
    path.mkdir(parents=True)
    with image.open("wb") as file:
        file.truncate(32 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, capture_output=True)
    disk = PowerCut(path, image)
    disk.mount()
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(path)], check=False)
