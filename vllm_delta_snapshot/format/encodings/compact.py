# SPDX-License-Identifier: Apache-2.0
"""The compact encodings: how positions are written, and how values are, for many tensors at once.

| name | positions | values |
|---|---|---|
| `packed` | gaps | new, in planes |
| `bitmap` | bitmap | new, in planes |
| `dense` | all elements | new, in planes |
| `difference` | gaps | signs and exceptions |
| `bitmap_difference` | bitmap | signs and exceptions |
| `dense_difference` | all elements | signs and exceptions |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from vllm_delta_snapshot.errors import CorruptFile, LimitExceeded
from vllm_delta_snapshot.format.encodings.base import Parts, Stated, check_keys, names_of
from vllm_delta_snapshot.format.encodings.positions import PositionCoder
from vllm_delta_snapshot.format.encodings.values import ValueCoder
from vllm_delta_snapshot.types import Change, TensorDifference, TensorPatch, position_dtype

__all__ = ["Compact"]


@dataclass(frozen=True, slots=True)
class Compact:
    """See the module."""

    name: str
    positions: PositionCoder
    values: ValueCoder
    is_joint = True

    @property
    def is_difference(self) -> bool:
        """See `Encoding`."""
        return self.values.is_difference

    def encode(self, changes: Sequence[Change]) -> Parts:
        """Write changes of one width. Where one holds absolute values among differences, the encoding cannot.

        Raises:
            ValueError: a change is of the other kind, or of both. A bug of the caller.
        """
        for change in changes:
            is_mixed = isinstance(change, TensorDifference) and change.is_mixed
            if is_mixed or isinstance(change, TensorDifference) != self.is_difference:
                raise ValueError(f"{self.name} cannot write such a change of {change.spec.name}")
        starts = _starts([change.spec.numel for change in changes])
        positions = np.empty(sum(change.changed for change in changes), position_dtype(int(starts[-1])))
        for change, start, (first, last) in zip(changes, starts, _slices(changes), strict=False):
            np.add(change.positions, start, out=positions[first:last])
        values = changes[0].values if len(changes) == 1 else np.concatenate([change.values for change in changes])
        return {**self.positions.encode(positions, int(starts[-1])), **self.values.encode(values)}

    def decode(self, stated: Sequence[Stated], parts: Parts) -> list[Change]:
        """See `Encoding`."""
        tensor = names_of(stated)
        itemsize = stated[0].spec.element.itemsize
        check_keys(stated, parts, self.positions.keys | self.values.keys(itemsize))
        _check_counts(stated)
        starts = _starts([item.spec.numel for item in stated])
        count = sum(item.changed for item in stated)
        # Values first: where all elements change, nothing else in the file bears out how many there are.
        values = self.values.decode(parts, count=count, itemsize=itemsize, tensor=tensor)
        positions = self.positions.decode(parts, count=count, numel=int(starts[-1]), tensor=tensor)
        kind = TensorDifference if self.is_difference else TensorPatch
        return [
            kind(item.spec, _own_positions(item, positions[first:last], int(start)), values[first:last])
            for item, start, (first, last) in zip(stated, starts, _slices(stated), strict=False)
        ]


def _check_counts(stated: Sequence[Stated]) -> None:
    for item in stated:
        if item.changed > item.spec.numel:
            raise CorruptFile(
                "more changes than elements", tensor=item.spec.name, expected=item.spec.numel, found=item.changed
            )
    numel = sum(item.spec.numel for item in stated)
    if numel >= 2**63:
        raise LimitExceeded("block too large", tensor=names_of(stated), found=f"{numel} elements")


def _own_positions(item: Stated, counted: NDArray[np.int64], start: int) -> NDArray[np.signedinteger]:
    """Return a tensor's positions from those counted through the block; they are increasing."""
    if counted.size and not start <= int(counted[0]) <= int(counted[-1]) < start + item.spec.numel:
        raise CorruptFile(
            "position outside of the tensor",
            tensor=item.spec.name,
            expected=f"0 to {item.spec.numel - 1}",
            found=f"{int(counted[0]) - start} to {int(counted[-1]) - start}",
        )
    own = np.empty(counted.size, position_dtype(item.spec.numel))
    np.subtract(counted, start, out=own, casting="unsafe")
    return own


def _starts(numels: Sequence[int]) -> NDArray[np.int64]:
    """Return where each tensor starts, and where the last ends."""
    return np.cumsum([0, *numels], dtype=np.int64)


def _slices(items: Sequence[Change] | Sequence[Stated]) -> list[tuple[int, int]]:
    """Return where the changes of each tensor lie among those of the block."""
    ends = np.cumsum([0, *(item.changed for item in items)])
    return [(int(first), int(last)) for first, last in pairwise(ends)]
