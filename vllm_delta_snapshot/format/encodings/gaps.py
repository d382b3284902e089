# SPDX-License-Identifier: Apache-2.0
"""Positions as gaps: how many unchanged elements lie between one changed element and the next.

A gap is a 16-bit symbol; 65535 stands for 65535 unchanged elements and says that the gap goes on. The symbols are
written as two byte planes. Increasing positions are the only ones that can be written, so the only ones that can be
read.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_delta_snapshot.errors import CorruptFile
from vllm_delta_snapshot.format.encodings.base import Part, Parts
from vllm_delta_snapshot.format.encodings.planes import compress_planes, decompress_planes, plane_keys

__all__ = ["decode_gaps", "encode_gaps", "gap_keys"]

_LONG: Final = 0xFFFF


def gap_keys(key: str) -> frozenset[str]:
    """Return the keys of the arrays that `encode_gaps` makes."""
    return frozenset(plane_keys(key, 2))


def encode_gaps(key: str, positions: NDArray[np.signedinteger]) -> dict[str, Part]:
    """Write strictly increasing positions, 0 or more."""
    if not positions.size:
        return compress_planes(key, np.empty(0, "<u2"))
    gaps = np.empty_like(positions)
    gaps[0] = positions[0]
    np.subtract(positions[1:], positions[:-1], out=gaps[1:])
    gaps[1:] -= 1
    return compress_planes(key, _symbols(gaps))


def decode_gaps(key: str, parts: Parts, *, count: int, numel: int, tensor: str) -> NDArray[np.int64]:
    """Read positions back.

    Args:
        key: as given to `encode_gaps`.
        parts: holds the arrays.
        count: how many there must be.
        numel: every position is less.
        tensor: for messages.

    Raises:
        CorruptFile: they are not `count` positions below `numel`.
    """
    symbols = decompress_planes(key, parts, 2, most=count + numel // _LONG, tensor=tensor)
    is_long = symbols == _LONG
    longs = int(np.count_nonzero(is_long))
    if symbols.size - longs != count or (longs and is_long[-1]):
        found = symbols.size - longs
        raise CorruptFile(f"{key}: wrong number of positions", tensor=tensor, expected=count, found=found)
    steps = symbols.astype(np.int64)
    steps += 1
    if longs:
        steps[is_long] = _LONG
    positions = np.cumsum(steps, out=steps)
    if longs:
        positions = positions[~is_long]
    positions -= 1
    if count and int(positions[-1]) >= numel:
        last = int(positions[-1])
        raise CorruptFile(f"{key}: position out of range", tensor=tensor, expected=f"below {numel}", found=last)
    return positions


def _symbols(gaps: NDArray[np.signedinteger]) -> NDArray[np.uint16]:
    if int(gaps.max()) < _LONG:
        return gaps.astype("<u2")
    longs = gaps // _LONG
    ends = np.cumsum(longs + 1) - 1
    symbols = np.full(int(ends[-1]) + 1, _LONG, "<u2")
    symbols[ends] = gaps - longs * _LONG
    return symbols
