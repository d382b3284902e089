# SPDX-License-Identifier: Apache-2.0
"""Verify: the values about to be overwritten are the ones that the trainer published, in the engine as a whole.

Every worker has digests of what it holds. Equal slices on several workers must have equal digests; distinct slices
add up to the tensor. So drift is found in replicas too, and a part of a tensor is as good as all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm_delta_snapshot.engine.write.lanes import RunDigest
from vllm_delta_snapshot.errors import BaseMismatch
from vllm_delta_snapshot.format.digest import add_digests, format_digest
from vllm_delta_snapshot.host.places import Box

__all__ = ["sum_over_workers", "verify_old"]

_HINT = "Write its weights anew: delta-snapshot repair --server URL; or restart the engine."


def sum_over_workers(
    workers: Sequence[Sequence[RunDigest]], unequal: dict[str, str] | None = None
) -> dict[str, int | None]:
    """Return the digest of each tensor from those of its parts.

    Args:
        workers: the digests of each worker of the engine, in order of rank.
        unequal: gets, by name, which workers hold the same elements and have different values.

    Returns:
        By checkpoint name; ``None`` if it cannot be known.

    Raises:
        BaseMismatch: there are such workers, and nobody takes the names; names tensor and workers.
    """
    seen: dict[tuple[str, Box], tuple[int, int | None]] = {}
    for rank, digests in enumerate(workers):
        own: dict[tuple[str, Box], int | None] = {}
        for name, box, digest in digests:
            # A worker may hold elements twice, as tied tensors do: then both are compared like replicas.
            if own.setdefault((name, box), digest) != digest:
                _note_unequal(name, rank, rank, unequal)
        for key, digest in own.items():
            first, expected = seen.setdefault(key, (rank, digest))
            if digest != expected:
                _note_unequal(key[0], first, rank, unequal)
    totals: dict[str, int | None] = {}
    for (name, _), (_, digest) in seen.items():
        total = totals.get(name, 0)
        totals[name] = None if total is None or digest is None else add_digests(total, digest)
    return totals


def _note_unequal(name: str, first: int, second: int, unequal: dict[str, str] | None) -> None:
    if unequal is not None:
        unequal[name] = f"worker {second} has other values than worker {first}"
        return
    raise BaseMismatch(
        "live weights that should be equal differ; something else changed them",
        tensor=name,
        expected=f"the values of worker {first}",
        found=f"others on worker {second}",
        hint=_HINT,
    )


def verify_old(found: Mapping[str, int | None], expected: Mapping[str, str | None]) -> set[str]:
    """Compare the values about to be overwritten with those that the update starts from.

    Args:
        found: by name, the digest of the live values at the touched positions.
        expected: by name, the digest in metadata; ``None`` where it is not known.

    Returns:
        The names of the tensors that were proven.

    Raises:
        BaseMismatch: the live weights have drifted from the published ones.
    """
    proven = set()
    for name, digest in expected.items():
        total = found.get(name, 0)
        if total is None or digest is None:
            continue
        if format_digest(total) != digest:
            raise BaseMismatch(
                "live weights are not the ones this delta was made against; they were changed by something else",
                tensor=name,
                expected=f"digest {digest}",
                found=f"digest {format_digest(total)}",
                hint=_HINT,
            )
        proven.add(name)
    return proven


def verify_moves(
    before: Mapping[str, int | None], after: Mapping[str, int | None], moves: Mapping[str, str]
) -> set[str]:
    """Compare how far the digests of touched values move with what the trainer published.

    Where only differences are known, this proves both ends: with any other old values, old and new terms of the digest
    would be others, and so would what lies between them.

    Args:
        before: by name, the digest of the live values at the touched positions.
        after: by name, the digest of the values about to be written.
        moves: by name, how far the update moves it.

    Returns:
        The names of the tensors that were proven.

    Raises:
        BaseMismatch: the live weights have drifted from the published ones, or the update is wrong.
    """
    proven = set()
    for name, expected in moves.items():
        old, new = before.get(name, 0), after.get(name, 0)
        if old is None or new is None:
            continue
        if format_digest(add_digests(new, -old)) != expected:
            raise BaseMismatch(
                "this delta does not lead from the live weights to the published ones",
                tensor=name,
                expected=f"a digest moved by {expected}",
                found=f"by {format_digest(add_digests(new, -old))}",
                hint=_HINT,
            )
        proven.add(name)
    return proven
