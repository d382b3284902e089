# SPDX-License-Identifier: Apache-2.0
"""Parts: the changes that several trainers made in one tensor -> one change, as if a single one had written it.

They stand together in the table, are of one kind, and no position is in two of them. Whatever comes after this (merge,
stage, resolve, apply) sees one change a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

import numpy as np

from vllm_delta_snapshot.errors import CorruptFile
from vllm_delta_snapshot.types import Change, TensorDifference, TensorPatch, position_dtype

__all__ = ["join_parts"]


def join_parts(changes: Sequence[Change]) -> list[Change]:
    """Join neighbouring changes of one tensor.

    Args:
        changes: in the order of ``layer_names``. A tensor that has only one keeps its arrays.

    Raises:
        CorruptFile: parts are of different kinds, mixed ones, or have a position in common.
    """
    return [_join(list(parts)) for _, parts in groupby(changes, key=lambda change: change.spec.name)]


def _join(parts: Sequence[Change]) -> Change:
    if len(parts) == 1:
        return parts[0]
    spec = parts[0].spec
    kind = type(parts[0])
    if any(type(part) is not kind or (isinstance(part, TensorDifference) and part.is_mixed) for part in parts):
        raise CorruptFile(
            "parts of a tensor are of different kinds",
            tensor=spec.name,
            expected="all new values, or all differences",
            found=", ".join(sorted({_kind(part) for part in parts})),
        )
    parts = sorted((part for part in parts if part.changed), key=lambda part: int(part.positions[0])) or parts[:1]
    positions = np.concatenate([part.positions for part in parts]).astype(position_dtype(spec.numel), copy=False)
    values = np.concatenate([part.values for part in parts])
    if any(first.positions[-1] >= second.positions[0] for first, second in pairwise(parts)):
        order = np.argsort(positions, kind="stable")  # a merge, as each part is sorted
        positions, values = positions[order], values[order]
        doubled = np.flatnonzero(positions[1:] == positions[:-1])
        if doubled.size:
            raise CorruptFile(
                "parts of a tensor overlap",
                tensor=spec.name,
                expected="every position in one part",
                found=f"{doubled.size} positions in several, the first is {int(positions[doubled[0]])}",
            )
    return TensorPatch(spec, positions, values) if kind is TensorPatch else TensorDifference(spec, positions, values)


def _kind(part: Change) -> str:
    if isinstance(part, TensorPatch):
        return "new values"
    return "a mixture" if part.is_mixed else "differences"
