# SPDX-License-Identifier: Apache-2.0
"""The mark that says up to which version deltas were pruned, and whether it can be believed.

A mark that lies would hide deltas that are there, have what they hold go unchecked, and let a prune delete them. So it
is read, not only listed: one of another run, of another number, or beyond the newest version counts for nothing.
Writes nothing, and deletes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm_delta_snapshot.errors import (
    ChainError,
    CorruptFile,
    DeltaSnapshotError,
    FormatError,
    ObjectNotFound,
    RunMismatch,
)
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.anchor import PrunedMark
from vllm_delta_snapshot.format.version import MAX_VERSION_BYTES
from vllm_delta_snapshot.store import Store

__all__ = ["PrunedMarks"]

_HINT = "Nobody believes it. Delete that file if no prune of this run wrote it; else restore it from a copy."


class PrunedMarks:
    """See the module.

    Args:
        store: the run's.
        run_id: returns the run.
        newest: returns the newest version that something leads to.
    """

    def __init__(self, store: Store, run_id: Callable[[], str], newest: Callable[[], int]) -> None:
        self._store = store
        self._run_id = run_id
        self._newest = newest
        self._good: set[int] = set()

    def find(self) -> tuple[int, DeltaSnapshotError | None]:
        """Return the highest mark that can be believed, 0 if none can, and what is wrong with the first that cannot.

        One listing, and a read for a mark that was not seen yet.

        Raises:
            StoreUnavailable: try again.
        """
        problem: DeltaSnapshotError | None = None
        for version in reversed(layout.numbers_of(self._store.list(layout.PRUNED_FOLDER))):
            if version not in self._good:
                try:
                    self._check(version)
                except ObjectNotFound:  # a newer one took its place
                    continue
                except (ChainError, FormatError) as error:
                    where = f"{self._store.uri}/{layout.pruned_key(version)}"
                    problem = problem or error.placed(file=where, hint=_HINT)
                    continue
                self._good.add(version)
            return version, problem
        return 0, problem

    def _check(self, version: int) -> None:
        key = layout.pruned_key(version)
        where = f"{self._store.uri}/{key}"
        mark = PrunedMark.from_json(self._store.read(key, max_bytes=MAX_VERSION_BYTES), file=where)
        if mark.run_id != self._run_id():
            raise RunMismatch(
                "the mark of what was pruned belongs to another run",
                file=where,
                expected=f"run {self._run_id()}",
                found=f"run {mark.run_id}",
            )
        if mark.version != version:
            raise CorruptFile("the mark is of another version", file=where, expected=version, found=mark.version)
        newest = self._newest()
        if version > newest:
            raise CorruptFile(
                "the mark says that versions were pruned that there are not",
                file=where,
                expected=f"at most version {newest}, the newest",
                found=f"version {version}",
            )
