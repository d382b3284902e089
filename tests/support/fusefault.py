"""A FUSE layer over a folder that behaves as shared file systems do at their worst.

``python -m tests.support.fusefault SOURCE MOUNTPOINT`` serves until it is unmounted. What it does wrong is read from
``SOURCE.faults`` (JSON, beside the folder), whenever that changes::

    {"hide_s": 2.0}                  names appear to lookups and listings only when they are so old
    {"hide_lookup_s": 2.0}           names are listed at once, but cannot be opened before they are so old
    {"where": "0002", ...}           only names that contain this are hidden
    {"links": false}                 no hard links
    {"room": 100000}                 no space after so many bytes in all
    {"fail": {"read": ["ESTALE", 3, "delta"]}}   these calls fail, so often, on paths that contain this
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import mfusepy


class FaultyFolder(mfusepy.Operations):
    """See the module. Everything else is passed on to the folder."""

    use_ns = True

    def __init__(self, source: Path) -> None:
        self._source = source
        self._control = source.with_name(f"{source.name}.faults")
        self._lock = threading.Lock()
        self._read_at = -1
        self._faults: dict[str, Any] = {}
        self._born: dict[str, float] = {}
        self._linked: set[str] = set()
        self._written = 0

    def _rule(self, call: str, path: str) -> dict[str, Any]:
        """Take notice of a call; fail it if it is to fail."""
        with self._lock:
            changed = self._control.stat().st_mtime_ns
            if changed != self._read_at:
                self._faults, self._read_at = json.loads(self._control.read_bytes()), changed
            name, left, where = self._faults.get("fail", {}).get(call, ("EIO", 0, ""))
            if left and where in path:
                self._faults["fail"][call][1] -= 1
                raise mfusepy.FuseOSError(getattr(errno, name))
            return self._faults

    def _is_young(self, path: str, seconds: float) -> bool:
        where = self._faults.get("where", "")
        return where in path and time.monotonic() - self._born.get(path, -1e9) < seconds

    def _real(self, path: str) -> str:
        return f"{self._source}{path}"

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        faults = self._rule("getattr", path)
        if path in self._linked:
            self._linked.discard(path)  # the link asks about itself
        elif fh is None and self._is_young(path, max(faults.get("hide_s", 0), faults.get("hide_lookup_s", 0))):
            raise mfusepy.FuseOSError(errno.ENOENT)
        found = os.lstat(self._real(path))
        fields = ("mode", "nlink", "uid", "gid", "size")
        times = {f"st_{name}time": getattr(found, f"st_{name}time_ns") for name in "amc"}
        return {f"st_{name}": getattr(found, f"st_{name}") for name in fields} | times

    def readdir(self, path: str, fh: int) -> list[str]:
        faults = self._rule("readdir", path)
        inside = path.rstrip("/")
        names = os.listdir(self._real(path))
        return [".", "..", *(n for n in names if not self._is_young(f"{inside}/{n}", faults.get("hide_s", 0)))]

    def open(self, path: str, flags: int) -> int:
        self._rule("open", path)
        return os.open(self._real(path), flags)

    def create(self, path: str, mode: int, fi: object = None) -> int:
        self._rule("create", path)
        return os.open(self._real(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        self._rule("read", path)
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        room = self._rule("write", path).get("room")
        if room is not None and self._written + len(data) > room:
            raise mfusepy.FuseOSError(errno.ENOSPC)
        self._written += len(data)
        return os.pwrite(fh, data, offset)

    def link(self, target: str, source: str) -> None:
        if not self._rule("link", target).get("links", True):
            raise mfusepy.FuseOSError(errno.EPERM)
        os.link(self._real(source), self._real(target))
        self._born[target] = time.monotonic()
        self._linked.add(target)

    def release(self, path: str, fh: int) -> None:
        if "/.tmp-" not in path:  # the writer itself sees at once what it wrote
            self._born.setdefault(path, time.monotonic())
        os.close(fh)

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        self._rule("fsync", path)
        os.fsync(fh)

    def mkdir(self, path: str, mode: int) -> None:
        self._rule("mkdir", path)
        os.mkdir(self._real(path), mode)

    def unlink(self, path: str) -> None:
        self._rule("unlink", path)
        os.unlink(self._real(path))
        self._born.pop(path, None)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._real(path))

    def rename(self, old: str, new: str) -> None:
        self._rule("rename", new)
        os.rename(self._real(old), self._real(new))

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        os.truncate(self._real(path), length)

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._source)
        return {name: getattr(found, name) for name in dir(found) if name.startswith("f_") and name != "f_fsid"}


def main(source: Path, mountpoint: Path) -> None:
    """Mount and serve; blocks until it is unmounted."""
    mfusepy.FUSE(
        FaultyFolder(source),
        str(mountpoint),
        foreground=True,
        fsname="fusefault",
        entry_timeout=0,
        attr_timeout=0,
        negative_timeout=0,
        direct_io=True,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
