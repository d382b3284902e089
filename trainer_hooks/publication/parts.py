# SPDX-License-Identifier: Apache-2.0
"""Parts: each rank writes its own of a publication, rank 0 the table of all. The commit is `commit`'s.

Parts of one tensor must be of one kind, which ranks agree on without asking: a tensor that is split is written as
differences where the run allows them, and else as new values; a tensor that one rank has whole is free to choose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from trainer_hooks.compare.diff import TensorDiff
from trainer_hooks.compare.shard_baseline import ShardBaseline
from trainer_hooks.publication.commit import record_of
from trainer_hooks.ranks import JSON
from vllm_delta_snapshot.errors import LimitExceeded
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.blocks import EncodedBlock
from vllm_delta_snapshot.format.choose import Chosen, choose
from vllm_delta_snapshot.format.metadata import (
    MAX_METADATA_BYTES,
    PARTS_VERSION,
    FileEntry,
    TensorEntry,
)
from vllm_delta_snapshot.format.version import VersionRecord
from vllm_delta_snapshot.runs.delta_folder import (
    DigestedChange,
    Lineage,
    WriterNotes,
    WrittenPayload,
    describe_delta,
    write_part,
)
from vllm_delta_snapshot.store import Store
from vllm_delta_snapshot.types import TensorDifference, TensorPatch, TensorSpec

__all__ = ["choose_part", "digested", "write_rank", "write_table"]


def choose_part(policy: str, diff: TensorDiff, *, is_split: bool) -> Chosen:
    """Choose an encoding for what one rank changed in one tensor.

    Args:
        policy: the run's, see `vllm_delta_snapshot.format.choose`.
        diff: the change.
        is_split: whether other parts of the tensor may be written too, by this rank or another.
    """
    if is_split and policy == "auto":
        # Gaps, also where all elements of the part change: a bitmap would be as long as the whole tensor.
        return Chosen(TensorDifference(diff.spec, diff.positions, diff.new - diff.old), "difference")
    if is_split and policy == "absolute":
        return Chosen(TensorPatch(diff.spec, diff.positions, diff.new), "packed")
    return choose(policy, diff.spec, diff.positions, diff.old, diff.new)


def digested(policy: str, diffs: Iterable[TensorDiff], baseline: ShardBaseline) -> Iterable[DigestedChange]:
    """Turn what differs into what is written."""
    for diff in diffs:
        chosen = choose_part(policy, diff, is_split=baseline.is_split(diff.spec.name))
        yield DigestedChange(chosen.change, diff.old_digest, diff.new_digest, chosen.encoding)


def write_rank(
    store: Store,
    folder: str,
    rank: int,
    changes: Iterable[DigestedChange],
    order: Mapping[str, int],
    *,
    keep: Callable[[EncodedBlock], None],
    pool: ThreadPoolExecutor | None,
    max_file_bytes: int,
) -> JSON:
    """Write one rank's payload files. Blocks until they are durable.

    Returns:
        What rank 0 needs of them.

    Raises:
        StoreError, StoreUnavailable, Exception: see `write_part`.
    """
    prefix = f"rank{rank:05d}-"
    part = write_part(store, folder, prefix, changes, order, keep=keep, pool=pool, max_file_bytes=max_file_bytes)
    return {
        "files": [entry.model_dump() for entry in part.files],
        "entries": [
            [order[e.name], e.changed, e.encoding, e.file, e.block, e.old_digest, e.new_digest] for e in part.entries
        ],
    }


def write_table(
    store: Store,
    folder: str,
    publication_id: str,
    lineage: Lineage,
    specs: Sequence[TensorSpec],
    parts: Sequence[JSON],
    notes: WriterNotes,
    seconds: float,
    max_file_bytes: int,
) -> VersionRecord:
    """Write metadata.json over the parts of all ranks. Blocks until it is durable; nobody sees the version yet.

    Returns:
        The record to commit.

    Raises:
        LimitExceeded: the table would be larger than readers accept.
        StoreError, StoreUnavailable: it was not written.
    """
    written = _joined(specs, parts)
    if not written.files:  # a delta has at least one
        empty = write_part(store, folder, "", (), {}, is_file_forced=True, max_file_bytes=max_file_bytes)
        written = WrittenPayload(empty.files, ())
    metadata = describe_delta(publication_id, lineage, written, notes, seconds=seconds, format_version=PARTS_VERSION)
    data = metadata.to_json()
    if len(data) > MAX_METADATA_BYTES:
        raise LimitExceeded(
            "metadata.json would be larger than readers accept",
            expected=f"at most {MAX_METADATA_BYTES} bytes",
            found=f"{len(data)} bytes for {len(written.entries)} parts of tensors",
            hint="Shard over fewer ranks, and replicate over the others.",
        )
    store.put(f"{folder}/{layout.METADATA_NAME}", [memoryview(data)])
    return record_of(lineage, publication_id, folder, metadata, data)


def _joined(specs: Sequence[TensorSpec], parts: Sequence[JSON]) -> WrittenPayload:
    """Put the parts of all ranks into one table, in the order of the run, parts of one tensor together."""
    files: list[FileEntry] = []
    rows: list[tuple[int, int, int, TensorEntry]] = []
    for rank, part in enumerate(parts):
        for at, (place, changed, encoding, file, block, old, new) in enumerate(part["entries"]):
            spec = specs[place]
            entry = TensorEntry(
                name=spec.name,
                shape=spec.shape,
                dtype=spec.dtype,
                changed=changed,
                encoding=encoding,
                file=len(files) + file,
                block=block,
                old_digest=old,
                new_digest=new,
            )
            rows.append((place, rank, at, entry))
        files += [FileEntry(**entry) for entry in part["files"]]
    rows.sort(key=lambda row: row[:3])
    return WrittenPayload(tuple(files), tuple(row[3] for row in rows))
