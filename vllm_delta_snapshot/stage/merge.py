# SPDX-License-Identifier: Apache-2.0
"""Merge: the patches of several versions -> one patch a tensor; where two touch an element, the later one wins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from vllm_delta_snapshot.types import TensorPatch

__all__ = ["merge"]


def merge(versions: Iterable[Sequence[TensorPatch]]) -> list[TensorPatch]:
    """Merge patches of absolute values.

    Args:
        versions: the patches of each version, oldest first.

    Returns:
        One patch for every tensor that any version touched, in order of first appearance. Applying them equals
        applying the versions one by one. A tensor touched once keeps its arrays.
    """
    by_name: dict[str, list[TensorPatch]] = {}
    for patches in versions:
        for patch in patches:
            by_name.setdefault(patch.spec.name, []).append(patch)
    return [_merge_one(patches) for patches in by_name.values()]


def _merge_one(patches: list[TensorPatch]) -> TensorPatch:
    if len(patches) == 1:
        return patches[0]
    spec = patches[0].spec
    positions = np.concatenate([patch.positions for patch in patches])
    values = np.concatenate([patch.values for patch in patches])
    # A stable sort keeps equal positions in version order, so the last of each group is the newest. On runs that
    # are sorted already it is a merge (docs/design.md, "Merge").
    order = np.argsort(positions, kind="stable")
    positions = positions[order]
    is_last = np.ones(positions.size, dtype=bool)
    np.not_equal(positions[1:], positions[:-1], out=is_last[:-1])
    return TensorPatch(spec, positions[is_last], values[order[is_last]])
