# SPDX-License-Identifier: Apache-2.0
"""The payload of a delta: many patches in one or several safetensors files.

`encode_delta` turns patches into planned files, `decode_file` turns a local file back. Keys are ``{i}.{part}``, with
``i`` the tensor's place in ``layer_names``; the header repeats ``layer_names`` as OpenRL does. Neither function
talks to a store.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from vllm_delta_snapshot.dtypes import dtype_of
from vllm_delta_snapshot.errors import CorruptFile, FormatError
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.encodings import Encoding, encoding_of
from vllm_delta_snapshot.format.encodings.base import Part, Parts
from vllm_delta_snapshot.format.metadata import LAYER_NAMES_KEY
from vllm_delta_snapshot.format.safetensors_io import MappedFile, NamedBits, file_chunks, file_size
from vllm_delta_snapshot.types import TensorPatch, TensorSpec

__all__ = ["DEFAULT_MAX_FILE_BYTES", "PlannedFile", "StoredPatch", "decode_file", "encode_delta"]

DEFAULT_MAX_FILE_BYTES: Final = 1_000_000_000
"""A file grows past this only when it holds a single tensor."""

_KEY: Final = re.compile(r"(0|[1-9][0-9]{0,8})\.([a-z_]{1,32})")


@dataclass(frozen=True, slots=True, eq=False)
class PlannedFile:
    """A payload file that is ready to be written.

    Attributes:
        name: its name in the publication's folder.
        members: the places (in ``layer_names``) of the tensors inside.
    """

    name: str
    members: tuple[int, ...]
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
class StoredPatch:
    """What metadata says of one patch in a file: where it is and what it must decode to."""

    place: int
    spec: TensorSpec
    changed: int
    encoding: str


def encode_delta(
    patches: Sequence[TensorPatch], encoding: Encoding, *, max_file_bytes: int = DEFAULT_MAX_FILE_BYTES
) -> list[PlannedFile]:
    """Plan the files of a delta; at least one, even if nothing changed.

    Args:
        patches: the changed tensors, in the order of ``layer_names``. Their arrays are referenced, not copied.
        encoding: how to write each of them.
        max_file_bytes: soft limit of a file's size.
    """
    groups: list[tuple[list[int], list[NamedBits]]] = [([], [])]
    size = 0
    for place, patch in enumerate(patches):
        arrays = [_named(f"{place}.{part}", *value) for part, value in encoding.encode(patch).items()]
        num_bytes = sum(array.spec.num_bytes for array in arrays)
        if groups[-1][0] and size + num_bytes > max_file_bytes:
            groups.append(([], []))
            size = 0
        groups[-1][0].append(place)
        groups[-1][1].extend(arrays)
        size += num_bytes
    names = [patch.spec.name for patch in patches]
    return [
        PlannedFile(
            layout.delta_file_name(number, len(groups)),
            tuple(members),
            tuple(arrays),
            {LAYER_NAMES_KEY: json.dumps([names[place] for place in members])},
        )
        for number, (members, arrays) in enumerate(groups)
    ]


def decode_file(path: Path, stored: Sequence[StoredPatch]) -> list[TensorPatch]:
    """Read the patches of one file: views of the mapped file, every one checked.

    Args:
        path: a local file.
        stored: exactly the patches that must be in it.

    Raises:
        CorruptFile: the file is not a container of exactly these patches.
        UnsupportedFormat: an unknown encoding or element type.
        LimitExceeded, ObjectNotFound: see `MappedFile`.
    """
    mapped = MappedFile(path)
    parts = _group_keys(path, mapped)
    expected = {patch.place for patch in stored}
    if set(parts) != expected:
        raise CorruptFile(
            "wrong tensors in the file",
            file=str(path),
            expected=f"places {_listed(expected)}",
            found=f"places {_listed(set(parts))}",
        )
    patches = []
    for patch in stored:
        try:
            decoded = encoding_of(patch.encoding).decode(patch.spec, patch.changed, parts[patch.place])
        except FormatError as error:
            raise type(error)(
                error.what,
                file=str(path),
                tensor=patch.spec.name,
                expected=error.expected,
                found=error.found,
                hint=error.hint,
            ) from error
        patches.append(decoded)
    return patches


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
