# SPDX-License-Identifier: Apache-2.0
"""Byte planes: an array of integers, one zstd frame for all its lowest bytes, one for the next, and so on.

The bytes of one significance are alike, so each plane compresses by entropy coding alone. The parameters tell zstd not
to look for matches, which are not there: min_match 7 and a table of 64 entries leave it a Huffman coder
(docs/design.md, "Encodings"). The frames are standard ones.

`frame_pieces` reads frames of other writers, piece by piece, so that no frame decides how much memory it takes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Final, cast

import numpy as np
import zstandard
from numpy.typing import NDArray

from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.errors import CorruptFile
from vllm_delta_snapshot.format.encodings.base import Part, Parts

__all__ = ["check_frame", "compress_planes", "decompress_planes", "frame_pieces", "plane_keys"]

Bytes = NDArray[np.uint8]

_PARAMETERS: Final = zstandard.ZstdCompressionParameters.from_level(
    1, min_match=7, hash_log=6, window_log=17, write_content_size=True, write_checksum=False
)
_OF_THREAD: Final = threading.local()

_MOST_OF_BYTE: Final = 1 << 15
"""No frame holds more for each of its bytes: a zstd block of 128 KiB takes at least four."""

_PIECE: Final = 1 << 20
"""Bytes that `frame_pieces` yields at a time: a piece and what is made of it stay in the cache."""


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


def check_frame(frame: Bytes, num_bytes: int, *, tensor: str) -> None:
    """Check what a zstd frame says of its content, before anything is decompressed.

    Args:
        frame: the whole frame, shape ``(k,)``.
        num_bytes: how much it must hold.
        tensor: for messages.

    Raises:
        CorruptFile: it is no frame, or does not say that it holds this much.
    """
    try:
        found = zstandard.frame_content_size(_view(frame))
    except zstandard.ZstdError as error:
        raise CorruptFile("no zstd frame", tensor=tensor, found=error) from error
    if found != num_bytes:
        raise CorruptFile(
            "a zstd frame of another size",
            tensor=tensor,
            expected=f"{num_bytes} bytes",
            found="a frame that does not say" if found < 0 else f"{found} bytes",
        )


def frame_pieces(frame: Bytes, num_bytes: int, *, tensor: str) -> Iterator[Bytes]:
    """Decompress a zstd frame piece by piece.

    Args:
        frame: the whole frame, shape ``(k,)``.
        num_bytes: how much it must hold.
        tensor: for messages.

    Yields:
        Its content, 1 MiB at a time, in a buffer that the next piece overwrites.

    Raises:
        CorruptFile: see `check_frame`; or it is damaged, cut off, or followed by something.
    """
    check_frame(frame, num_bytes, tensor=tensor)
    buffer = np.empty(min(_PIECE, num_bytes), np.uint8)
    # Across frames: else what follows the first one would not be looked at.
    reader = zstandard.ZstdDecompressor().stream_reader(_view(frame), read_across_frames=True)
    try:
        for start in range(0, num_bytes, _PIECE):
            piece = buffer[: min(_PIECE, num_bytes - start)]
            filled = 0
            while filled < piece.size:
                count = reader.readinto(piece[filled:].data)
                if not count:
                    raise CorruptFile(
                        "a zstd frame is cut off",
                        tensor=tensor,
                        expected=f"{num_bytes} bytes",
                        found=f"{start + filled} bytes",
                    )
                filled += count
            yield piece
        if reader.read(1):
            raise CorruptFile("a zstd frame holds more than it says", tensor=tensor, expected=f"{num_bytes} bytes")
    except zstandard.ZstdError as error:
        raise CorruptFile("damaged zstd frame", tensor=tensor, found=error) from error


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
