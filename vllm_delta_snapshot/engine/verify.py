# SPDX-License-Identifier: Apache-2.0
"""Verify: the values about to be overwritten are the ones that the trainer published, in the engine as a whole.

Every worker has digests of what it holds. Equal slices on several workers must have equal digests; distinct slices
add up to the tensor. So drift is found in replicas too, and a part of a tensor is as good as all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm_delta_snapshot.engine.lanes import RunDigest
from vllm_delta_snapshot.errors import BaseMismatch
from vllm_delta_snapshot.format.digest import add_digests, format_digest
from vllm_delta_snapshot.stage.places import Box

__all__ = ["sum_over_workers", "verify_old"]

_HINT = "Restart the engine from the base checkpoint; it catches up by itself."


def sum_over_workers(workers: Sequence[Sequence[RunDigest]]) -> dict[str, int | None]:
    """Return the digest of each tensor from those of its parts.

    Args:
        workers: the digests of each worker of the engine, in order of rank.

    Returns:
        By checkpoint name; ``None`` if it cannot be known.

    Raises:
        BaseMismatch: workers that hold the same elements have different values; names tensor and workers.
    """
    seen: dict[tuple[str, Box], tuple[int, int | None]] = {}
    for rank, digests in enumerate(workers):
        own: dict[tuple[str, Box], int | None] = {}
        for name, box, digest in digests:
            # A worker may hold elements twice, as tied tensors do: then both are compared like replicas.
            if own.setdefault((name, box), digest) != digest:
                _refuse_replicas(name, rank, rank)
        for key, digest in own.items():
            first, expected = seen.setdefault(key, (rank, digest))
            if digest != expected:
                _refuse_replicas(key[0], first, rank)
    totals: dict[str, int | None] = {}
    for (name, _), (_, digest) in seen.items():
        total = totals.get(name, 0)
        totals[name] = None if total is None or digest is None else add_digests(total, digest)
    return totals


def _refuse_replicas(name: str, first: int, second: int) -> None:
    raise BaseMismatch(
        "live weights that should be equal differ; something else changed them",
        tensor=name,
        expected=f"the values of worker {first}",
        found=f"others on worker {second}",
        hint=_HINT,
    )


def verify_old(
    workers: Sequence[Sequence[RunDigest]], old_digests: Mapping[str, str], changed: Mapping[str, int]
) -> int:
    """Compare the values about to be overwritten with those that the update starts from.

    Args:
        workers: the digests of each worker of the engine, in order of rank.
        old_digests: by name, the digest in metadata; of the tensors that this engine writes. Empty if unknown.
        changed: by name, how many elements change.

    Returns:
        How many tensors were proven.

    Raises:
        BaseMismatch: the live weights have drifted from the published ones.
    """
    totals = sum_over_workers(workers)
    proven = 0
    for name, expected in old_digests.items():
        total = totals.get(name, 0)
        if total is None or not changed[name]:
            continue
        if format_digest(total) != expected:
            raise BaseMismatch(
                "live weights are not the ones this delta was made against; they were changed by something else",
                tensor=name,
                expected=f"digest {expected}",
                found=f"digest {format_digest(total)}",
                hint=_HINT,
            )
        proven += 1
    return proven
