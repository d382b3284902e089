# SPDX-License-Identifier: Apache-2.0
"""Proof, asked of the store and not of memory, that the run that one writes into is still the run that lies there.

A folder may be wiped and begun anew while somebody who wrote into it lives on: a trainer that was thought dead, an
upkeep process, a prune. What they create next would lie in a run that is not theirs. So every record is created between
two looks at run.json. If the second one finds another run, the record is withdrawn: its bytes say that it is one's own.
If its writer dies in between, it stays; then the run's own writer, who comes to the same name, sees by its run id that
it is another's, and takes the name over. Nothing is deleted that is not proven to be one's own, or another run's.

A run id never comes back: who finds it after the creation knows that it was there at the creation too.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from typing import Final

from vllm_delta_snapshot.errors import (
    CorruptFile,
    ObjectExists,
    ObjectNotFound,
    RunMismatch,
    StoreError,
    StoreUnavailable,
)
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.run import MAX_RUN_BYTES
from vllm_delta_snapshot.format.version import MAX_VERSION_BYTES
from vllm_delta_snapshot.store import Store

__all__ = ["OwnRun", "run_id_of"]

logger = logging.getLogger(__name__)

_HEAD_BYTES: Final = 4096
"""So many bytes of run.json are looked at; its id is among the first."""

_ATTEMPTS: Final = 5
_RUN_ID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class OwnRun:
    """See the module. Belongs to one writer.

    Args:
        store: the run's store.
        run_id: the run that is written into.

    Attributes:
        last: key and bytes of the version record that was created last, by this writer.
    """

    def __init__(self, store: Store, run_id: str) -> None:
        self.store = store
        self.run_id = run_id
        self.last: tuple[str, bytes] | None = None
        self._head: bytes | None = None

    def check(self) -> None:
        """Check that the run is there. Blocks for a read of a few kilobytes.

        Raises:
            RunMismatch: another run is there, or none.
            CorruptFile, StoreError, StoreUnavailable: nobody knows.
        """
        if self._head is not None and self._begins_with(self._head):
            return
        where = f"{self.store.uri}/{layout.RUN_KEY}"
        try:
            data = self.store.read(layout.RUN_KEY, max_bytes=MAX_RUN_BYTES)
        except ObjectNotFound as error:
            raise self._lost("no run any more") from error
        found = run_id_of(data)
        if found is None:
            raise CorruptFile("run.json says of no run that it is this one", file=where, expected=f"run {self.run_id}")
        if found != self.run_id:
            raise self._lost(f"run {found}")
        self._head = data[: max(_HEAD_BYTES, data.index(found.encode()) + len(found))]

    def create(self, key: str, data: bytes) -> None:
        """Create a record exclusively, in this run and no other. Blocks.

        Raises:
            RunMismatch: another run is there, or none; nothing of it was changed.
            ObjectExists: there is a record of this run.
            StoreUnavailable: it may or may not have been created; ask `find`.
            StoreError: it was not.
        """
        self.check()
        for _ in range(_ATTEMPTS):
            try:
                self.store.create(key, data)
                break
            except ObjectExists:
                if not self.remove_foreign(key):
                    raise
        else:
            raise StoreError(
                "a record of another run comes again and again",
                file=f"{self.store.uri}/{key}",
                hint="Another trainer writes into this folder: end it.",
            )
        self._confirm(key, data)

    def find(self, key: str, data: bytes) -> bytes | None:
        """Find out what became of a record whose creation nobody answered. Blocks.

        Args:
            key: where it was to be created.
            data: what it says.

        Returns:
            What is there of this run, which may be another record; ``None`` if nothing is.

        Raises:
            RunMismatch: another run is there, or none; the record was withdrawn if it was there.
            StoreError, StoreUnavailable: it cannot be found out now.
        """
        try:
            found = self.store.read(key, max_bytes=MAX_VERSION_BYTES)
        except ObjectNotFound:
            found = None
        self._confirm(key, data)
        if found is not None and self._is_foreign(found):
            return None  # whoever creates the next one takes the name over
        return found

    def remove_foreign(self, key: str) -> bool:
        """Delete a record if it is proven to be another run's; say whether the name is free now. Blocks.

        Raises:
            RunMismatch: it is this writer that does not belong here.
            StoreError, StoreUnavailable: it could not be looked at or deleted.
        """
        try:
            data = self.store.read(key, max_bytes=MAX_VERSION_BYTES)
        except ObjectNotFound:
            return True
        if not self._is_foreign(data):
            return False
        self.check()  # after it was read: so it is not of the run that is there
        logger.warning(
            "taking over %s/%s: it was left by a writer of run=%s, which is not the run here",
            self.store.uri,
            key,
            run_id_of(data),
        )
        try:
            self.store.delete(key)
        except StoreUnavailable:
            raise
        except StoreError as error:
            raise StoreError(
                "a record that another run left is in the way, and cannot be deleted",
                file=f"{self.store.uri}/{key}",
                expected=f"run {self.run_id}",
                found=f"run {run_id_of(data)}, and: {error.what}",
                hint="Delete that file, with the rights of who prunes.",
            ) from error
        return True

    def drop_foreign(self, keys: Iterable[str]) -> None:
        """Delete the records that are proven to be another run's, up to the first that is not. Raises: see above."""
        for key in keys:
            if not self.remove_foreign(key):
                return

    def _confirm(self, key: str, data: bytes) -> None:
        """Check that the run is there, after a record was created, or may have been; withdraw it if it is not."""
        try:
            self.check()
        except RunMismatch:
            try:
                if self.store.read(key, max_bytes=MAX_VERSION_BYTES) == data:
                    self.store.delete(key)
                    logger.warning("withdrew %s/%s, which had come into another run", self.store.uri, key)
            except ObjectNotFound:
                pass
            except StoreError as error:  # the run's own writer takes the name over when it comes to it
                logger.error("cannot withdraw %s/%s from another run: %s", self.store.uri, key, error)
            raise

    def _begins_with(self, head: bytes) -> bool:
        into = bytearray(len(head))
        try:
            count = self.store.read_range(layout.RUN_KEY, 0, memoryview(into))
        except ObjectNotFound:
            return False
        return count == len(head) and into == head

    def _is_foreign(self, data: bytes) -> bool:
        return run_id_of(data) not in (None, self.run_id)

    def _lost(self, found: str) -> RunMismatch:
        return RunMismatch(
            "the folder was wiped or replaced since this writer opened its run there",
            file=f"{self.store.uri}/{layout.RUN_KEY}",
            expected=f"run {self.run_id}",
            found=found,
            hint="Nothing was written into it. If this is the trainer that is meant to live, start it again with a "
            "sync_dir of its own; if it is one that was thought dead, end it.",
        )


def run_id_of(data: bytes) -> str | None:
    """Return the run that an object says it belongs to, whatever else it says; ``None`` if it says none."""
    try:
        said = json.loads(data)
    except ValueError:
        return None
    run_id = said.get("run_id") if isinstance(said, dict) else None
    return run_id if isinstance(run_id, str) and _RUN_ID.fullmatch(run_id) else None
