# SPDX-License-Identifier: Apache-2.0
"""The values that everything else speaks of: a tensor's description and its patch.

Pure: no I/O, no torch, no vLLM. Positions are flat, row-major, in checkpoint coordinates. Values are bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_delta_snapshot.dtypes import Bits, DType, dtype_of

__all__ = ["Change", "Positions", "TensorDifference", "TensorPatch", "TensorSpec", "position_dtype"]

Positions = NDArray[np.signedinteger]
"""Flat positions, strictly increasing: int32, or int64 for tensors of more than 2**31 elements."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape and element type of one tensor of the checkpoint.

    Attributes:
        name: the checkpoint name, as in the safetensors file.
        shape: dimensions; ``()`` for a scalar, zeros allowed.
        dtype: the safetensors code.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def element(self) -> DType:
        """The element type."""
        return dtype_of(self.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * self.element.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True, eq=False)
class TensorPatch:
    """One tensor's changed positions and their new values.

    Attributes:
        spec: the tensor.
        positions: flat positions, shape ``(changed,)``, strictly increasing.
        values: new bit patterns, shape ``(changed,)``, of the element's width.
    """

    spec: TensorSpec
    positions: Positions
    values: Bits

    @property
    def changed(self) -> int:
        """Number of changed elements."""
        return int(self.positions.size)


@dataclass(frozen=True, slots=True, eq=False)
class TensorDifference:
    """One tensor's changed positions and by how much their bit patterns move.

    Attributes:
        spec: the tensor.
        positions: flat positions, shape ``(changed,)``, strictly increasing.
        values: new minus old, as unsigned integers of the element's width that wrap around, shape ``(changed,)``.
        absolute: where True, ``values`` holds the new bit pattern itself, as a merge with absolute patches leaves it;
            ``None``: nowhere.
    """

    spec: TensorSpec
    positions: Positions
    values: Bits
    absolute: NDArray[np.bool_] | None = None

    @property
    def changed(self) -> int:
        """Number of changed elements."""
        return int(self.positions.size)

    @property
    def is_mixed(self) -> bool:
        """Whether some values are absolute."""
        return self.absolute is not None

    def resolve(self, old: Bits) -> TensorPatch:
        """Return the patch that this is for given old values.

        Args:
            old: the bit patterns at ``positions``, shape ``(changed,)``; they must be the ones it was made against.
        """
        new: Bits = old + self.values
        if self.absolute is not None:
            new[self.absolute] = self.values[self.absolute]
        return TensorPatch(self.spec, self.positions, new)


Change = TensorPatch | TensorDifference
"""What a delta says of one tensor."""


def position_dtype(numel: int) -> np.dtype[np.signedinteger]:
    """Return the type of positions in a tensor of `numel` elements: int32 up to 2**31, else int64.

    The largest position is ``numel - 1``, so 2**31 elements still fit.
    """
    return np.dtype("<i4") if numel <= 2**31 else np.dtype("<i8")
