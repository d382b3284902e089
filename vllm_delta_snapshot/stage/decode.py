# SPDX-License-Identifier: Apache-2.0
"""Decode: a publication's local files -> changes, checked against the run's table of tensors and their own digests.

After this, a patch is trusted: its tensor exists with this shape and type, its positions are strictly increasing and
in range, its values have the digest that the writer computed from the weights themselves. A difference is trusted that
far when it is resolved: only with the old values can its digest be compared (`resolve`).
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vllm_delta_snapshot.errors import CorruptFile
from vllm_delta_snapshot.format.container import StoredChange, decode_file
from vllm_delta_snapshot.format.digest import add_digests, format_digest, patch_digest
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.types import Change, TensorPatch, TensorSpec

__all__ = ["decode"]


def decode(
    metadata: DeltaMetadata, folder: Path, specs: Mapping[str, TensorSpec], pool: ThreadPoolExecutor | None = None
) -> list[Change]:
    """Read every change of a publication.

    Args:
        metadata: its metadata.
        folder: where its files lie, fetched.
        specs: the run's tensors.
        pool: threads to decode on; ``None`` for the caller's.

    Returns:
        The changes in the order of ``layer_names``: uncompressed ones are views of the mapped files.

    Raises:
        CorruptFile: a tensor is unknown, its shape or type differs, or content contradicts metadata.
        UnsupportedFormat: an unknown encoding or element type.
    """
    by_file: dict[int, list[StoredChange]] = {number: [] for number in range(len(metadata.files))}
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
        block = place if entry.block is None else entry.block
        by_file[entry.file].append(StoredChange(place, spec, entry.changed, entry.encoding, block))
    changes: dict[str, Change] = {}
    for number, stored in by_file.items():
        for change in decode_file(folder / metadata.files[number].name, stored, pool):
            changes[change.spec.name] = change
    ordered = [changes[name] for name in metadata.layer_names]
    _check_digests(metadata, ordered)
    return ordered


def _check_digests(metadata: DeltaMetadata, changes: list[Change]) -> None:
    state = int(metadata.base_state_digest, 16)
    for entry, change in zip(metadata.tensors, changes, strict=True):
        if isinstance(change, TensorPatch):
            found = format_digest(patch_digest(change.spec, change.positions, change.values))
            if found != entry.new_digest or entry.old_digest is None:
                raise CorruptFile(
                    f"version {metadata.version} holds other values than its writer saw",
                    tensor=entry.name,
                    expected=f"digest {entry.new_digest}, and one of the values before",
                    found=f"digest {found}, and {entry.old_digest}",
                )
        state = add_digests(state, entry.moves_digest)
    if format_digest(state) != metadata.state_digest:
        raise CorruptFile(
            f"version {metadata.version} does not lead to the state it claims",
            expected=f"state digest {metadata.state_digest}",
            found=format_digest(state),
        )
