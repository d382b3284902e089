# SPDX-License-Identifier: Apache-2.0
"""The safetensors container, as bits: a streaming writer and a mapping reader.

The safetensors library cannot hand BF16 or FP8 to numpy, copies what it reads, and writes only whole files from
tensors in memory. Here a file is written as a stream of buffers (an object store needs no temporary file) and read
as views of a mapped file, without torch. Tests hold it against the library in both directions.

A file is refused before any of it is used when its header is longer than the bytes there are, is no JSON object,
repeats a name, or does not describe the data exactly: no hole, no overlap, no byte left over.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from vllm_delta_snapshot.dtypes import Bits, dtype_of
from vllm_delta_snapshot.errors import CorruptFile, LimitExceeded, ObjectNotFound, UnsupportedFormat
from vllm_delta_snapshot.format.wire import unique_pairs
from vllm_delta_snapshot.types import TensorSpec

__all__ = ["MAX_HEADER_BYTES", "MappedFile", "NamedBits", "file_chunks", "file_size"]

MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of the safetensors format itself."""

MAX_DIMENSIONS: Final = 64
"""A reader refuses more: numpy's own limit, so that a product of dimensions stays a small number."""

_LENGTH: Final = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, eq=False)
class NamedBits:
    """One tensor to be written: its description and all its elements, flat."""

    spec: TensorSpec
    bits: Bits


def file_chunks(tensors: Sequence[NamedBits], metadata: Mapping[str, str]) -> Iterator[memoryview]:
    """Yield the bytes of a safetensors file: its header, then each tensor, without copying the tensors.

    Tensors are laid out widest element first, then by name, as the library does, so every one is aligned.
    """
    ordered = _in_file_order(tensors)
    yield memoryview(_header(ordered, metadata))
    for tensor in ordered:
        if tensor.bits.size:
            yield np.ascontiguousarray(tensor.bits).view(np.uint8).data


def file_size(tensors: Sequence[NamedBits], metadata: Mapping[str, str]) -> int:
    """Return how many bytes `file_chunks` yields in all."""
    return len(_header(_in_file_order(tensors), metadata)) + sum(t.spec.num_bytes for t in tensors)


def _in_file_order(tensors: Sequence[NamedBits]) -> list[NamedBits]:
    return sorted(tensors, key=lambda t: (-t.spec.element.itemsize, t.spec.name))


def _header(ordered: Sequence[NamedBits], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for tensor in ordered:
        spec = tensor.spec
        end = offset + spec.num_bytes
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


class MappedFile:
    """A safetensors file, mapped. Views stay valid as long as they, or this object, are referenced.

    Args:
        path: the file.
        is_private: views may be written, which changes this process's memory and never the file; else they are
            read-only.

    Attributes:
        path: the file.
        specs: its tensors by name.
        metadata: the free-form strings of its header.

    Raises:
        ObjectNotFound: there is no such file.
        CorruptFile: the header is not a safetensors header or does not fit the data.
        LimitExceeded: the header is longer than `MAX_HEADER_BYTES`.
        UnsupportedFormat: a tensor has an element type that cannot be patched.
    """

    def __init__(self, path: Path, *, is_private: bool = False) -> None:
        self.path = path
        try:
            num_bytes = path.stat().st_size
        except FileNotFoundError:
            raise ObjectNotFound("file is missing", file=str(path)) from None
        if num_bytes < _LENGTH.size:
            raise CorruptFile("not a safetensors file", file=str(path), found=f"{num_bytes} bytes")
        self._data = np.memmap(path, dtype=np.uint8, mode="c" if is_private else "r")
        header = _read_header(path, self._data)
        self.metadata: dict[str, str] = _read_free_metadata(path, header)
        self.specs: dict[str, TensorSpec] = {}
        self._ranges: dict[str, tuple[int, int]] = {}
        start = _LENGTH.size + _LENGTH.unpack(self._data[: _LENGTH.size].tobytes())[0]
        for name, entry in header.items():
            self.specs[name], (begin, end) = _read_entry(path, name, entry)
            self._ranges[name] = (start + begin, start + end)
        _check_layout(path, start, num_bytes, self._ranges)

    def bits(self, name: str) -> Bits:
        """Return all elements of a tensor, flat: a view, no copy.

        Raises:
            KeyError: the file has no such tensor.
        """
        begin, end = self._ranges[name]
        view: Bits = self._data[begin:end].view(self.specs[name].element.bits)
        return view

    def offset(self, name: str) -> int:
        """Return where in the file the tensor's first byte lies."""
        return self._ranges[name][0]


def _read_header(path: Path, data: np.ndarray[Any, np.dtype[np.uint8]]) -> dict[str, Any]:
    (length,) = _LENGTH.unpack(data[: _LENGTH.size].tobytes())
    if length > MAX_HEADER_BYTES:
        raise LimitExceeded(
            "header too long", file=str(path), expected=f"at most {MAX_HEADER_BYTES} bytes", found=length
        )
    if _LENGTH.size + length > data.size:
        raise CorruptFile(
            "file is cut off in its header",
            file=str(path),
            expected=f"{_LENGTH.size + length} bytes",
            found=data.size,
        )
    try:
        # Decoded here, since json.loads would also take UTF-16.
        text = data[_LENGTH.size : _LENGTH.size + length].tobytes().decode()
        header = json.loads(text, object_pairs_hook=unique_pairs)
    except (ValueError, RecursionError) as error:
        raise CorruptFile("header is not valid JSON", file=str(path), found=error) from error
    if not isinstance(header, dict):
        raise CorruptFile("header is not a JSON object", file=str(path), found=type(header).__name__)
    return header


def _read_free_metadata(path: Path, header: dict[str, Any]) -> dict[str, str]:
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CorruptFile("__metadata__ is not an object of strings", file=str(path))
    return metadata


def _read_entry(path: Path, name: str, entry: Any) -> tuple[TensorSpec, tuple[int, int]]:
    try:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        begin, end = offsets
        numbers = [*shape, begin, end]
        well_formed = (
            set(entry) == {"dtype", "shape", "data_offsets"}
            and isinstance(dtype, str)
            and isinstance(shape, list)
            and isinstance(offsets, list)
            and len(shape) <= MAX_DIMENSIONS
            and all(type(number) is int and 0 <= number < 2**63 for number in numbers)
        )
    except (TypeError, KeyError, ValueError) as error:
        raise CorruptFile("header entry is malformed", file=str(path), tensor=name, found=error) from error
    if not well_formed:
        raise CorruptFile("header entry is malformed", file=str(path), tensor=name, found=repr(entry)[:200])
    try:
        expected = math.prod(shape) * dtype_of(dtype).itemsize
    except UnsupportedFormat as error:
        raise UnsupportedFormat(
            error.what, file=str(path), tensor=name, expected=error.expected, found=dtype[:80], hint=error.hint
        ) from error
    if end - begin != expected:
        raise CorruptFile(
            "data does not fit the shape",
            file=str(path),
            tensor=name,
            expected=f"{expected} bytes",
            found=f"{end - begin} bytes",
        )
    return TensorSpec(name, tuple(shape), dtype), (begin, end)


def _check_layout(path: Path, start: int, num_bytes: int, ranges: Mapping[str, tuple[int, int]]) -> None:
    position = start
    for begin, end in sorted(ranges.values()):
        if begin != position:
            raise CorruptFile("header leaves a hole or overlaps", file=str(path), expected=position, found=begin)
        position = end
    if position != num_bytes:
        raise CorruptFile(
            "file size does not fit its header", file=str(path), expected=f"{position} bytes", found=num_bytes
        )
