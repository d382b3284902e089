# SPDX-License-Identifier: Apache-2.0
"""Attachments: how a stager knows which workers live, which version each of them has, and where its weights lie.

An attachment is a file that its worker keeps locked. When the worker dies, however it dies, the lock is gone, and so
is its say in what is kept and whether the stager goes on.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass

from vllm_delta_snapshot.errors import StageError
from vllm_delta_snapshot.host.area import StageArea, is_locked, try_lock

__all__ = ["Attachment", "Worker", "living_workers"]


@dataclass(frozen=True, slots=True, order=True)
class Worker:
    """A living worker.

    Attributes:
        version: the version it has.
        places: names where its weights lie, in the area's ``places``; empty if it does not want mapped updates.
    """

    version: int
    places: str


class Attachment:
    """One worker's attachment; made before its stager is started.

    Args:
        area: where to attach.

    Raises:
        StageError: the area cannot be written.
    """

    def __init__(self, area: StageArea) -> None:
        self._path = area.attached / uuid.uuid4().hex
        hidden = self._path.with_name(f".{self._path.name}")
        try:
            # It appears when it is locked: a stager that looked in between would take it for a dead worker's.
            descriptor = try_lock(hidden)
            hidden.rename(self._path)
        except OSError as error:
            raise StageError("cannot attach to the stager", file=str(self._path), found=error) from error
        if descriptor is None:
            raise StageError("a new attachment is locked already", file=str(self._path))
        self._descriptor: int | None = descriptor

    def tell(self, version: int, places: str = "") -> None:
        """Tell the stager which version this worker has now, and where its weights lie."""
        if self._descriptor is not None:
            os.pwrite(self._descriptor, f"{version:08d} {places:16.16}".encode(), 0)

    def close(self) -> None:
        """Detach; nothing happens the second time."""
        if self._descriptor is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None


def living_workers(area: StageArea, start_version: int) -> list[Worker]:
    """Return every living worker, and remove what dead ones left.

    Args:
        area: where they are attached.
        start_version: the version of a worker that has not said yet.
    """
    workers = []
    for path in area.attached.iterdir():
        if path.name.startswith("."):
            continue
        if is_locked(path):
            version, _, places = path.read_text().partition(" ")
            workers.append(Worker(int(version) if version else start_version, places.strip()))
        else:
            path.unlink(missing_ok=True)
    return workers
