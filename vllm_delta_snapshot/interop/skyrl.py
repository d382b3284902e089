# SPDX-License-Identifier: Apache-2.0
"""Folders that SkyRL wrote: for each changed tensor the zstd frame of old XOR new, read against the old bits.

All that sizes and headers can show is checked when a folder is opened, before anything is decompressed. A patch is
returned when the whole new tensor has the checksum that the manifest promises: it is exact, or it is an error. Which
deltas follow each other is not decided here (`interop.chain`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.errors import CorruptFile, ObjectNotFound
from vllm_delta_snapshot.format.encodings.planes import check_frame, frame_pieces
from vllm_delta_snapshot.format.safetensors_io import MappedFile
from vllm_delta_snapshot.interop.skyrl_manifest import (
    MANIFEST_NAME,
    SkyRLManifest,
    SkyRLTensor,
    explained,
    read_manifest,
)
from vllm_delta_snapshot.types import TensorPatch, TensorSpec, position_dtype

__all__ = ["SkyRLDelta", "open_skyrl_delta"]

BitsOf = Callable[[str], Bits]
"""Returns all elements of a tensor, by name."""


class _Hash(Protocol):
    def update(self, data: memoryview, /) -> object: ...

    def hexdigest(self) -> str: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Payload:
    """What one entry of the manifest stands for: the tensor, and its frame in a mapped file."""

    entry: SkyRLTensor
    spec: TensorSpec
    file: Path
    frame: NDArray[np.uint8]


class SkyRLDelta:
    """A SkyRL delta folder that was opened by `open_skyrl_delta`; its payload files are mapped.

    Attributes:
        folder: the folder.
        manifest: its manifest.
        specs: the changed tensors, in the manifest's order.
        payload_bytes: bytes of all payload files.
    """

    def __init__(self, folder: Path, manifest: SkyRLManifest, payloads: Mapping[str, _Payload], num_bytes: int) -> None:
        self.folder = folder
        self.manifest = manifest
        self.specs = {name: payload.spec for name, payload in payloads.items()}
        self.payload_bytes = num_bytes
        self._payloads = payloads

    def patch(self, name: str, old: Bits) -> TensorPatch:
        """Return what changes in one tensor, and its new values.

        Memory grows with the changes, not with the tensor.

        Args:
            name: one of `specs`.
            old: all its elements at ``base_version``, flat.

        Raises:
            CorruptFile: the payload is damaged, or the new tensor is not the published one: the payload or the old
                values are wrong.
        """
        payload = self._payloads[name]
        spec, digest = payload.spec, _new_hash(payload.entry.algorithm)
        positions = [np.empty(0, np.int64)]
        values: list[Bits] = [np.empty(0, spec.element.bits)]
        for start, moves in self._moves(payload):
            new: Bits = np.bitwise_xor(old[start : start + moves.size], moves)
            digest.update(new.data.cast("B"))
            at = np.flatnonzero(moves != 0)  # of a mask it is four times as fast
            positions.append(at + start)
            values.append(new[at])
        if digest.hexdigest() != payload.entry.digest:
            raise _not_published(payload, self.manifest, digest.hexdigest())
        joined = np.concatenate(positions).astype(position_dtype(spec.numel))
        return TensorPatch(spec, joined, cast("Bits", np.concatenate(values)))

    def patches(self, bits: BitsOf) -> Iterator[TensorPatch]:
        """Yield a patch for every tensor of the manifest; one whose XOR is all zero changes nothing.

        Args:
            bits: returns all elements of a tensor at ``base_version``; asked for each tensor once.

        Raises:
            CorruptFile: see `patch`.
        """
        for name in self.specs:
            yield self.patch(name, bits(name))

    def count_changed(self, name: str) -> int:
        """Return how many elements of a tensor change, which needs no old values.

        Raises:
            CorruptFile: the payload is damaged. A checksum cannot be compared.
        """
        return sum(int(np.count_nonzero(moves)) for _, moves in self._moves(self._payloads[name]))

    def _moves(self, payload: _Payload) -> Iterator[tuple[int, Bits]]:
        """Yield consecutive pieces of old XOR new, and where each starts; a piece is overwritten by the next."""
        start = 0
        with explained(payload.file, payload.spec.name):
            for piece in frame_pieces(payload.frame, payload.spec.num_bytes, tensor=payload.spec.name):
                moves: Bits = piece.view(payload.spec.element.bits)
                yield start, moves
                start += moves.size


def open_skyrl_delta(folder: Path, specs: Mapping[str, TensorSpec] | None = None) -> SkyRLDelta:
    """Open a local SkyRL delta folder and check all that can be checked without decompressing.

    Args:
        folder: holds manifest.json and the payload files.
        specs: the tensors of the checkpoint; ``None`` takes the manifest's own word (to inspect it).

    Raises:
        ObjectNotFound: there is no manifest.json.
        CorruptFile: the folder contradicts itself, or a tensor does not fit `specs`.
        UnsupportedFormat, LimitExceeded, StoreUnavailable: see `read_manifest` and `MappedFile`.
    """
    manifest = read_manifest(folder)
    mapped = {name: _map(folder / name) for name in manifest.payload_files}
    payloads = {}
    for entry in manifest.tensors:
        file = mapped[entry.payload_file]
        with explained(folder / MANIFEST_NAME, entry.name):
            spec = _fitting(entry.spec(), specs)
        with explained(file.path, entry.name):
            payloads[entry.name] = _Payload(entry, spec, file.path, _frame(entry, file))
    _check_keys(manifest, mapped)
    num_bytes = sum(file.path.stat().st_size for file in mapped.values())
    return SkyRLDelta(folder, manifest, payloads, num_bytes)


def _map(path: Path) -> MappedFile:
    with explained(path):
        try:
            return MappedFile(path)
        except ObjectNotFound:
            raise CorruptFile("the manifest lists a payload file that is missing") from None


def _fitting(spec: TensorSpec, specs: Mapping[str, TensorSpec] | None) -> TensorSpec:
    if specs is not None and specs.get(spec.name) != spec:
        raise CorruptFile(
            "tensor does not fit the checkpoint",
            expected=specs.get(spec.name, "no such tensor"),
            found=spec,
            hint="Give the checkpoint that SkyRL's run started from.",
        )
    return spec


def _frame(entry: SkyRLTensor, file: MappedFile) -> NDArray[np.uint8]:
    stored = file.specs.get(entry.payload_key)
    if stored is None:
        raise CorruptFile("the payload file lacks a tensor", expected=f"key {entry.payload_key[:200]!r}")
    wanted = TensorSpec(entry.payload_key, (entry.compressed_num_bytes,), "U8")
    if stored != wanted:
        raise CorruptFile("a payload of another type or size", expected=wanted, found=stored)
    frame = file.bits(entry.payload_key).view(np.uint8)
    check_frame(frame, entry.uncompressed_num_bytes, tensor=entry.name)
    return frame


def _check_keys(manifest: SkyRLManifest, mapped: Mapping[str, MappedFile]) -> None:
    known = {(entry.payload_file, entry.payload_key) for entry in manifest.tensors}
    for name, file in mapped.items():
        with explained(file.path):
            for key in file.specs:
                if (name, key) not in known:
                    raise CorruptFile("the payload file holds a tensor that the manifest does not list", tensor=key)


def _new_hash(algorithm: str) -> _Hash:
    return xxhash.xxh3_128() if algorithm == "xxh3-128" else hashlib.sha256()


def _not_published(payload: _Payload, manifest: SkyRLManifest, found: str) -> CorruptFile:
    return CorruptFile(
        f"the tensor does not come out as SkyRL published it in version {manifest.version}",
        file=str(payload.file),
        tensor=payload.spec.name,
        expected=f"{payload.entry.algorithm} {payload.entry.digest}",
        found=found,
        hint=f"Either the payload is damaged, or it was applied to other weights than version {manifest.base_version}: "
        "start from SkyRL's base checkpoint and apply every version in order.",
    )
