# SPDX-License-Identifier: Apache-2.0
"""Decode: a publication's local files -> changes, checked against the run's table of tensors and their own digests.

After this, a patch is trusted: its tensor exists with this shape and type, its positions are strictly increasing and
in range, its values have the digest that the writer computed from the weights themselves. A difference is trusted that
far when it is resolved: only with the old values can its digest be compared (`resolve`).
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vllm_delta_snapshot.changes.parts import join_parts
from vllm_delta_snapshot.errors import CorruptFile, FormatError
from vllm_delta_snapshot.format.container import StoredChange, iter_file
from vllm_delta_snapshot.format.digest import add_digests, format_digest, patch_digest
from vllm_delta_snapshot.format.metadata import DeltaMetadata, TensorEntry
from vllm_delta_snapshot.types import Change, TensorPatch, TensorSpec

__all__ = ["decode", "iter_decoded", "naming"]


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
        One change a tensor, in the order of ``layer_names``: uncompressed ones are views of the mapped files.

    Raises:
        CorruptFile: a tensor is unknown, its shape or type differs, its parts do not fit together, or content
            contradicts metadata.
        UnsupportedFormat: an unknown encoding or element type.
    """
    changes = dict(iter_decoded(metadata, folder, specs, pool))
    return join_parts([changes[place] for place in range(len(metadata.tensors))])


def iter_decoded(
    metadata: DeltaMetadata, folder: Path, specs: Mapping[str, TensorSpec], pool: ThreadPoolExecutor | None = None
) -> Iterator[tuple[int, Change]]:
    """Yield place and change of every entry of ``tensors``, a few blocks at a time in memory.

    Parts of a tensor come one by one, and are not compared with each other. See `decode`.
    """
    _check_state(metadata)
    for number, stored in _by_file(metadata, specs).items():
        for place, change in iter_file(folder / metadata.files[number].name, stored, pool):
            _check_digest(metadata, metadata.tensors[place], change)
            yield place, change


def _by_file(metadata: DeltaMetadata, specs: Mapping[str, TensorSpec]) -> dict[int, list[StoredChange]]:
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
    return by_file


def _check_digest(metadata: DeltaMetadata, entry: TensorEntry, change: Change) -> None:
    if isinstance(change, TensorPatch):
        found = format_digest(patch_digest(change.spec, change.positions, change.values))
        if found != entry.new_digest or entry.old_digest is None:
            raise CorruptFile(
                f"version {metadata.version} holds other values than its writer saw",
                tensor=entry.name,
                expected=f"digest {entry.new_digest}, and one of the values before",
                found=f"digest {found}, and {entry.old_digest}",
            )


def _check_state(metadata: DeltaMetadata) -> None:
    moves = (entry.moves_digest for entry in metadata.tensors)
    state = format_digest(add_digests(int(metadata.base_state_digest, 16), *moves))
    if state != metadata.state_digest:
        raise CorruptFile(
            f"version {metadata.version} does not lead to the state it claims",
            expected=f"state digest {metadata.state_digest}",
            found=state,
        )


@contextlib.contextmanager
def naming(local: Path, uri: str, folder: str) -> Iterator[None]:
    """Have errors name the objects of the store, not the local copies, which are gone when somebody reads of them.

    Args:
        local: where the copies lie.
        uri: the store.
        folder: the folder in it that they were fetched from.
    """
    try:
        yield
    except FormatError as error:
        hint = f"See what is damaged: delta-snapshot verify {shlex.quote(uri)}; restore it from a copy of the run."
        raise error.moved(str(local), f"{uri}/{folder}", hint=hint) from error
