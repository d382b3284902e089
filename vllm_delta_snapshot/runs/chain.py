# SPDX-License-Identifier: Apache-2.0
"""Which deltas lead from one version to another. Pure: records in, a plan or an error out.

A merged delta is taken where there is one: it holds at most what the versions that it spans hold. A delta that was
pruned is not asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from vllm_delta_snapshot.errors import (
    BaseMismatch,
    BrokenChain,
    ChainError,
    DeltaSnapshotError,
    FormatError,
    OutOfOrder,
)
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.version import DeltaRecord

__all__ = ["ChainPlan", "Shortcuts", "Step", "known_way", "newest_in_line", "plan_chain", "plan_steps"]

logger = logging.getLogger(__name__)

Step = tuple[int, int]
"""A delta by its base version and its version."""


@dataclass(frozen=True, slots=True)
class Shortcuts:
    """What a run has beside the deltas of its versions, and what it no longer has.

    Attributes:
        anchors: versions that lie there as whole checkpoints, ascending.
        merged: merged deltas.
        pruned: the deltas of versions up to this one are gone; 0 if none is.
    """

    anchors: tuple[int, ...] = ()
    merged: tuple[Step, ...] = ()
    pruned: int = 0


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """The deltas to apply, in order.

    Attributes:
        base_version: where the chain starts.
        version: where it ends.
        base_state_digest: the state it starts from.
        state_digest: the state it ends in.
        steps: one record a delta; empty if there is nothing to do.
    """

    base_version: int
    version: int
    base_state_digest: str
    state_digest: str
    steps: tuple[DeltaRecord, ...]

    @property
    def payload_bytes(self) -> int:
        """Bytes of all payload files."""
        return sum(step.payload_bytes for step in self.steps)


def plan_chain(
    existing: Iterable[int],
    read: Callable[[int, int], DeltaRecord],
    *,
    base_version: int,
    base_state_digest: str,
    version: int,
    shortcuts: Shortcuts | None = None,
) -> ChainPlan:
    """Find the deltas from `base_version` to `version`, as few as there are.

    Args:
        existing: the committed versions.
        read: returns the record of the delta between two versions: a version's own, or a merged one.
        base_version: the version at hand.
        base_state_digest: its state digest.
        version: the version wanted.
        shortcuts: merged deltas, and what was pruned.

    A merged delta whose record lies, or cannot be read, is left aside; only if there is no other way is it raised.

    Raises:
        OutOfOrder: `version` lies before `base_version`.
        BrokenChain: a version between is missing or pruned, or does not start from the one before it.
        BaseMismatch: a delta starts from another state than the one before it ends in.
    """
    existing, shortcuts = list(existing), shortcuts or Shortcuts()
    problem: DeltaSnapshotError | None = None
    while True:
        try:
            numbers = plan_steps(existing, base_version, version, shortcuts)
        except ChainError:
            if problem is not None:
                raise problem from None
            raise
        try:
            return _read_chain(numbers, read, base_version, base_state_digest, version)
        except _MergedLies as lies:
            logger.warning("leaving aside a merged delta: %s", lies.error)
            problem = problem or lies.error
            shortcuts = replace(shortcuts, merged=tuple(step for step in shortcuts.merged if step != lies.step))


class _MergedLies(Exception):
    """The record of a merged delta cannot be believed."""

    def __init__(self, step: Step, error: DeltaSnapshotError) -> None:
        super().__init__(str(error))
        self.step = step
        self.error = error


def _read_chain(
    numbers: Iterable[Step],
    read: Callable[[int, int], DeltaRecord],
    base_version: int,
    base_state_digest: str,
    version: int,
) -> ChainPlan:
    steps = []
    at, digest = base_version, base_state_digest
    for base, number in numbers:
        if base != number - 1:
            record = _read_merged(read, (base, number), digest)
            at, digest = number, record.state_digest
            steps.append(record)
            continue
        record = read(base, number)
        if record.base_version != at:
            raise BrokenChain(
                f"version {number} does not continue the chain",
                file=layout.version_key(number),
                expected=f"base version {at}",
                found=f"base version {record.base_version}",
                hint="The record is out of line: delta-snapshot verify SYNC_DIR.",
            )
        if record.base_state_digest != digest:
            raise BaseMismatch(
                f"version {number} was made against other weights than version {at}",
                file=layout.version_key(number),
                expected=f"state digest {digest}",
                found=f"state digest {record.base_state_digest}",
                hint="The record is of another run or was replaced: delta-snapshot verify SYNC_DIR.",
            )
        at, digest = number, record.state_digest
        steps.append(record)
    return ChainPlan(base_version, version, base_state_digest, digest, tuple(steps))


def _read_merged(read: Callable[[int, int], DeltaRecord], step: Step, digest: str) -> DeltaRecord:
    """Return the record of a merged delta; it has to lead from the state at hand to that of its version."""
    base, number = step
    leads_to = read(number - 1, number).state_digest
    file = layout.merged_key(base, number)
    hint = "Delete that file: the deltas of the versions that it spans serve. Then: delta-snapshot verify SYNC_DIR."
    try:
        record = read(base, number)
    except (ChainError, FormatError) as error:
        raise _MergedLies(step, error.placed(file=file, hint=hint)) from error
    found = (record.base_version, record.base_state_digest, record.state_digest)
    if found != (base, digest, leads_to):
        raise _MergedLies(
            step,
            BaseMismatch(
                f"the merged delta from version {base} to {number} does not lead from one to the other",
                file=file,
                expected=f"from version {base}, state digests {digest} and {leads_to}",
                found=f"from version {found[0]}, state digests {found[1]} and {found[2]}",
                hint=hint,
            ),
        )
    return record


def plan_steps(existing: Iterable[int], base_version: int, version: int, shortcuts: Shortcuts) -> list[tuple[int, int]]:
    """Return the deltas of the shortest way. Looks at numbers only.

    Raises:
        OutOfOrder: `version` lies before `base_version`.
        BrokenChain: there is no way; names what is missing.
    """
    if version < base_version:
        raise OutOfOrder(
            "cannot go back to an earlier version",
            file=layout.version_key(version) if version >= 0 else None,
            expected=f"version {base_version} or later",
            found=f"version {version}",
            hint="Start from an earlier version, the base or an anchor; an engine goes back with allow_rollback.",
        )
    available = set(existing)
    between = sorted(number for number in available if base_version < number <= version)
    if len(between) < version - base_version:
        missing = list(islice(_missing(between, base_version + 1, version), 11))
        listed = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        raise BrokenChain(
            f"no way from version {base_version} to version {version}",
            file=layout.version_key(missing[0]) if missing[0] <= layout.MAX_VERSION else None,
            expected=f"versions {base_version + 1} to {version}",
            found=f"newest is {max(available, default=0)}, missing: {listed}",
            hint="delta-snapshot verify SYNC_DIR says which records are out of line.",
        )
    own = [(number - 1, number) for number in between if number > shortcuts.pruned]
    steps = _fewest((*own, *shortcuts.merged), base_version, version)
    if steps is None:
        raise BrokenChain(
            f"no way from version {base_version} to version {version}",
            file=layout.version_key(base_version + 1),
            expected=f"deltas from version {base_version + 1} on",
            found=f"deltas up to version {shortcuts.pruned} were pruned",
            hint="An engine that starts now comes there from an anchor: restart this one.",
        )
    return steps


def known_way(known: Iterable[Step], base_version: int, version: int) -> list[Step] | None:
    """Return the fewest of some deltas that lead from one version to another; ``None`` if they do not."""
    return _fewest(known, base_version, version)


def newest_in_line(existing: Iterable[int], anchors: Iterable[int]) -> int:
    """Return the newest version that something leads to: every version from the base, or from an anchor, on.

    What lies beyond is stray: somebody's mistake, a leftover of another run, or a sign that a record was lost. Work is
    bounded by what exists, whatever its numbers.
    """
    there = set(existing)
    newest = 0
    for start in (0, *sorted(set(anchors) & there)):
        at = max(newest, start)
        while at + 1 in there:
            at += 1
        newest = at
    return newest


def _missing(there: Sequence[int], first: int, last: int) -> Iterator[int]:
    """Yield the numbers from first to last that are not there, one by one: who asks for a few pays for a few."""
    expected = first
    for number in (*there, last + 1):
        yield from range(expected, number)
        expected = number + 1


def _fewest(steps: Iterable[Step], base_version: int, version: int) -> list[Step] | None:
    # By version, how many deltas lead there and from where the last one comes; what leads to a start comes before it.
    reached: dict[int, tuple[int, int]] = {base_version: (0, base_version)}
    for start, end in sorted(steps, key=lambda step: (step[1], step[0])):
        if start not in reached or not start < end <= version:
            continue
        way = (reached[start][0] + 1, start)
        reached[end] = min(reached.get(end, way), way)
    if version not in reached:
        return None
    found = []
    at = version
    while at != base_version:
        found.append((reached[at][1], at))
        at = reached[at][1]
    return found[::-1]
