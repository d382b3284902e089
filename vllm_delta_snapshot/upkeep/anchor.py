# SPDX-License-Identifier: Apache-2.0
"""Write an anchor: a version of a run as a whole checkpoint in the store, from which a late engine or trainer starts.

Made from the store, not from the trainer's memory, so it can be made anywhere, by anybody who may write there, beside a
trainer and running readers. The checkpoint is materialized on the local disk, proven, and uploaded; the record is last.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import CorruptFile
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.anchor import AnchorMetadata, AnchorRecord
from vllm_delta_snapshot.format.metadata import FileEntry
from vllm_delta_snapshot.runs.delta_folder import TOOL, utc_now
from vllm_delta_snapshot.runs.materialize import PROVENANCE_NAME, materialize
from vllm_delta_snapshot.runs.own_run import OwnRun
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import Store
from vllm_delta_snapshot.upkeep.shortcut import commit_shortcut
from vllm_delta_snapshot.util.scratch import scratch_folder
from vllm_delta_snapshot.util.traffic import WRITTEN, count_bytes

__all__ = ["AnchorReport", "write_anchor"]

logger = logging.getLogger(__name__)

_BLOCK: Final = 8 << 20

Progress = Callable[[int, int], None]
"""Called with (bytes written, bytes in all)."""


@dataclass(frozen=True, slots=True)
class AnchorReport:
    """What was written.

    Attributes:
        version: the version that the anchor is.
        payload_bytes: its bytes.
        files: how many files it has.
        folder: where it lies in the store.
        existed: whether it was there already; then nothing was written.
    """

    version: int
    payload_bytes: int
    files: int
    folder: str
    existed: bool = False


def write_anchor(
    folder: RunFolder,
    base: Checkpoint | None,
    version: int,
    *,
    scratch: Path | None = None,
    progress: Progress | None = None,
) -> AnchorReport:
    """Write the anchor of a version. Blocks; takes the size of the checkpoint on the local disk meanwhile.

    Args:
        folder: the run.
        base: the base checkpoint, local; ``None`` if it is not at hand: then there has to be an earlier anchor.
        version: the version, at least 1.
        scratch: where to materialize it; by default the temp folder.
        progress: told as it is uploaded.

    Raises:
        BrokenChain, BaseMismatch, CorruptFile, UnsupportedFormat, VerifyError: the version cannot be had.
        RunMismatch: the folder is another run's by now.
        StageError: the local disk failed.
        StoreError, StoreUnavailable: it was not written, or it is not known whether it was; do it again.
    """
    run_id = folder.read_run().run_id
    own = OwnRun(folder.store, run_id)
    if version in folder.shortcuts().anchors and not own.remove_foreign(layout.anchor_key(version)):
        return _of_another(folder, folder.read_anchor(version))
    publication_id = uuid.uuid4().hex
    target = layout.anchor_folder(version, publication_id)
    with scratch_folder("delta-snapshot-anchor-", scratch) as temporary:
        made = materialize(folder, base, version, temporary / "checkpoint")
        files = _upload(folder.store, target, Path(made.folder), progress)
    metadata = AnchorMetadata(
        run_id=run_id,
        version=version,
        publication_id=publication_id,
        state_digest=made.state_digest,
        files=files,
        created_at=utc_now(),
        writer=TOOL,
    )
    data = metadata.to_json()
    folder.store.put(f"{target}/{layout.METADATA_NAME}", [memoryview(data)])
    record = AnchorRecord(
        run_id=run_id,
        version=version,
        publication_id=publication_id,
        folder=target,
        metadata_bytes=len(data),
        metadata_xxh3_128=xxhash.xxh3_128_hexdigest(data),
        payload_bytes=sum(entry.bytes for entry in files),
        state_digest=made.state_digest,
        created_at=utc_now(),
    )
    key = layout.anchor_key(version)
    found = commit_shortcut(own, key, record, lambda: folder.read_anchor(version))
    if found.publication_id != publication_id:
        return _of_another(folder, found)
    logger.info("anchored version=%d bytes=%d", version, record.payload_bytes)
    return AnchorReport(version, record.payload_bytes, len(files), target)


def _upload(store: Store, target: str, source: Path, progress: Progress | None) -> tuple[FileEntry, ...]:
    names = sorted(path.name for path in source.iterdir() if path.is_file() and path.name != PROVENANCE_NAME)
    total = sum((source / name).stat().st_size for name in names)
    done = 0
    entries = []
    for name in names:
        try:
            layout.check_file_name(name)
            if name == layout.METADATA_NAME:
                raise CorruptFile("the name is taken", found=name)
        except CorruptFile:
            if name.endswith(".safetensors"):
                raise
            logger.warning("leaving out of the anchor a file whose name cannot be stored: %r", name)
            continue
        digest = xxhash.xxh3_128()
        num_bytes = store.put(f"{target}/{name}", _blocks(source / name, digest))
        entries.append(FileEntry(name=name, bytes=num_bytes, xxh3_128=digest.hexdigest()))
        done += num_bytes
        if progress:
            progress(done, total)
    return tuple(entries)


def _blocks(path: Path, digest: xxhash.xxh3_128) -> Iterator[memoryview]:
    """Yield a file block by block, each in memory of its own, and digest it."""
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            count_bytes(WRITTEN, len(block))
            yield memoryview(block)


def _of_another(folder: RunFolder, record: AnchorRecord) -> AnchorReport:
    files = len(folder.read_anchor_metadata(record).files)
    return AnchorReport(record.version, record.payload_bytes, files, record.folder, existed=True)
