# SPDX-License-Identifier: Apache-2.0
"""The payload of a delta: many encoded changes in one or several safetensors files.

`plan_file` turns encoded blocks into a file to be written, `decode_file` turns a local file back. Keys are
``{i}.{part}``, with ``i`` the block's number; the header repeats ``layer_names`` as OpenRL does. Nothing here talks to
a store.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from vllm_delta_snapshot.dtypes import dtype_of
from vllm_delta_snapshot.errors import CorruptFile, FormatError
from vllm_delta_snapshot.format.blocks import EncodedBlock, FiledBlock
from vllm_delta_snapshot.format.encodings import encoding_of
from vllm_delta_snapshot.format.encodings.base import Part, Parts, Stated
from vllm_delta_snapshot.format.metadata import LAYER_NAMES_KEY
from vllm_delta_snapshot.format.safetensors_io import MappedFile, NamedBits, file_chunks, file_size
from vllm_delta_snapshot.types import Change, TensorSpec
from vllm_delta_snapshot.util.ordered import ordered_map

__all__ = ["DEFAULT_MAX_FILE_BYTES", "PlannedFile", "StoredChange", "decode_file", "iter_file", "plan_file"]

DEFAULT_MAX_FILE_BYTES: Final = 1_000_000_000
"""A file grows past this only when it holds a single block."""

_KEY: Final = re.compile(r"(0|[1-9][0-9]{0,8})\.([a-z_0-9]{1,32})")


@dataclass(frozen=True, slots=True, eq=False)
class PlannedFile:
    """A payload file that is ready to be written.

    Attributes:
        name: its name in the publication's folder.
    """

    name: str
    _arrays: tuple[NamedBits, ...]
    _header: dict[str, str]

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return file_size(self._arrays, self._header)

    def chunks(self) -> Iterator[memoryview]:
        """Yield the bytes of the file: views, valid while this object lives."""
        return file_chunks(self._arrays, self._header)


@dataclass(frozen=True, slots=True)
class StoredChange:
    """What metadata says of one change in a file: where it is and what it must decode to.

    Attributes:
        place: its place in ``layer_names``.
        spec: the tensor.
        changed: how many elements change.
        encoding: the encoding of its block.
        block: the number of its block.
    """

    place: int
    spec: TensorSpec
    changed: int
    encoding: str
    block: int


def plan_file(name: str, blocks: Sequence[EncodedBlock | FiledBlock]) -> PlannedFile:
    """Plan a file that holds these blocks. Their arrays are referenced, not copied."""
    arrays = [_named(f"{block.place}.{part}", *value) for block in blocks for part, value in block.parts.items()]
    members = sorted(member for block in blocks for member in block.names)
    return PlannedFile(name, tuple(arrays), {LAYER_NAMES_KEY: json.dumps([name for _, name in members])})


def iter_file(
    path: Path, stored: Sequence[StoredChange], pool: ThreadPoolExecutor | None = None
) -> Iterator[tuple[int, Change]]:
    """Yield place and change of all changes of one file, a few blocks at a time in memory. See `decode_file`."""
    mapped = MappedFile(path)
    parts = _group_keys(path, mapped)
    blocks: dict[int, list[StoredChange]] = {}
    for change in stored:
        blocks.setdefault(change.block, []).append(change)
    if parts.keys() != blocks.keys():
        raise CorruptFile(
            "wrong tensors in the file",
            file=str(path),
            expected=f"places {_listed(set(blocks))}",
            found=f"places {_listed(set(parts))}",
        )
    for of_block in ordered_map(lambda item: _decode_block(path, item[1], parts[item[0]]), blocks.items(), pool):
        yield from of_block.items()


def decode_file(path: Path, stored: Sequence[StoredChange], pool: ThreadPoolExecutor | None = None) -> list[Change]:
    """Read the changes of one file, every one checked; uncompressed ones are views of the mapped file.

    Args:
        path: a local file.
        stored: exactly the changes that must be in it.
        pool: threads to decode on; ``None`` for the caller's.

    Returns:
        The changes in the order of `stored`.

    Raises:
        CorruptFile: the file is not a container of exactly these changes.
        UnsupportedFormat: an unknown encoding or element type.
        LimitExceeded, ObjectNotFound: see `MappedFile`.
    """
    decoded = dict(iter_file(path, stored, pool))
    return [decoded[change.place] for change in stored]


def _decode_block(path: Path, members: Sequence[StoredChange], parts: Parts) -> dict[int, Change]:
    first = members[0]
    try:
        encoding = encoding_of(first.encoding)
        alike = {(member.encoding, member.spec.element.itemsize) for member in members}
        if len(alike) > 1 or (len(members) > 1 and not encoding.is_joint):
            raise CorruptFile("tensors that cannot share a block", tensor=first.spec.name, found=sorted(alike))
        changes = encoding.decode([Stated(member.spec, member.changed) for member in members], parts)
    except FormatError as error:
        raise type(error)(
            error.what,
            file=str(path),
            tensor=error.tensor or first.spec.name,
            expected=error.expected,
            found=error.found,
            hint=error.hint,
        ) from error
    return {member.place: change for member, change in zip(members, changes, strict=True)}


def _named(key: str, code: str, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> NamedBits:
    bits = array.view(dtype_of(code).bits)
    return NamedBits(TensorSpec(key, (array.size,), code), bits)


def _group_keys(path: Path, mapped: MappedFile) -> Mapping[int, Parts]:
    grouped: dict[int, dict[str, Part]] = {}
    for key, spec in mapped.specs.items():
        match = _KEY.fullmatch(key)
        if not match:
            raise CorruptFile("unknown key", file=str(path), expected="{i}.{part}", found=repr(key[:80]))
        if len(spec.shape) != 1:
            raise CorruptFile("array is not flat", file=str(path), tensor=key, found=str(spec))
        grouped.setdefault(int(match[1]), {})[match[2]] = (spec.dtype, mapped.bits(key))
    return grouped


def _listed(places: set[int]) -> str:
    ordered = sorted(places)
    text = ", ".join(map(str, ordered[:5]))
    return (text + (", ..." if len(ordered) > 5 else "")) or "none"
