# SPDX-License-Identifier: Apache-2.0
"""What a comparison finds. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_delta_snapshot.types import TensorSpec

__all__ = ["Comparison", "TensorComparison"]


@dataclass(frozen=True, slots=True)
class TensorComparison:
    """One tensor that differs.

    Attributes:
        name: its name.
        a: what it is in A; ``None`` if it is not there.
        b: what it is in B; ``None`` if it is not there.
        changed: elements with other bits; ``None`` if shapes or element types differ, so that none correspond.
        max_ulp: the largest distance in units of the last place, counted in steps from one representable value to the
            next (so 0 between -0.0 and 0.0), of elements that are NaN on neither side; ``None`` if the type has no such
            steps, all are NaN, or the distance is not known.
        num_nan: elements of these that are NaN on one side or both; ``None`` if that is not known.
        is_exact: whether ``changed`` is exact; else at most so many elements differ.
    """

    name: str
    a: TensorSpec | None
    b: TensorSpec | None
    changed: int | None = None
    max_ulp: int | None = None
    num_nan: int | None = None
    is_exact: bool = True

    @property
    def density(self) -> float | None:
        """Changed elements / elements of the tensor."""
        return None if self.changed is None or self.a is None else self.changed / max(1, self.a.numel)


@dataclass(frozen=True, slots=True)
class Comparison:
    """See the module.

    Attributes:
        tensors: those that differ, in order of name.
        num_tensors: how many names there are, on either side.
        total_elements: elements of the tensors that correspond.
    """

    tensors: Sequence[TensorComparison]
    num_tensors: int
    total_elements: int

    @property
    def is_same(self) -> bool:
        """Whether nothing differs, bit for bit."""
        return not self.tensors

    @property
    def is_exact(self) -> bool:
        """Whether all counts are exact."""
        return all(tensor.is_exact for tensor in self.tensors)

    @property
    def changed_elements(self) -> int:
        """Elements with other bits, of tensors that correspond."""
        return sum(tensor.changed or 0 for tensor in self.tensors)
