# SPDX-License-Identifier: Apache-2.0
"""Byte planes: an array of integers, one zstd frame for all its lowest bytes, one for the next, and so on.

The bytes of one significance are alike, so each plane compresses by entropy coding alone. The parameters tell zstd not
to look for matches, which are not there: min_match 7 and a table of 64 entries leave it a Huffman coder
(docs/design.md, "Encodings"). The frames are standard ones.
"""

from __future__ import annotations

import threading
from typing import Any, Final, cast

import numpy as np
import zstandard
from numpy.typing import NDArray

from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.errors import CorruptFile
from vllm_delta_snapshot.format.encodings.base import Part, Parts

__all__ = ["compress_planes", "decompress_planes", "plane_keys"]

Bytes = NDArray[np.uint8]

_PARAMETERS: Final = zstandard.ZstdCompressionParameters.from_level(
    1, min_match=7, hash_log=6, window_log=17, write_content_size=True, write_checksum=False
)
_OF_THREAD: Final = threading.local()

_MOST_OF_BYTE: Final = 1 << 15
"""No frame holds more for each of its bytes: a zstd block of 128 KiB takes at least four."""


def plane_keys(key: str, itemsize: int) -> list[str]:
    """Return the keys of an array's planes, the lowest byte first."""
    return [f"{key}_{number}" for number in range(itemsize)]


def compress_planes(key: str, array: Bits) -> dict[str, Part]:
    """Write an array of unsigned integers as planes; no element, no bytes."""
    itemsize = array.dtype.itemsize
    planes = np.ascontiguousarray(array).view(np.uint8).reshape(-1, itemsize)
    return {name: ("U8", _compress(planes[:, number])) for number, name in enumerate(plane_keys(key, itemsize))}


def decompress_planes(
    key: str, parts: Parts, itemsize: int, *, count: int | None = None, most: int = 0, tensor: str = ""
) -> Bits:
    """Read an array back.

    Args:
        key: as given to `compress_planes`.
        parts: holds the planes.
        itemsize: bytes of an element.
        count: how many elements there must be; ``None`` if the planes themselves say so.
        most: if they do, how many there may be.
        tensor: for messages.

    Raises:
        CorruptFile: a plane is no zstd frame, or has another length; nothing larger than allowed is allocated.
    """
    planes = [_frame(key, parts[name], tensor) for name in plane_keys(key, itemsize)]
    sizes = {_content_size(key, plane, tensor) for plane in planes}
    size = max(sizes)
    if len(sizes) > 1 or (size != count if count is not None else size > most):
        expected = f"{count}" if count is not None else f"at most {most}, in each of {itemsize} planes"
        raise CorruptFile(f"{key}: wrong length", tensor=tensor, expected=expected, found=sorted(sizes))
    if itemsize == 1:
        return cast("Bits", _decompress(key, planes[0], size, tensor))
    joined = np.empty(size, f"<u{itemsize}")
    columns = joined.view(np.uint8).reshape(-1, itemsize)
    for number, plane in enumerate(planes):
        columns[:, number] = _decompress(key, plane, size, tensor)
    return cast("Bits", joined)


def _compress(plane: Bytes) -> Bytes:
    if not plane.size:
        return np.empty(0, np.uint8)
    if not hasattr(_OF_THREAD, "compressor"):
        _OF_THREAD.compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
    return np.frombuffer(_OF_THREAD.compressor.compress(np.ascontiguousarray(plane)), np.uint8)


def _frame(key: str, part: Part, tensor: str) -> Bytes:
    code, array = part
    if code != "U8":
        raise CorruptFile(f"{key}: wrong type", tensor=tensor, expected="U8", found=code)
    return cast("Bytes", array)


def _content_size(key: str, plane: Bytes, tensor: str) -> int:
    if not plane.size:
        return 0
    try:
        size = int(zstandard.get_frame_parameters(_view(plane)).content_size)
    except zstandard.ZstdError as error:
        raise CorruptFile(f"{key}: no zstd frame", tensor=tensor, found=error) from error
    if size > plane.size * _MOST_OF_BYTE:  # so it is if the frame does not say
        raise CorruptFile(f"{key}: a frame of {plane.size} bytes cannot hold that much", tensor=tensor, found=size)
    return size


def _decompress(key: str, plane: Bytes, size: int, tensor: str) -> Bytes:
    if not size:
        if plane.size:
            raise CorruptFile(f"{key}: an empty array is written as nothing", tensor=tensor, found=plane.size)
        return np.empty(0, np.uint8)
    if not hasattr(_OF_THREAD, "decompressor"):
        _OF_THREAD.decompressor = zstandard.ZstdDecompressor()
    try:
        data = _OF_THREAD.decompressor.decompress(_view(plane), max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptFile(f"{key}: damaged zstd frame", tensor=tensor, found=error) from error
    if len(data) != size:
        raise CorruptFile(f"{key}: wrong length", tensor=tensor, expected=size, found=len(data))
    return np.frombuffer(data, np.uint8)


def _view(plane: Bytes) -> Any:
    return np.ascontiguousarray(plane).data
