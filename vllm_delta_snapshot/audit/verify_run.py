# SPDX-License-Identifier: Apache-2.0
"""Verify a whole run in its store: every record, every file, every patch, and that the chain holds together.

Goes on after a problem, so that one damaged file is told from ten. Reads every byte of every version, merged delta and
anchor; of versions that were pruned the records are left, and are held against each other. Writes nothing into the
store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from vllm_delta_snapshot.errors import BaseMismatch, BrokenChain, ChainError, DeltaSnapshotError, StoreUnavailable
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.version import DeltaRecord, VersionRecord
from vllm_delta_snapshot.runs.chain import Step
from vllm_delta_snapshot.runs.fetch_anchor import fetch_anchor
from vllm_delta_snapshot.runs.replay import opened_version
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.util.scratch import scratch_folder

__all__ = ["Check", "Progress", "RunProblem", "RunVerification", "Verifier", "check_link", "verify_run"]

Progress = Callable[[int, int, int], None]
"""Called with (records done, records in all, bytes read so far)."""
Check = Callable[[], int]
"""Looks at something; returns how many bytes of payload were good, and raises what is wrong."""


@dataclass(frozen=True, slots=True)
class RunProblem:
    """Something wrong with one version, or with an anchor or merged delta that leads to it."""

    version: int
    error: DeltaSnapshotError


@dataclass(slots=True)
class RunVerification:
    """What was found.

    Attributes:
        run_id: the run.
        versions: how many versions were looked at.
        newest: the newest version.
        payload_bytes: bytes of payload read and found good.
        changed_elements: elements of all good versions.
        problems: what is wrong, in order of version.
        leftovers: folders of publications that were never committed: harmless, left by a crash.
        pruned: deltas of versions up to this one are gone; 0 if none is.
        anchors: how many anchors were looked at.
        merged: how many merged deltas were looked at.
        newest_proven: the newest version whose weights were recomputed (`verify_deep`); ``None`` if none was.
        not_checked: sentences: what could not be, though it was asked.
    """

    run_id: str
    versions: int = 0
    newest: int = 0
    payload_bytes: int = 0
    changed_elements: int = 0
    problems: list[RunProblem] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    pruned: int = 0
    anchors: int = 0
    merged: int = 0
    newest_proven: int | None = None
    not_checked: list[str] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify_run(folder: RunFolder, *, progress: Progress | None = None) -> RunVerification:
    """Look at every version of a run. Blocks.

    Args:
        folder: the run.
        progress: told after every version.

    Returns:
        What was found; problems are in it, not raised.

    Raises:
        ObjectNotFound, CorruptFile, UnsupportedFormat: there is no readable run.json.
        StoreUnavailable: the store went away.
    """
    return Verifier(folder, progress).verify()


class Verifier:
    """One pass over a run. `verify_deep` has another that does more."""

    def __init__(self, folder: RunFolder, progress: Progress | None) -> None:
        run = folder.read_run()
        self._folder = folder
        self._progress = progress
        self._specs = run.specs()
        self._existing, self._shortcuts = folder.versions(), folder.shortcuts()
        self._digests = {0: run.base.state_digest}
        self._committed: set[str] = set()
        self._at = folder.store.uri  # what was looked at last, for errors that do not say it
        self._result = RunVerification(
            run.run_id,
            versions=len(self._existing),
            newest=folder.newest_and_stray()[0],
            pruned=self._shortcuts.pruned,
            anchors=len(self._shortcuts.anchors),
            merged=len(self._shortcuts.merged),
        )

    def verify(self) -> RunVerification:
        """Look at everything. Raises: see `verify_run`."""
        checks = list(self._checks())
        for done, (version, check) in enumerate(checks, start=1):
            self._run_check(version, check)
            if self._progress:
                self._progress(done, len(checks), self._result.payload_bytes)
        self._result.leftovers = [name for name in _delta_folders(self._folder) if name not in self._committed]
        return self._result

    def _checks(self) -> Iterator[tuple[int, Check]]:
        """Yield what to look at, each with its version, in order."""
        for version in self._existing:
            yield version, partial(self._version, version)
        for step in self._shortcuts.merged:
            yield step[1], partial(self._merged, step)
        for version in self._shortcuts.anchors:
            yield version, partial(self._anchor, version)
        yield self._shortcuts.pruned, self._mark

    def _run_check(self, version: int, check: Check) -> None:
        try:
            self._result.payload_bytes += check()
        except StoreUnavailable:
            raise
        except DeltaSnapshotError as error:
            self._result.problems.append(RunProblem(version, error.placed(file=self._at, hint=self._hint())))

    def _version(self, version: int) -> int:
        before = max(self._digests)
        record = self._folder.read_version(version)
        self._committed.add(record.folder)
        self._digests[version] = record.state_digest
        try:
            check_link(record, before, self._digests[before])
        except ChainError as error:
            file = f"{self._folder.store.uri}/{layout.version_key(version)}"
            raise error.placed(file=file, hint=self._hint()) from error
        if version <= self._shortcuts.pruned:
            return 0
        self._open(record)
        self._result.changed_elements += record.changed_elements
        return record.payload_bytes

    def _merged(self, step: Step) -> int:
        record = self._folder.read_merged(*step)
        found = (record.base_state_digest, record.state_digest)
        ends = (self._digests.get(step[0]), self._digests.get(step[1]))
        if found != ends:
            raise BaseMismatch(
                f"the merged delta from version {step[0]} to {step[1]} does not lead from one to the other",
                expected=f"state digests {ends[0]} and {ends[1]}",
                found=f"state digests {found[0]} and {found[1]}",
                file=f"{self._folder.store.uri}/{layout.merged_key(*step)}",
                hint="Delete that record: it is a shortcut, and its versions lead the same way. "
                "Then: delta-snapshot compact",
            )
        self._open(record)
        return record.payload_bytes

    def _anchor(self, version: int) -> int:
        record = self._folder.read_anchor(version)
        with scratch_folder() as temporary:
            fetch_anchor(self._folder, record, temporary)
        return record.payload_bytes

    def _mark(self) -> int:
        problem = self._folder.mark_problem()
        if problem is not None:
            raise problem
        return 0

    def _hint(self) -> str:
        return (
            "Engines keep the version before; restore the file from a copy, or let them start from a later anchor. "
            f"See what there is: delta-snapshot log {self._folder.store.uri}"
        )

    def _open(self, record: DeltaRecord) -> None:
        self._at = f"{self._folder.store.uri}/{record.folder}"
        with opened_version(self._folder, record, self._specs):
            pass  # that it opens is the check


def check_link(record: VersionRecord, version: int, state_digest: str) -> None:
    """Check that a version continues another one.

    Args:
        record: the version.
        version: the one before it.
        state_digest: the state that this one ends in.

    Raises:
        BrokenChain: a version between them is missing.
        BaseMismatch: it starts from other weights.
    """
    if record.version != version + 1:
        raise BrokenChain(
            f"nothing leads to version {record.version}",
            file=layout.version_key(version + 1),
            expected=f"version {version + 1}",
            found="it is missing",
            hint="Engines that have not passed this gap cannot cross it.",
        )
    if (record.base_version, record.base_state_digest) != (version, state_digest):
        raise BaseMismatch(
            f"version {record.version} does not continue version {version}",
            file=layout.version_key(record.version),
            expected=f"base version {version} with state digest {state_digest}",
            found=f"base version {record.base_version} with state digest {record.base_state_digest}",
            hint="One of the two records is not what was committed: restore it from a copy (docs/operations.md).",
        )


def _delta_folders(folder: RunFolder) -> list[str]:
    return [f"{layout.DELTAS_FOLDER}/{name}" for name in folder.store.list(layout.DELTAS_FOLDER)]
