# SPDX-License-Identifier: Apache-2.0
"""How far two floating-point values are apart, in steps from one representable value to the next. Pure.

Works on bits. A float is a sign and a magnitude, and magnitudes as integers are in the order of the values; so the
distance is the difference of magnitudes on one side of zero, and their sum across it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.types import TensorDifference

__all__ = ["Distance", "distance", "distance_of_difference"]


@dataclass(frozen=True, slots=True)
class Distance:
    """How far values are apart.

    Attributes:
        max_ulp: the largest distance; ``None`` if there is none or it is not known.
        num_nan: elements that are NaN on one side or both; ``None`` if that is not known.
    """

    max_ulp: int | None
    num_nan: int | None


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a type's bits are values: where the sign is, and the largest magnitude that is no NaN."""

    sign: int
    largest: int
    nan: int | None = None


_LAYOUTS: Final = {
    "F64": _Layout(1 << 63, 0x7FF0 << 48),
    "F32": _Layout(1 << 31, 0x7F80 << 16),
    "F16": _Layout(1 << 15, 0x7C00),
    "BF16": _Layout(1 << 15, 0x7F80),
    "F8_E5M2": _Layout(1 << 7, 0x7C),
    "F8_E4M3": _Layout(1 << 7, 0x7E),
    "F8_E4M3FNUZ": _Layout(1 << 7, 0x7F, nan=0x80),  # what would be -0.0 is the only NaN
    "F8_E5M2FNUZ": _Layout(1 << 7, 0x7F, nan=0x80),
    "F8_E8M0": _Layout(0, 0xFE),  # powers of two, without a sign
}
"""Other types have no steps: integers, and complex numbers, which are two."""


def distance(dtype: str, old: Bits, new: Bits) -> Distance:
    """Return how far values are apart.

    Args:
        dtype: their safetensors code.
        old: bit patterns, shape ``(n,)``.
        new: bit patterns, shape ``(n,)``.
    """
    layout = _LAYOUTS.get(dtype)
    if layout is None:
        return Distance(None, 0)
    is_nan = _is_nan(layout, old) | _is_nan(layout, new)
    a, b = old[~is_nan].astype(np.uint64), new[~is_nan].astype(np.uint64)
    sign = np.uint64(layout.sign)
    magnitude_a, magnitude_b = a & ~sign, b & ~sign
    apart = np.maximum(magnitude_a, magnitude_b) - np.minimum(magnitude_a, magnitude_b)
    steps = np.where((a & sign) == (b & sign), apart, magnitude_a + magnitude_b)
    return Distance(int(steps.max()) if steps.size else None, int(is_nan.sum()))


def distance_of_difference(change: TensorDifference) -> Distance | None:
    """Return how far values are apart of which only the difference of their bits is known.

    Small differences keep the sign, so they are distances as they are. It is not known whether one is a NaN.

    Returns:
        ``None`` if the values themselves are needed.
    """
    layout = _LAYOUTS.get(change.spec.dtype)
    if layout is None:
        return Distance(None, 0)
    if layout.sign == 0 or layout.nan is not None or change.is_mixed:
        return None
    steps = np.minimum(change.values, -change.values)  # unsigned, so the smaller one is the magnitude
    largest = int(steps.max()) if steps.size else 0
    return Distance(largest, None) if largest < layout.sign - layout.largest else None


def _is_nan(layout: _Layout, bits: Bits) -> NDArray[np.bool_]:
    if layout.nan is not None:
        return np.asarray(bits == layout.nan)
    # A mask as wide as the values: 0x7F.. for those with a sign, all ones for the others.
    mask = layout.sign - 1 if layout.sign else 0xFF
    return np.asarray((bits & np.array(mask, bits.dtype)) > np.array(layout.largest, bits.dtype))
