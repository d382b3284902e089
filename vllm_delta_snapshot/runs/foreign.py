# SPDX-License-Identifier: Apache-2.0
"""Records of another run: what a reader says of one, and whether the reader or the record is out of place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_delta_snapshot.errors import FormatError, ObjectNotFound, RunMismatch
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.version import MAX_VERSION_BYTES
from vllm_delta_snapshot.runs.own_run import OwnRun, run_id_of
from vllm_delta_snapshot.store import Store

__all__ = ["OwnRecords", "foreign_record", "mismatch"]


class OwnRecords:
    """What of a listing is the run's own. Each record is looked at once.

    Args:
        store: the run's store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._version = 0  # up to which versions are known to be the run's

    def versions(self, versions: Sequence[int], run_id: Callable[[], str]) -> tuple[list[int], RunMismatch | None]:
        """Return versions without the last ones that are another run's, and what is wrong with these.

        A trainer that outlived its run may have put one there, at the end; what comes before one's own is one's own.

        Args:
            versions: those that are listed, ascending.
            run_id: gives the run that is read.

        Raises: see `foreign_record`.
        """
        own, foreign = list(versions), None
        while own and own[-1] > self._version:
            found = foreign_record(self._store, run_id(), layout.version_key(own[-1]))
            if found is None:
                self._version = own[-1]
            else:
                foreign = found
                own.pop()
        return own, foreign


def foreign_record(store: Store, run_id: str, key: str) -> RunMismatch | None:
    """Return what is wrong with a record if it says that it is another run's; whatever else is wrong with it.

    Raises:
        RunMismatch: it is the reader that follows another run.
        StoreUnavailable: try again.
    """
    try:
        found = run_id_of(store.read(key, max_bytes=MAX_VERSION_BYTES))
    except (ObjectNotFound, FormatError):
        return None
    return None if found in (None, run_id) else mismatch(store, run_id, str(found), key)


def mismatch(store: Store, run_id: str, found: str, key: str) -> RunMismatch:
    """Return the error for a record of another run.

    Args:
        store: the run's store.
        run_id: the run that is read.
        found: the run that the record is of.
        key: the record's.

    Raises:
        RunMismatch: the folder itself is another run's by now.
        StoreUnavailable: try again.
    """
    try:
        OwnRun(store, run_id).check()
    except RunMismatch as error:
        raise RunMismatch(
            "the folder holds another run now",
            file=error.file,
            expected=error.expected,
            found=error.found,
            hint="It was wiped and begun anew. Move whoever follows it to the new run (--switch-run), or restart it.",
        ) from error
    return RunMismatch(
        "belongs to another run",
        file=f"{store.uri}/{key}",
        expected=f"run {run_id}",
        found=f"run {found}",
        hint="A writer that outlived its run left it there. The run's own trainer takes its place with its next "
        "version, or when it starts again; if none will, delete that file.",
    )
