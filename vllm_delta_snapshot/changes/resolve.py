# SPDX-License-Identifier: Apache-2.0
"""Resolve: a change and the values that it starts from -> the new values, proven by the digests of its writer.

Differences are nothing without the exact old values, and with any others they would make weights that nobody trained.
So the old values' digest is compared where it is known, and in any case how far the new ones' is from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.errors import BaseMismatch
from vllm_delta_snapshot.format.digest import add_digests, format_digest, patch_digest
from vllm_delta_snapshot.format.metadata import DeltaMetadata, TensorEntry
from vllm_delta_snapshot.types import Change, TensorDifference, TensorPatch

__all__ = ["resolve", "resolve_all", "resolve_entry"]

_HINT = "The weights that it is applied to were changed by something else; start again from the base."


def resolve(change: TensorDifference, old: Bits, *, old_digest: int | None, move: int) -> TensorPatch:
    """Return the patch that a difference is for given old values.

    Args:
        change: what changes.
        old: the bit patterns at its positions, shape ``(changed,)``.
        old_digest: their digest; ``None`` if it is not known.
        move: by how much it moves the digest of the tensor, modulo 2**64.

    Raises:
        BaseMismatch: the old values are not the ones it was made against.
    """
    before = patch_digest(change.spec, change.positions, old)
    if old_digest is not None and before != add_digests(old_digest):
        raise BaseMismatch(
            "the values before are not the ones this delta was made against",
            tensor=change.spec.name,
            expected=f"digest {format_digest(old_digest)}",
            found=f"digest {format_digest(before)}",
            hint=_HINT,
        )
    patch = change.resolve(old)
    moved = add_digests(patch_digest(patch.spec, patch.positions, patch.values), -before)
    if moved != add_digests(move):
        raise BaseMismatch(
            "the differences do not lead from the values before to the published ones",
            tensor=change.spec.name,
            expected=f"a digest moved by {format_digest(move)}",
            found=f"by {format_digest(moved)}",
            hint=_HINT,
        )
    return patch


def resolve_entry(entry: TensorEntry, change: Change, bits: Callable[[str], Bits]) -> TensorPatch:
    """Resolve one change of a delta; a patch is returned as it is.

    Args:
        entry: what metadata says of it.
        change: the change.
        bits: returns all elements of a tensor before, by name; asked for a difference only.

    Raises:
        BaseMismatch: see `resolve`.
    """
    if isinstance(change, TensorPatch):
        return change
    old_digest = None if entry.old_digest is None else int(entry.old_digest, 16)
    return resolve(change, bits(change.spec.name)[change.positions], old_digest=old_digest, move=entry.moves_digest)


def resolve_all(
    metadata: DeltaMetadata, changes: Sequence[Change], bits: Callable[[str], Bits]
) -> Iterator[TensorPatch]:
    """Resolve every change of a delta, one by one.

    Args:
        metadata: its metadata.
        changes: one a tensor, in the order of ``layer_names``.
        bits: returns all elements of a tensor before, by name.

    Raises:
        BaseMismatch: see `resolve`.
    """
    for entry, change in zip(metadata.by_tensor, changes, strict=True):
        yield resolve_entry(entry, change, bits)
