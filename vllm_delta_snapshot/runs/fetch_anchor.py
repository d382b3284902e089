# SPDX-License-Identifier: Apache-2.0
"""Fetch an anchor: a whole checkpoint of the run, as a local folder, its state proven by the version's record."""

from __future__ import annotations

from pathlib import Path

from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import CorruptFile
from vllm_delta_snapshot.format.anchor import AnchorRecord
from vllm_delta_snapshot.runs.fetch import fetch
from vllm_delta_snapshot.runs.run_folder import RunFolder

__all__ = ["fetch_anchor"]


def fetch_anchor(folder: RunFolder, record: AnchorRecord, target: Path) -> Checkpoint:
    """Bring an anchor's files into the local folder `target`, and check them. Blocks; reads every byte twice.

    Files that are there and intact are kept, so that a fetch that was cut off goes on.

    Raises:
        CorruptFile: a file is missing or damaged, or the checkpoint is not the version that it claims to be.
        SourceError: its tensors are not those of the run.
        BrokenChain, UnsupportedFormat, StoreUnavailable: it cannot be read.
        StageError: the local disk failed.
    """
    run = folder.read_run()
    try:
        fetch(folder.store, record, folder.read_anchor_metadata(record), target)
    except CorruptFile as error:
        hint = f"Delete it: delta-snapshot prune {folder.store.uri} --drop-anchor {record.version} --yes"
        raise CorruptFile(
            f"the anchor of version {record.version} is damaged: {error.what}",
            file=error.file,
            expected=error.expected,
            found=error.found,
            hint=hint,
        ) from error
    checkpoint = Checkpoint(target)
    checkpoint.check_fits(dict(run.specs()), what=f"run {run.run_id}")
    expected = folder.read_version(record.version).state_digest
    if {record.state_digest, checkpoint.state_digest} != {expected}:
        raise CorruptFile(
            f"the anchor is not version {record.version}",
            file=f"{folder.store.uri}/{record.folder}",
            expected=f"state digest {expected}",
            found=f"state digest {checkpoint.state_digest}",
            hint=f"Delete it: delta-snapshot prune {folder.store.uri} --drop-anchor {record.version} --yes",
        )
    return checkpoint
