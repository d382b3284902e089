# SPDX-License-Identifier: Apache-2.0
"""A store in a folder: local disk, NFS, or any file system with hard links.

Exclusive create is: temporary file in the same folder, fsync, hard link to the final name (fails if it is taken),
unlink, fsync of the folder. Rename is never used over a name that may exist: it would overwrite in silence. New
objects are found by listing the folder, because an NFS client caches the absence of a name for up to half a minute.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from vllm_delta_snapshot.errors import (
    ExclusiveCreateUnsupported,
    ObjectNotFound,
    StoreError,
    StoreUnavailable,
)
from vllm_delta_snapshot.store.keys import check_key
from vllm_delta_snapshot.store.posix_answers import ABSENT, Operation, error_of
from vllm_delta_snapshot.store.probe import probe_exclusive_create
from vllm_delta_snapshot.store.retry import again
from vllm_delta_snapshot.util.regular_file import opened, read_bounded

__all__ = ["PosixStore"]

T = TypeVar("T")

_NO_HARD_LINKS: Final = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_TEMPORARY: Final = ".tmp-"
_ATTEMPTS: Final = 5
_FIRST_PAUSE_S: Final = 0.05


class PosixStore:
    """See the module and `Store`.

    Args:
        path: the folder; made on the first write.
        single_writer: where hard links are missing, create by name alone, which cannot tell two writers apart.
    """

    def __init__(self, path: str | os.PathLike[str], *, single_writer: bool = False) -> None:
        self.concurrency = 4
        self.range_bytes = 1 << 20
        self.root = Path(path).expanduser().absolute()
        self.uri = str(self.root)
        self._single_writer = single_writer

    def create(self, key: str, data: bytes) -> None:
        """See `Store.create`."""
        path = self._path(key)
        temporary = path.parent / f"{_TEMPORARY}{uuid.uuid4().hex}"
        with _reported(path, "write"):
            self._make_folder(path.parent)
            try:
                _write_new(temporary, [memoryview(data)])
                self._link(temporary, path)
            finally:
                with contextlib.suppress(OSError):
                    temporary.unlink()
            try:
                _sync_folder(path.parent)
            except OSError as error:  # too late for "it did not happen": the object is visible
                found = os.strerror(error.errno) if error.errno else str(error)
                raise StoreUnavailable("object created, perhaps not durably", file=str(path), found=found) from error

    def put(self, key: str, chunks: Iterable[memoryview]) -> int:
        """See `Store.put`."""
        path = self._path(key)
        with _reported(path, "write"):
            self._make_folder(path.parent)
            num_bytes = _write_new(path, chunks)
            _sync_folder(path.parent)
            return num_bytes

    def read(self, key: str, *, max_bytes: int) -> bytes:
        """See `Store.read`."""
        path = self._path(key)
        return _patiently(path, lambda: read_bounded(path, max_bytes))

    def size(self, key: str) -> int:
        """See `Store.size`."""
        path = self._path(key)
        return _patiently(path, lambda: path.stat().st_size)

    def read_range(self, key: str, offset: int, into: memoryview) -> int:
        """See `Store.read_range`."""
        path = self._path(key)

        def once() -> int:
            done = 0
            with opened(path) as descriptor:
                while done < len(into) and (count := os.preadv(descriptor, [into[done:]], offset + done)):
                    done += count
            return done

        return _patiently(path, once)

    def list(self, folder: str) -> list[str]:
        """See `Store.list`."""
        path = self._path(folder) if folder else self.root
        try:
            names = _patiently(path, lambda: os.listdir(path), "list")
            return sorted(name for name in names if not name.startswith(_TEMPORARY))
        except ObjectNotFound:
            return []

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        path = self._path(key)
        with contextlib.suppress(ObjectNotFound), _reported(path, "delete"):
            path.unlink()

    def remove_empty(self, folder: str) -> None:
        """See `HasFolders.remove_empty`."""
        path = self._path(folder)
        with contextlib.suppress(ObjectNotFound), _reported(path, "delete"):
            for hidden in path.iterdir():  # of a put that was cut off
                if hidden.name.startswith("."):
                    hidden.unlink(missing_ok=True)
            if not any(path.iterdir()):
                path.rmdir()

    def sweep(self, *, older_than_s: float) -> int:
        """See `SweepsUploads.sweep`: temporary files where records are made, by the clock of the file system."""
        swept = 0
        with _reported(self.root, "delete"):
            until = self.now() - older_than_s
            for folder in (self.root, *(path for path in self.root.iterdir() if path.is_dir())):
                for path in folder.glob(f"{_TEMPORARY}*"):
                    with contextlib.suppress(FileNotFoundError):
                        if path.lstat().st_mtime <= until:
                            path.unlink()
                            swept += 1
        return swept

    def now(self) -> float:
        """See `TellsTime.now`: the time that a new file gets, on NFS from the server."""
        path = self.root / f"{_TEMPORARY}{uuid.uuid4().hex}"
        with _reported(path, "write"):
            try:
                _write_new(path, [memoryview(b"?")])
                return path.stat().st_mtime
            finally:
                path.unlink(missing_ok=True)

    def check_exclusive_create(self) -> None:
        """See `Store.check_exclusive_create`."""
        if not self._single_writer:
            probe_exclusive_create(self)

    def _path(self, key: str) -> Path:
        return self.root.joinpath(*check_key(key).split("/"))

    def _make_folder(self, folder: Path) -> None:
        missing = []
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                path.mkdir()
            _sync_folder(path.parent)

    def _link(self, temporary: Path, path: Path) -> None:
        try:
            os.link(temporary, path)
        except OSError as error:
            if error.errno in ABSENT:  # yet both folder and file were just made: nobody knows what happened
                raise StoreUnavailable("cannot tell whether an object was created", file=str(path)) from error
            if error.errno not in _NO_HARD_LINKS:
                raise
            if not self._single_writer:
                raise ExclusiveCreateUnsupported(
                    "this file system has no hard links, so two trainers could not be told apart",
                    file=str(path),
                    found=os.strerror(error.errno),
                    hint="Use another folder, or pass single_writer=True if only one trainer will ever write here.",
                ) from error
            if path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
            temporary.rename(path)


def _write_new(path: Path, chunks: Iterable[memoryview]) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        total = 0
        for chunk in chunks:
            rest = chunk
            while len(rest):
                count = os.write(descriptor, rest[: 1 << 26])
                rest = rest[count:]
                total += count
        os.fsync(descriptor)
        return total
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()  # it was made here, and is no use to anybody
        raise
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # object-store mounts cannot sync a folder
            raise
    finally:
        os.close(descriptor)


def _patiently(path: Path, read: Callable[[], T], operation: Operation = "read") -> T:
    """Read, and again while the file system says what may pass, or denies a name that its own folder lists.

    An NFS client that has once looked for a name in vain believes that for up to half a minute; listing the folder
    tells it better.
    """

    def once() -> T:
        try:
            with _reported(path, operation):
                return read()
        except ObjectNotFound as error:
            if _is_listed(path):
                raise StoreUnavailable("a file is listed and cannot be opened", file=str(path)) from error
            raise

    return again(once, attempts=_ATTEMPTS, first_s=_FIRST_PAUSE_S)


def _is_listed(path: Path) -> bool:
    try:
        return path.name in os.listdir(path.parent)
    except OSError:
        return False


@contextlib.contextmanager
def _reported(path: Path, operation: Operation) -> Iterator[None]:
    """Turn an OSError into the error of this project that says what to do."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise error_of(error, path, operation) from error
