# SPDX-License-Identifier: Apache-2.0
"""The element types that a checkpoint may have, by their safetensors codes.

Every value in this project is handled as an unsigned integer of the element's width (its "bits"), so that
-0.0, NaN payloads and subnormals are nothing special anywhere. This module maps codes to widths and to
torch's names; it converts nothing.

Sub-byte types (F4, F6) are absent on purpose: they have no element addresses, so no sparse patch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_delta_snapshot.errors import UnsupportedFormat

__all__ = ["Bits", "DType", "dtype_of", "dtype_of_torch_name"]

Bits = NDArray[np.unsignedinteger]
"""A flat array of bit patterns: uint8, uint16, uint32 or uint64, by the width of the element."""


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    Attributes:
        code: the safetensors code, e.g. ``BF16``.
        torch_name: the attribute of ``torch``, e.g. ``bfloat16``.
        itemsize: bytes per element.
        is_float: whether NaN exists in this type.
    """

    code: str
    torch_name: str
    itemsize: int
    is_float: bool

    @property
    def bits(self) -> np.dtype[np.unsignedinteger]:
        """The unsigned numpy type of the same width."""
        return np.dtype(f"<u{self.itemsize}")


_TABLE: Final = {
    dtype.code: dtype
    for dtype in (
        DType("BOOL", "bool", 1, False),
        DType("U8", "uint8", 1, False),
        DType("I8", "int8", 1, False),
        DType("F8_E4M3", "float8_e4m3fn", 1, True),
        DType("F8_E5M2", "float8_e5m2", 1, True),
        DType("F8_E4M3FNUZ", "float8_e4m3fnuz", 1, True),
        DType("F8_E5M2FNUZ", "float8_e5m2fnuz", 1, True),
        DType("F8_E8M0", "float8_e8m0fnu", 1, True),
        DType("U16", "uint16", 2, False),
        DType("I16", "int16", 2, False),
        DType("F16", "float16", 2, True),
        DType("BF16", "bfloat16", 2, True),
        DType("U32", "uint32", 4, False),
        DType("I32", "int32", 4, False),
        DType("F32", "float32", 4, True),
        DType("U64", "uint64", 8, False),
        DType("I64", "int64", 8, False),
        DType("F64", "float64", 8, True),
        DType("C64", "complex64", 8, True),
    )
}
_BY_TORCH_NAME: Final = {dtype.torch_name: dtype for dtype in _TABLE.values()}

ALL_CODES: Final = tuple(_TABLE)
"""Every code this project reads and writes."""


def dtype_of(code: str) -> DType:
    """Return the element type with this safetensors code.

    Raises:
        UnsupportedFormat: the code is unknown or names a sub-byte type.
    """
    try:
        return _TABLE[code]
    except KeyError:
        raise UnsupportedFormat(
            "unknown element type", expected=" ".join(_TABLE), found=code, hint="Update vllm-delta-snapshot."
        ) from None


def dtype_of_torch_name(name: str) -> DType:
    """Return the element type whose torch attribute has this name, e.g. ``bfloat16``.

    Raises:
        UnsupportedFormat: torch has such a type but a checkpoint of ours cannot.
    """
    try:
        return _BY_TORCH_NAME[name]
    except KeyError:
        raise UnsupportedFormat(
            "element type cannot be published", expected=" ".join(_BY_TORCH_NAME), found=name
        ) from None
