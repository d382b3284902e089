# SPDX-License-Identifier: Apache-2.0
"""Which deltas lead from one version to another. Pure: records in, a plan or an error out.

A merged delta is taken where there is one: it holds at most what the versions that it spans hold. A delta that was
pruned is not asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllm_delta_snapshot.errors import BaseMismatch, BrokenChain, OutOfOrder
from vllm_delta_snapshot.format.version import DeltaRecord

__all__ = ["ChainPlan", "Shortcuts", "Step", "known_way", "plan_chain", "plan_steps"]

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

    Raises:
        OutOfOrder: `version` lies before `base_version`.
        BrokenChain: a version between is missing or pruned, or does not start from the one before it.
        BaseMismatch: a delta starts from another state than the one before it ends in.
    """
    steps = []
    at, digest = base_version, base_state_digest
    for base, number in plan_steps(existing, base_version, version, shortcuts or Shortcuts()):
        record = read(base, number)
        if record.base_version != at:
            raise BrokenChain(
                f"version {number} does not continue the chain",
                expected=f"base version {at}",
                found=f"base version {record.base_version}",
            )
        if record.base_state_digest != digest:
            raise BaseMismatch(
                f"version {number} was made against other weights than version {at}",
                expected=f"state digest {digest}",
                found=f"state digest {record.base_state_digest}",
            )
        at, digest = number, record.state_digest
        steps.append(record)
    return ChainPlan(base_version, version, base_state_digest, digest, tuple(steps))


def plan_steps(existing: Iterable[int], base_version: int, version: int, shortcuts: Shortcuts) -> list[tuple[int, int]]:
    """Return the deltas of the shortest way. Looks at numbers only.

    Raises:
        OutOfOrder: `version` lies before `base_version`.
        BrokenChain: there is no way; names what is missing.
    """
    if version < base_version:
        raise OutOfOrder(
            "cannot go back to an earlier version",
            expected=f"version {base_version} or later",
            found=f"version {version}",
        )
    available = set(existing)
    if missing := [number for number in range(base_version + 1, version + 1) if number not in available]:
        listed = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        raise BrokenChain(
            f"no way from version {base_version} to version {version}",
            expected=f"versions {base_version + 1} to {version}",
            found=f"newest is {max(available, default=0)}, missing: {listed}",
        )
    # By version, how many deltas lead there and from where the last one comes.
    reached: dict[int, tuple[int, int]] = {base_version: (0, base_version)}
    bases_of: dict[int, list[int]] = {}
    for base, end in shortcuts.merged:
        bases_of.setdefault(end, []).append(base)
    for number in range(base_version + 1, version + 1):
        bases = [base for base in bases_of.get(number, ()) if base in reached]
        if number > shortcuts.pruned and number - 1 in reached:
            bases.append(number - 1)
        if bases:
            count, base = min((reached[base][0], base) for base in bases)
            reached[number] = (count + 1, base)
    if version not in reached:
        raise BrokenChain(
            f"no way from version {base_version} to version {version}",
            expected=f"deltas from version {base_version + 1} on",
            found=f"deltas up to version {shortcuts.pruned} were pruned",
            hint="An engine that starts now comes there from an anchor: restart this one.",
        )
    steps = []
    at = version
    while at != base_version:
        steps.append((reached[at][1], at))
        at = reached[at][1]
    return steps[::-1]


def known_way(known: Iterable[Step], base_version: int, version: int) -> list[Step] | None:
    """Return the fewest of some deltas that lead from one version to another; ``None`` if they do not."""
    steps = tuple(step for step in known if base_version <= step[0] and step[1] <= version)
    try:
        # Without the deltas that each version has in the store: what is known is all there is.
        return plan_steps(
            range(base_version + 1, version + 1), base_version, version, Shortcuts(merged=steps, pruned=version)
        )
    except BrokenChain:
        return None
