# SPDX-License-Identifier: Apache-2.0
"""Decode: a publication's local files -> patches, checked against the run's table of tensors and their own digests.

After this, a patch is trusted: its tensor exists with this shape and type, its positions are strictly increasing and
in range, its values have the digest that the writer computed from the weights themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vllm_delta_snapshot.errors import CorruptFile
from vllm_delta_snapshot.format.container import StoredPatch, decode_file
from vllm_delta_snapshot.format.digest import add_digests, format_digest, patch_digest
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.types import TensorPatch, TensorSpec

__all__ = ["decode"]


def decode(metadata: DeltaMetadata, folder: Path, specs: Mapping[str, TensorSpec]) -> list[TensorPatch]:
    """Read every patch of a publication.

    Args:
        metadata: its metadata.
        folder: where its files lie, fetched.
        specs: the run's tensors.

    Returns:
        The patches in the order of ``layer_names``: views of the mapped files.

    Raises:
        CorruptFile: a tensor is unknown, its shape or type differs, or content contradicts metadata.
        UnsupportedFormat: an unknown encoding or element type.
    """
    by_file: dict[int, list[StoredPatch]] = {number: [] for number in range(len(metadata.files))}
    for place, entry in enumerate(metadata.tensors):
        spec = entry.spec()
        known = specs.get(entry.name)
        if known != spec:
            raise CorruptFile(
                f"version {metadata.version} has a tensor that does not fit the run",
                tensor=entry.name,
                expected=known or "no such tensor",
                found=spec,
            )
        by_file[entry.file].append(StoredPatch(place, spec, entry.changed, entry.encoding))
    patches: dict[str, TensorPatch] = {}
    for number, stored in by_file.items():
        for patch in decode_file(folder / metadata.files[number].name, stored):
            patches[patch.spec.name] = patch
    ordered = [patches[name] for name in metadata.layer_names]
    _check_digests(metadata, ordered)
    return ordered


def _check_digests(metadata: DeltaMetadata, patches: list[TensorPatch]) -> None:
    state = int(metadata.base_state_digest, 16)
    for entry, patch in zip(metadata.tensors, patches, strict=True):
        found = patch_digest(patch.spec, patch.positions, patch.values)
        if format_digest(found) != entry.new_digest:
            raise CorruptFile(
                f"version {metadata.version} holds other values than its writer saw",
                tensor=entry.name,
                expected=f"digest {entry.new_digest}",
                found=format_digest(found),
            )
        state = add_digests(state, found, -int(entry.old_digest, 16))
    if format_digest(state) != metadata.state_digest:
        raise CorruptFile(
            f"version {metadata.version} does not lead to the state it claims",
            expected=f"state digest {metadata.state_digest}",
            found=format_digest(state),
        )
