# SPDX-License-Identifier: Apache-2.0
"""`raw`: positions as int32 (int64 past 2**31 elements) and absolute values, the form of OpenRL's sparse_delta v2.

Idempotent, and needs nothing from the receiver. 6 bytes per changed bf16 weight.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.errors import CorruptFile
from vllm_delta_snapshot.format.encodings.base import Part, Parts
from vllm_delta_snapshot.types import Positions, TensorPatch, TensorSpec, position_dtype

__all__ = ["Raw"]

_POSITION_CODES = {"I32": np.dtype("<i4"), "I64": np.dtype("<i8")}


class Raw:
    """See the module."""

    name = "raw"

    def encode(self, patch: TensorPatch) -> Parts:
        """Return ``indices`` and ``values``; views where the types already fit."""
        wanted = position_dtype(patch.spec.numel)
        code = "I32" if wanted.itemsize == 4 else "I64"
        return {
            "indices": (code, patch.positions.astype(wanted, copy=False)),
            "values": (patch.spec.dtype, patch.values),
        }

    def decode(self, spec: TensorSpec, changed: int, parts: Parts) -> TensorPatch:
        """Check both arrays against the tensor and return views of them.

        Raises:
            CorruptFile: wrong arrays, types, lengths, or positions out of order or out of range.
        """
        if set(parts) != {"indices", "values"}:
            raise CorruptFile(
                "wrong arrays", tensor=spec.name, expected="indices, values", found=", ".join(sorted(parts))
            )
        positions = _positions(spec, changed, parts["indices"])
        return TensorPatch(spec, positions, _values(spec, changed, parts["values"]))


def _positions(spec: TensorSpec, changed: int, part: Part) -> Positions:
    code, array = part
    if code not in _POSITION_CODES:
        raise CorruptFile("positions have a wrong type", tensor=spec.name, expected="I32 or I64", found=code)
    _check_length(spec, "positions", changed, array.size)
    positions = cast("Positions", array.view(_POSITION_CODES[code]))
    if positions.size:
        if int(positions[0]) < 0 or int(positions[-1]) >= spec.numel:
            outside = positions[0] if int(positions[0]) < 0 else positions[-1]
            raise CorruptFile(
                "position out of range", tensor=spec.name, expected=f"0 to {spec.numel - 1}", found=outside
            )
        # Sorted and within range at both ends: all are within range, and none appears twice.
        if not bool(np.all(positions[1:] > positions[:-1])):
            raise CorruptFile("positions are not strictly increasing", tensor=spec.name)
    return positions


def _values(spec: TensorSpec, changed: int, part: Part) -> Bits:
    code, array = part
    if code != spec.dtype:
        raise CorruptFile("values have a wrong type", tensor=spec.name, expected=spec.dtype, found=code)
    _check_length(spec, "values", changed, array.size)
    return cast("Bits", array)


def _check_length(spec: TensorSpec, what: str, expected: int, found: int) -> None:
    if expected != found:
        raise CorruptFile(f"wrong number of {what}", tensor=spec.name, expected=expected, found=found)
