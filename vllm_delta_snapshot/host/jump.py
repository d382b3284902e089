# SPDX-License-Identifier: Apache-2.0
"""Jump: the delta from a checkpoint at hand to an anchor, made by comparing the two.

For an engine that starts after the deltas from its checkpoint on were pruned, or were more bytes than an anchor has. In
the form of a merged delta, of absolute values. Memory is what one tensor changes; disk, for as long as it takes, what
the anchor has.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.errors import FormatError, ObjectNotFound
from vllm_delta_snapshot.format.anchor import AnchorRecord
from vllm_delta_snapshot.format.digest import patch_digest
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.interop.openrl import read_folder_metadata
from vllm_delta_snapshot.runs.delta_folder import DigestedChange, Lineage, WriterNotes, write_delta_folder
from vllm_delta_snapshot.runs.fetch import is_intact
from vllm_delta_snapshot.runs.fetch_anchor import fetch_anchor
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store.posix import PosixStore
from vllm_delta_snapshot.types import Positions, TensorPatch, position_dtype
from vllm_delta_snapshot.util.new_folder import appearing

__all__ = ["write_jump"]

_WINDOW: Final = 1 << 20


def write_jump(
    folder: RunFolder, record: AnchorRecord, checkpoint: Checkpoint, version: int, out: Path
) -> DeltaMetadata:
    """Write the delta from a checkpoint to an anchor as the folder `out`; it appears whole or not at all. Blocks.

    One that is there, whole and of the same two states, is kept: of a process before this one.

    Args:
        folder: the run.
        record: the anchor.
        checkpoint: the checkpoint at hand.
        version: the version that it is.
        out: where to.

    Raises:
        CorruptFile, SourceError, BrokenChain, UnsupportedFormat, StageError, StoreUnavailable: see `fetch_anchor`.
    """
    lineage = Lineage(
        run_id=record.run_id,
        version=record.version,
        base_version=version,
        base_state_digest=checkpoint.state_digest,
        total_elements=checkpoint.total_elements,
    )
    ends = (version, checkpoint.state_digest, record.version, record.state_digest)
    found = _whole(out)
    if found and ends == (found.base_version, found.base_state_digest, found.version, found.state_digest):
        return found
    shutil.rmtree(out, ignore_errors=True)
    for dead in out.parent.glob(".anchor-*"):
        shutil.rmtree(dead, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".anchor-", dir=out.parent) as scratch, appearing(out) as work:
        anchor = fetch_anchor(folder, record, Path(scratch))
        notes = WriterNotes(base_model=folder.read_run().base.name)
        return write_delta_folder(
            PosixStore(work.parent),
            work.name,
            record.publication_id,
            lineage,
            _changes(checkpoint, anchor),
            lambda: notes,
        ).metadata


def _whole(out: Path) -> DeltaMetadata | None:
    """Return the metadata of a delta's folder if every file is there and intact."""
    try:
        metadata = read_folder_metadata(out)
    except (ObjectNotFound, FormatError):
        return None
    is_ours = isinstance(metadata, DeltaMetadata) and all(
        is_intact(out / entry.name, entry) for entry in metadata.files
    )
    return metadata if isinstance(metadata, DeltaMetadata) and is_ours else None


def _changes(before: Checkpoint, after: Checkpoint) -> Iterator[DigestedChange]:
    for name, spec in before.specs.items():
        old, new = before.bits(name), after.bits(name)
        positions = _differing(old, new)
        if positions.size:
            patch = TensorPatch(spec, positions, new[positions])
            old_digest = patch_digest(spec, positions, old[positions])
            yield DigestedChange(patch, old_digest, patch_digest(spec, positions, patch.values))


def _differing(old: Bits, new: Bits) -> Positions:
    """Return where two tensors differ, window by window: what is compared stays in the cache."""
    kind = position_dtype(old.size)
    found = [np.empty(0, kind)]
    for start in range(0, old.size, _WINDOW):
        differs = np.flatnonzero(old[start : start + _WINDOW] != new[start : start + _WINDOW])
        if differs.size:
            found.append((differs + start).astype(kind))
    return np.concatenate(found)
