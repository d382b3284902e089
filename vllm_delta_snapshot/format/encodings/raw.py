# SPDX-License-Identifier: Apache-2.0
"""`raw` and `raw_difference`: positions as int32 (int64 past 2**31 elements) and one value each, not compressed.

`raw` is the form of OpenRL's sparse_delta v2: absolute values, 6 bytes per changed bf16 weight, idempotent.
`raw_difference` holds new minus old; an optional bitmap says which values are absolute after all (docs/format.md). It
is what a stager writes for its workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

import numpy as np

from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.errors import CorruptFile
from vllm_delta_snapshot.format.encodings.base import Part, Parts, Stated, check_keys
from vllm_delta_snapshot.types import Change, Positions, TensorDifference, TensorPatch, TensorSpec, position_dtype

__all__ = ["Raw", "RawDifference"]

_POSITION_CODES: Final = {"I32": np.dtype("<i4"), "I64": np.dtype("<i8")}
_KEYS: Final = frozenset({"indices", "values"})


class Raw:
    """See the module."""

    name = "raw"
    is_difference = False
    is_joint = False

    def encode(self, changes: Sequence[Change]) -> Parts:
        """Return ``indices`` and ``values``; views where the types already fit."""
        [change] = changes
        return _encode(change)

    def decode(self, stated: Sequence[Stated], parts: Parts) -> list[Change]:
        """Check both arrays against the tensor and return views of them.

        Raises:
            CorruptFile: wrong arrays, types, lengths, or positions out of order or out of range.
        """
        [item] = stated
        check_keys(stated, parts, _KEYS)
        return [TensorPatch(item.spec, *_decode(item, parts))]


class RawDifference:
    """See the module."""

    name = "raw_difference"
    is_difference = True
    is_joint = False

    def encode(self, changes: Sequence[Change]) -> Parts:
        """Return ``indices``, ``values`` and, if there are any, a bitmap of the ``absolute`` ones."""
        [change] = changes
        parts = _encode(change)
        if isinstance(change, TensorDifference) and change.absolute is not None:
            parts["absolute"] = ("U8", np.packbits(change.absolute, bitorder="little"))
        return parts

    def decode(self, stated: Sequence[Stated], parts: Parts) -> list[Change]:
        """Check the arrays against the tensor and return views of them.

        Raises:
            CorruptFile: wrong arrays, types, lengths, or positions out of order or out of range.
        """
        [item] = stated
        check_keys(stated, parts, _KEYS | {"absolute"} if "absolute" in parts else _KEYS)
        positions, values = _decode(item, parts)
        absolute = None
        if "absolute" in parts:
            code, array = parts["absolute"]
            if code != "U8":
                raise CorruptFile("a bitmap has a wrong type", tensor=item.spec.name, expected="U8", found=code)
            _check_length(item.spec, "bitmap bytes", -(-item.changed // 8), array.size)
            absolute = np.unpackbits(array.view(np.uint8), count=item.changed, bitorder="little").view(np.bool_)
        return [TensorDifference(item.spec, positions, values, absolute)]


def _encode(change: Change) -> dict[str, Part]:
    wanted = position_dtype(change.spec.numel)
    code = "I32" if wanted.itemsize == 4 else "I64"
    return {
        "indices": (code, change.positions.astype(wanted, copy=False)),
        "values": (change.spec.dtype, change.values),
    }


def _decode(item: Stated, parts: Parts) -> tuple[Positions, Bits]:
    return _positions(item.spec, item.changed, parts["indices"]), _values(item.spec, item.changed, parts["values"])


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
