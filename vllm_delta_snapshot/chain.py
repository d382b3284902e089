# SPDX-License-Identifier: Apache-2.0
"""Which deltas lead from one version to another. Pure: records in, a plan or an error out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllm_delta_snapshot.errors import BaseMismatch, BrokenChain, OutOfOrder
from vllm_delta_snapshot.format.version import VersionRecord

__all__ = ["ChainPlan", "plan_chain"]


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
    steps: tuple[VersionRecord, ...]


def plan_chain(
    existing: Iterable[int],
    read: Callable[[int], VersionRecord],
    *,
    base_version: int,
    base_state_digest: str,
    version: int,
) -> ChainPlan:
    """Find the deltas from `base_version` to `version`.

    Args:
        existing: the committed versions.
        read: returns the record of a committed version.
        base_version: the version at hand.
        base_state_digest: its state digest.
        version: the version wanted.

    Raises:
        OutOfOrder: `version` lies before `base_version`.
        BrokenChain: a version between is missing, or does not start from the one before it.
        BaseMismatch: a delta starts from another state than the one before it ends in.
    """
    if version < base_version:
        raise OutOfOrder(
            "cannot go back to an earlier version",
            expected=f"version {base_version} or later",
            found=f"version {version}",
        )
    wanted = range(base_version + 1, version + 1)
    available = set(existing)
    missing = [number for number in wanted if number not in available]
    if missing:
        newest = max(available, default=0)
        listed = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        raise BrokenChain(
            f"no way from version {base_version} to version {version}",
            expected=f"versions {wanted.start} to {version}",
            found=f"newest is {newest}, missing: {listed}",
        )
    steps = []
    at, digest = base_version, base_state_digest
    for number in wanted:
        record = read(number)
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
