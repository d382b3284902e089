# SPDX-License-Identifier: Apache-2.0
"""Assemble: the changes of several versions -> one update between any two of them, forward or back.

Pure: the caller has the changes. The digests of the values that an update replaces are known without having the values:
each version's metadata says by how much it moved them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from vllm_delta_snapshot.changes.merge import merge
from vllm_delta_snapshot.changes.resolve import resolve
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.format.digest import add_digests, patch_digest
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.runs.delta_folder import DigestedChange
from vllm_delta_snapshot.types import Change, TensorDifference, TensorPatch

__all__ = ["assemble_absolute", "assemble_back", "assemble_forward"]

Steps = Sequence[Sequence[Change]]
BitsOf = Callable[[str], Bits]
"""Returns all elements of a tensor at some version, by name."""


def assemble_forward(steps: Steps, metadata: Sequence[DeltaMetadata]) -> Iterator[DigestedChange]:
    """Merge consecutive versions into one update.

    Args:
        steps: the changes of each version, oldest first.
        metadata: of the same versions.
    """
    moves = _moves(metadata)
    for change in merge(steps):
        move = moves[change.spec.name]
        if isinstance(change, TensorPatch):
            new = _digest(change)
            yield DigestedChange(change, add_digests(new, -move), new)
        elif change.changed or move:
            yield DigestedChange(change, None, move)


def assemble_back(
    before: Callable[[], Steps], after: Steps, metadata: Sequence[DeltaMetadata], start_bits: BitsOf
) -> Iterator[DigestedChange]:
    """Make the update that undoes versions: differences are turned around, absolute values are looked up.

    Args:
        before: returns the changes of the versions from the start to the one to go back to, oldest first; asked only
            if values have to be looked up.
        after: the changes of the versions to undo, oldest first.
        metadata: of the versions to undo.
        start_bits: returns all elements of a tensor at the start, by name.
    """
    moves = _moves(metadata)
    earlier: Mapping[str, Change] | None = None
    for change in merge(after):
        move = moves[change.spec.name]
        if isinstance(change, TensorDifference) and not change.is_mixed:
            if change.changed or move:
                back = TensorDifference(change.spec, change.positions, -change.values)
                yield DigestedChange(back, None, add_digests(-move))
            continue
        if earlier is None:
            earlier = {known.spec.name: known for known in merge(before())}
        yield _absolute(change, -move, earlier.get(change.spec.name), start_bits)


def assemble_absolute(
    digested: Iterator[DigestedChange], before: Callable[[], Steps], start_bits: BitsOf
) -> Iterator[DigestedChange]:
    """Turn an update's differences into absolute values.

    Args:
        digested: the update.
        before: returns the changes from the start to the version that the update leads to, oldest first.
        start_bits: returns all elements of a tensor at the start, by name.

    Raises:
        BaseMismatch: the start is not what it should be. Not found where only some values are differences.
    """
    earlier: Mapping[str, Change] | None = None
    for item in digested:
        if isinstance(item.change, TensorPatch):
            yield item
            continue
        if earlier is None:
            earlier = {known.spec.name: known for known in merge(before())}
        made = _absolute(item.change, item.move, earlier.get(item.change.spec.name), start_bits)
        if not item.change.is_mixed:
            old = made.change.values - item.change.values
            resolve(item.change, old, old_digest=item.old_digest, move=item.move)
        yield made


def _absolute(change: Change, move: int, earlier: Change | None, start_bits: BitsOf) -> DigestedChange:
    """Return a change's positions with the values that they come to.

    Args:
        change: says which positions.
        move: by how much the update moves the tensor's digest.
        earlier: what changes in the tensor from the start to where the update leads.
        start_bits: returns all elements of a tensor at the start.
    """
    values = start_bits(change.spec.name)[change.positions]
    if earlier is not None and earlier.changed:
        found = np.searchsorted(earlier.positions, change.positions)
        found[found == earlier.changed] = 0
        hit = earlier.positions[found] == change.positions
        known = _selected(earlier, found[hit])
        values[hit] = known.resolve(values[hit]).values if isinstance(known, TensorDifference) else known.values
    patch = TensorPatch(change.spec, change.positions, values)
    new = _digest(patch)
    return DigestedChange(patch, add_digests(new, -move), new)


def _selected(change: Change, which: np.ndarray[tuple[int], np.dtype[np.intp]]) -> Change:
    positions, values = change.positions[which], change.values[which]
    if isinstance(change, TensorPatch):
        return TensorPatch(change.spec, positions, values)
    absolute = None if change.absolute is None else change.absolute[which]
    return TensorDifference(change.spec, positions, values, absolute)


def _moves(metadata: Sequence[DeltaMetadata]) -> dict[str, int]:
    moves: dict[str, int] = {}
    for of_version in metadata:
        for entry in of_version.tensors:
            moves[entry.name] = add_digests(moves.get(entry.name, 0), entry.moves_digest)
    return moves


def _digest(patch: TensorPatch) -> int:
    return patch_digest(patch.spec, patch.positions, patch.values)
