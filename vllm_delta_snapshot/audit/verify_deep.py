# SPDX-License-Identifier: Apache-2.0
"""Prove a run to the end: take a copy of its base through every version, and compare whatever else leads there.

Beyond what `verify_run` does, which this builds on: the values before every change are those that its writer saw, the
digests of every tensor are recomputed from the bytes, version by version, merged deltas lead where the versions that
they span lead, and anchors have the very bits. What cannot be proven, because deltas were pruned, is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from vllm_delta_snapshot.audit.verify_run import Check, Progress, RunVerification, Verifier
from vllm_delta_snapshot.audit.working_copy import WorkingCopy
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import StageError, VerifyError
from vllm_delta_snapshot.format.digest import format_digest
from vllm_delta_snapshot.format.version import DeltaRecord
from vllm_delta_snapshot.runs.chain import Step
from vllm_delta_snapshot.runs.fetch_anchor import fetch_anchor
from vllm_delta_snapshot.runs.replay import check_base
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.util.scratch import scratch_folder

__all__ = ["verify_deep"]


def verify_deep(
    folder: RunFolder, base: Checkpoint | None, *, scratch: Path | None = None, progress: Progress | None = None
) -> RunVerification:
    """Prove a run. Blocks. Takes the size of one checkpoint on the local disk, two while an anchor is compared.

    Args:
        folder: the run.
        base: the base checkpoint, local; ``None`` if it is not at hand: then the proof begins at the oldest anchor.
        scratch: where to put the copy; by default the temp folder.
        progress: told after every version, merged delta and anchor.

    Returns:
        What was found; problems are in it, not raised.

    Raises:
        BaseMismatch, SourceError: `base` is not the base checkpoint of the run.
        ObjectNotFound, CorruptFile, UnsupportedFormat: there is no readable run.json.
        StageError: the local disk failed.
        StoreUnavailable: the store went away.
    """
    if base is not None:
        check_base(folder.read_run(), base)
    try:
        with scratch_folder("delta-snapshot-verify-", scratch) as temporary:
            return _DeepVerifier(folder, base, temporary, progress).verify()
    except OSError as error:
        if isinstance(error, FileNotFoundError) and scratch is not None and not scratch.is_dir():
            raise StageError("there is no such folder", file=str(scratch), hint="Make it, or give another.") from error
        raise


class _DeepVerifier(Verifier):
    """One pass, in the order of versions."""

    def __init__(self, folder: RunFolder, base: Checkpoint | None, scratch: Path, progress: Progress | None) -> None:
        super().__init__(folder, progress)
        self._base = base
        self._scratch = scratch
        self._copy = WorkingCopy(folder, scratch)
        self._foreseen: dict[int, list[tuple[int, dict[str, int]]]] = {}
        self._unproven: list[int] = []
        self._seen: set[Step] = set()

    def verify(self) -> RunVerification:
        if self._base is not None:
            self._copy.start(self._base, 0)
            self._result.newest_proven = 0
        super().verify()
        if self._copy.at is not None and self._copy.at == self._result.newest:
            self._run_check(self._copy.at, self._last)
        for version, foreseen in self._foreseen.items():
            for base, _ in foreseen:
                self._not_compared((base, version), version)
        self._result.not_checked += _sentences(self._unproven)
        self._result.problems.sort(key=lambda problem: problem.version)
        return self._result

    def _checks(self) -> Iterator[tuple[int, Check]]:
        numbers = {*self._existing, *self._shortcuts.anchors, *(base for base, _ in self._shortcuts.merged)}
        for version in sorted(numbers | {0}):
            if version in self._existing:
                yield version, partial(self._version, version)
            if version in self._shortcuts.anchors:
                yield version, partial(self._anchor, version)
            for step in self._shortcuts.merged:
                if step[0] == version:
                    yield step[1], partial(self._foresee, step)
        for step in self._shortcuts.merged:
            yield step[1], partial(self._merged, step)
        yield self._shortcuts.pruned, self._mark

    def _version(self, version: int) -> int:
        try:
            num_bytes = super()._version(version)
            if self._copy.at != version:
                self._come_by_merged(version)
        except BaseException:
            self._copy.at = None
            raise
        finally:
            self._note(version)
        self._compare_foreseen(version)
        return num_bytes

    def _open(self, record: DeltaRecord) -> None:
        if (record.base_version, record.version) in self._seen:
            return
        if self._copy.at is not None and self._copy.at == record.base_version:
            self._at = f"{self._folder.store.uri}/{record.folder}"
            self._copy.take(record)
        else:
            super()._open(record)

    def _come_by_merged(self, version: int) -> None:
        """Come to a version, to which none of its own leads, by a merged delta from where the copy is, if there is."""
        at = self._copy.at
        if at is not None and (at, version) in self._shortcuts.merged:
            self._copy.take(self._folder.read_merged(at, version))

    def _anchor(self, version: int) -> int:
        record = self._folder.read_anchor(version)
        with scratch_folder("anchor-", self._scratch) as temporary:
            anchor = fetch_anchor(self._folder, record, temporary)
            if self._copy.at == version:
                uri = self._folder.store.uri
                hint = f"Delete it: delta-snapshot prune {uri} --drop-anchor {version} --yes"
                self._copy.compare(anchor, file=f"{uri}/{record.folder}", hint=hint)
            else:
                self._copy.start(anchor, version)
                self._unproven = [number for number in self._unproven if number != version]
                self._result.newest_proven = version
        return record.payload_bytes

    def _foresee(self, step: Step) -> int:
        """Look where a merged delta leads to, while the copy is where it starts."""
        if self._copy.at != step[0]:
            self._not_compared(step, step[0])
            return 0
        self._seen.add(step)
        digests = self._copy.foresee(self._folder.read_merged(*step))
        self._foreseen.setdefault(step[1], []).append((step[0], digests))
        return 0

    def _not_compared(self, step: Step, version: int) -> None:
        self._result.not_checked.append(
            f"whether the merged delta from version {step[0]} to {step[1]} leads where the versions between them do: "
            f"the weights of version {version} cannot be had"
        )

    def _compare_foreseen(self, version: int) -> None:
        for base, digests in self._foreseen.pop(version, ()) if self._copy.at == version else ():
            for name, digest in digests.items():
                if digest != self._copy.digests[name]:
                    record = self._folder.read_merged(base, version)
                    raise VerifyError(
                        f"the merged delta from version {base} leads to other weights of version {version}",
                        file=f"{self._folder.store.uri}/{record.folder}",
                        tensor=name,
                        expected=f"digest {format_digest(self._copy.digests[name])}",
                        found=f"digest {format_digest(digest)}",
                        hint="Engines that come by it refuse it; delete its record in merged/ and merge again: "
                        f"delta-snapshot compact {self._folder.store.uri} --from {base} --to {version}",
                    )

    def _note(self, version: int) -> None:
        if self._copy.at == version:
            self._result.newest_proven = version
        else:
            self._unproven.append(version)

    def _last(self) -> int:
        self._copy.check_bytes()
        return 0


def _sentences(versions: list[int]) -> list[str]:
    """Say which versions were not reached, as ranges."""
    ranges: list[list[int]] = []
    for version in versions:
        if ranges and ranges[-1][1] == version - 1:
            ranges[-1][1] = version
        else:
            ranges.append([version, version])
    return [
        f"the weights of version {first}: nothing that is whole leads there from the base or an anchor"
        if first == last
        else f"the weights of versions {first} to {last}: nothing that is whole leads there from the base or an anchor"
        for first, last in ranges
    ]
