# SPDX-License-Identifier: Apache-2.0
"""What lies beside a mirror's weights: the marker that says which version they are, and the file to lock.

Small durable writes and a lock, and the errors of a file system told as errors of this project; nothing of weights.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, Final, Literal, Self

from pydantic import Field

from vllm_delta_snapshot.errors import DeltaSnapshotError, FormatError, MirrorBusy, ObjectNotFound, StageError
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.run import RunId
from vllm_delta_snapshot.format.wire import Digest64, WireModel

__all__ = [
    "LOCK_NAME",
    "MIRROR_NAME",
    "REBUILD",
    "Marker",
    "Pin",
    "Target",
    "damage_told",
    "locked",
    "read_marker",
    "reported",
    "sync",
    "try_lock_mirror",
    "write_marker",
]

MIRROR_NAME: Final = "delta_snapshot_mirror.json"
"""The marker."""
LOCK_NAME: Final = "delta_snapshot_mirror.lock"
"""The file that is locked; empty."""

REBUILD: Final = "Delete the folder; it is made again."
"""What to do about a mirror that is damaged."""


class Target(WireModel):
    """A version, and the state that it is."""

    version: int = Field(ge=0, le=layout.MAX_VERSION)
    state_digest: Digest64

    def __str__(self) -> str:
        return f"version {self.version} with state digest {self.state_digest}"


class Marker(WireModel):
    """The content of the marker.

    Attributes:
        mirror_id: new for every mirror, so that a reader sees when its folder was made anew.
        advancing_to: where the weights are on their way to, from `version`.
        checkpoint: the folder that it was copied from, for people.
    """

    format: Literal["delta_snapshot_mirror"] = "delta_snapshot_mirror"
    format_version: Literal[1] = 1
    mirror_id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    run_id: RunId
    version: int = Field(ge=0, le=layout.MAX_VERSION)
    state_digest: Digest64
    advancing_to: Target | None
    checkpoint: str


class Pin:
    """A reader's hold on a mirror: until it is closed, or its process dies, nobody writes. A context manager too."""

    def __init__(self, lock: IO[bytes]) -> None:
        self._lock = lock

    def close(self) -> None:
        """Let go; nothing happens the second time."""
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def try_lock_mirror(folder: Path, *, shared: bool) -> IO[bytes] | None:
    """Lock a mirror for reading or writing; freed by closing the file, and by death.

    Returns:
        The locked file; ``None`` if others hold it, or took the mirror away meanwhile.
    """
    path = folder / LOCK_NAME
    lock = path.open("a+b")
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        lock.close()
        raise
    lock.close()
    return None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the exclusive lock of a mirror.

    Raises:
        MirrorBusy: others hold it.
    """
    lock = try_lock_mirror(folder, shared=False)
    if lock is None:
        raise MirrorBusy("somebody else reads or writes the mirror", file=str(folder), hint="Try again.")
    with lock:
        yield


def read_marker(folder: Path) -> Marker:
    """Return the marker in a mirror's folder.

    Raises:
        CorruptFile, UnsupportedFormat: it is damaged.
    """
    path = folder / MIRROR_NAME
    with damage_told():
        return Marker.from_json(path.read_bytes(), file=str(path))


def write_marker(folder: Path, marker: Marker) -> None:
    """Replace the marker, atomically and durably. The caller holds the lock, so one temporary name will do."""
    temporary = folder / f".{MIRROR_NAME}.new"
    temporary.write_bytes(marker.to_json())
    sync(temporary)
    temporary.replace(folder / MIRROR_NAME)
    sync(folder)


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def damage_told() -> Iterator[None]:
    """Add to an error about the mirror's own files what to do about it."""
    try:
        yield
    except (FormatError, ObjectNotFound) as error:
        facts = {name: getattr(error, name) for name in ("file", "tensor", "expected", "found")}
        raise type(error)(error.what, **facts, hint=REBUILD) from error


@contextlib.contextmanager
def reported(what: str, folder: Path, hint: str | None = None) -> Iterator[None]:
    """Turn an OSError into a StageError that names the file."""
    try:
        yield
    except OSError as error:
        if isinstance(error, DeltaSnapshotError):
            raise
        file = str(error.filename or folder)
        raise StageError(what, file=file, found=error.strerror or error, hint=hint) from error
