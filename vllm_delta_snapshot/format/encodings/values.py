# SPDX-License-Identifier: Apache-2.0
"""Two ways to write the values of a block: new bit patterns in planes, or differences as signs and exceptions.

Nearly all differences between two training steps are one unit in the last place up or down: one bit. The exceptions
are written beside them, with their places as gaps.
"""

from __future__ import annotations

from typing import Protocol, cast

import numpy as np

from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.errors import CorruptFile
from vllm_delta_snapshot.format.encodings.base import Part, Parts
from vllm_delta_snapshot.format.encodings.gaps import decode_gaps, encode_gaps, gap_keys
from vllm_delta_snapshot.format.encodings.planes import compress_planes, decompress_planes, plane_keys

__all__ = ["Planes", "Signs", "ValueCoder"]


class ValueCoder(Protocol):
    """One way to write values."""

    is_difference: bool

    def keys(self, itemsize: int) -> frozenset[str]:
        """Return the keys of the arrays that `encode` makes."""
        ...

    def encode(self, values: Bits) -> dict[str, Part]:
        """Write values of any width."""
        ...

    def decode(self, parts: Parts, *, count: int, itemsize: int, tensor: str) -> Bits:
        """Read `count` values of `itemsize` bytes back.

        Raises:
            CorruptFile: that is not what the arrays hold.
        """
        ...


class Planes:
    """The values as they are, in byte planes: sign and exponent compress, the mantissa hardly does."""

    is_difference = False

    def keys(self, itemsize: int) -> frozenset[str]:
        """See `ValueCoder`."""
        return frozenset(plane_keys("values", itemsize))

    def encode(self, values: Bits) -> dict[str, Part]:
        """See `ValueCoder`."""
        return compress_planes("values", values)

    def decode(self, parts: Parts, *, count: int, itemsize: int, tensor: str) -> Bits:
        """See `ValueCoder`."""
        return decompress_planes("values", parts, itemsize, count=count, tensor=tensor)


class Signs:
    """One bit a value: set for +1, else -1. Values that are neither are exceptions, in zigzag order of magnitude."""

    is_difference = True

    def keys(self, itemsize: int) -> frozenset[str]:
        """See `ValueCoder`."""
        return frozenset({"signs", *gap_keys("exception_gaps"), *plane_keys("exceptions", itemsize)})

    def encode(self, values: Bits) -> dict[str, Part]:
        """See `ValueCoder`."""
        # -1 becomes 0 and +1 becomes 2; all else is larger, or 1 (a difference of 0).
        shifted = values + values.dtype.type(1)
        exceptions = np.flatnonzero((shifted & ~values.dtype.type(2)) != 0)
        signs = np.packbits(shifted == 2, bitorder="little")
        zigzag = _zigzag(values[exceptions])
        return {
            "signs": ("U8", signs),
            **encode_gaps("exception_gaps", exceptions),
            **compress_planes("exceptions", zigzag),
        }

    def decode(self, parts: Parts, *, count: int, itemsize: int, tensor: str) -> Bits:
        """See `ValueCoder`."""
        code, signs = parts["signs"]
        num_bytes = -(-count // 8)
        if code != "U8" or signs.size != num_bytes:
            found = f"{code}[{signs.size}]"
            raise CorruptFile("signs: wrong type or length", tensor=tensor, expected=f"U8[{num_bytes}]", found=found)
        bits = np.unpackbits(signs.view(np.uint8), count=count, bitorder="little")
        values = bits.astype(f"<u{itemsize}")
        values += values
        values -= values.dtype.type(1)
        zigzag = decompress_planes("exceptions", parts, itemsize, most=count, tensor=tensor)
        at = decode_gaps("exception_gaps", parts, count=zigzag.size, numel=count, tensor=tensor)
        values[at] = _unzigzag(zigzag)
        return cast("Bits", values)


def _zigzag(values: Bits) -> Bits:
    """Map 0, -1, 1, -2, 2, ... to 0, 1, 2, 3, 4, ..., so that small differences have empty upper bytes."""
    width = 8 * values.dtype.itemsize
    one = values.dtype.type(1)
    negative = values >> values.dtype.type(width - 1)
    return cast("Bits", (values << one) ^ (~negative + one))


def _unzigzag(zigzag: Bits) -> Bits:
    one = zigzag.dtype.type(1)
    return cast("Bits", (zigzag >> one) ^ (~(zigzag & one) + one))
