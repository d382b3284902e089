# SPDX-License-Identifier: Apache-2.0
"""The contract of an encoding.

Lossless for every bit pattern of every element type, for empty and 0-d tensors and for any number of elements.
`decode` trusts nothing: it bounds what it allocates by the counts that metadata states, and its result is a valid
patch or an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_delta_snapshot.types import TensorPatch, TensorSpec

__all__ = ["Encoding", "Part", "Parts"]

Part = tuple[str, NDArray[np.generic]]
"""One array of an encoded patch: its safetensors code and its elements, flat. `decode` is given bits (unsigned)."""

Parts = Mapping[str, Part]
"""An encoded patch: its arrays by the suffix of their key in the container (``indices`` of ``7.indices``)."""


class Encoding(Protocol):
    """One way to write a patch."""

    name: str

    def encode(self, patch: TensorPatch) -> Parts:
        """Turn a valid patch into arrays. May return views of the patch."""
        ...

    def decode(self, spec: TensorSpec, changed: int, parts: Parts) -> TensorPatch:
        """Turn arrays back into the patch. May return views of the arrays.

        Args:
            spec: the tensor, from metadata.
            changed: the number of changed elements, from metadata.
            parts: the arrays found in the container.

        Raises:
            CorruptFile: the arrays are not an encoding of such a patch.
        """
        ...
