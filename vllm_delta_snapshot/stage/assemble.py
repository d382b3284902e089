# SPDX-License-Identifier: Apache-2.0
"""Assemble: the patches of several versions -> one update between any two of them, forward or back.

Pure: the caller has the patches. The digests of the values that an update replaces are known without having the values:
each version's metadata says by how much it moved them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from vllm_delta_snapshot.delta_folder import DigestedPatch
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.format.digest import add_digests, patch_digest
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.stage.merge import merge
from vllm_delta_snapshot.types import TensorPatch

__all__ = ["assemble_back", "assemble_forward"]

Steps = Sequence[Sequence[TensorPatch]]


def assemble_forward(steps: Steps, metadata: Sequence[DeltaMetadata]) -> list[DigestedPatch]:
    """Merge consecutive versions into one update.

    Args:
        steps: the patches of each version, oldest first.
        metadata: of the same versions.
    """
    moves: dict[str, int] = {}
    for of_version in metadata:
        for entry in of_version.tensors:
            move = int(entry.new_digest, 16) - int(entry.old_digest, 16)
            moves[entry.name] = add_digests(moves.get(entry.name, 0), move)
    digested = []
    for patch in merge(steps):
        new = _digest(patch)
        digested.append(DigestedPatch(patch, add_digests(new, -moves[patch.spec.name]), new))
    return digested


def assemble_back(before: Steps, after: Steps, start_bits: Callable[[str], Bits]) -> list[DigestedPatch]:
    """Make the update that undoes versions.

    Args:
        before: the patches of the versions from the start to the one to go back to, oldest first.
        after: the patches of the versions to undo, oldest first.
        start_bits: returns all elements of a tensor at the start, by name.
    """
    known: Mapping[str, TensorPatch] = {patch.spec.name: patch for patch in merge(before)}
    digested = []
    for patch in merge(after):
        values = start_bits(patch.spec.name)[patch.positions]
        earlier = known.get(patch.spec.name)
        if earlier is not None and earlier.changed:
            found = np.searchsorted(earlier.positions, patch.positions)
            found[found == earlier.changed] = 0
            hit = earlier.positions[found] == patch.positions
            values[hit] = earlier.values[found[hit]]
        back = TensorPatch(patch.spec, patch.positions, values)
        digested.append(DigestedPatch(back, _digest(patch), _digest(back)))
    return digested


def _digest(patch: TensorPatch) -> int:
    return patch_digest(patch.spec, patch.positions, patch.values)
