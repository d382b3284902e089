# SPDX-License-Identifier: Apache-2.0
"""Three ways to write which elements of a block change: gaps, a bitmap, or nothing where all do.

The elements of a block's tensors are counted through: element 0 of the second tensor follows the last of the first.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_delta_snapshot.errors import CorruptFile
from vllm_delta_snapshot.format.encodings.base import Part, Parts
from vllm_delta_snapshot.format.encodings.gaps import decode_gaps, encode_gaps, gap_keys
from vllm_delta_snapshot.format.encodings.planes import compress_planes, decompress_planes

__all__ = ["All", "Bitmap", "Gaps", "PositionCoder"]

_PIECE: Final = 1 << 22
"""Elements of a bitmap that are unpacked at a time: 4 MiB."""


class PositionCoder(Protocol):
    """One way to write positions."""

    keys: frozenset[str]

    def encode(self, positions: NDArray[np.signedinteger], numel: int) -> dict[str, Part]:
        """Write strictly increasing positions below `numel`."""
        ...

    def decode(self, parts: Parts, *, count: int, numel: int, tensor: str) -> NDArray[np.int64]:
        """Read `count` positions below `numel` back.

        Raises:
            CorruptFile: that is not what the arrays hold.
        """
        ...


class Gaps:
    """See `gaps`: for few changes."""

    keys = gap_keys("gaps")

    def encode(self, positions: NDArray[np.signedinteger], numel: int) -> dict[str, Part]:
        """See `PositionCoder`."""
        return encode_gaps("gaps", positions)

    def decode(self, parts: Parts, *, count: int, numel: int, tensor: str) -> NDArray[np.int64]:
        """See `PositionCoder`."""
        return decode_gaps("gaps", parts, count=count, numel=numel, tensor=tensor)


class Bitmap:
    """One bit an element, the lowest of a byte first: for many changes."""

    keys = frozenset({"bitmap_0"})

    def encode(self, positions: NDArray[np.signedinteger], numel: int) -> dict[str, Part]:
        """See `PositionCoder`."""
        packed = np.zeros(-(-numel // 8), np.uint8)
        for start in range(0, numel, _PIECE):
            first, last = np.searchsorted(positions, (start, start + _PIECE))
            if first == last:
                continue
            bits = np.zeros(min(_PIECE, numel - start), np.bool_)
            bits[positions[first:last] - start] = True
            packed[start // 8 : -(-(start + bits.size) // 8)] = np.packbits(bits, bitorder="little")
        return compress_planes("bitmap", packed)

    def decode(self, parts: Parts, *, count: int, numel: int, tensor: str) -> NDArray[np.int64]:
        """See `PositionCoder`."""
        packed = decompress_planes("bitmap", parts, 1, count=-(-numel // 8), tensor=tensor)
        positions = np.empty(count, np.int64)
        found = 0
        for start in range(0, packed.size, _PIECE // 8):
            piece = packed[start : start + _PIECE // 8].view(np.uint8)
            inside = np.flatnonzero(np.unpackbits(piece, bitorder="little").view(np.bool_))
            if found + inside.size > count:
                found += inside.size
                break
            np.add(inside, 8 * start, out=positions[found : found + inside.size])
            found += inside.size
        if found != count or (count and int(positions[-1]) >= numel):
            raise CorruptFile("bitmap: wrong number of bits", tensor=tensor, expected=count, found=found)
        return positions


class All:
    """Every element changes."""

    keys: frozenset[str] = frozenset()

    def encode(self, positions: NDArray[np.signedinteger], numel: int) -> dict[str, Part]:
        """See `PositionCoder`."""
        return {}

    def decode(self, parts: Parts, *, count: int, numel: int, tensor: str) -> NDArray[np.int64]:
        """See `PositionCoder`."""
        if count != numel:
            raise CorruptFile("all elements change, or it is not dense", tensor=tensor, expected=numel, found=count)
        return np.arange(numel, dtype=np.int64)
