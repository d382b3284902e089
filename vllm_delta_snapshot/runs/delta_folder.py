# SPDX-License-Identifier: Apache-2.0
"""Write the folder of a delta: payload files first, then metadata.json. The commit is not made here.

The trainer writes such folders into the run, the stager writes one for its workers: merged deltas have the same form.
Changes are taken one by one, encoded in blocks, and a file is written as soon as it is full; so a delta is never in
memory as a whole, but for what the caller keeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

import xxhash

from vllm_delta_snapshot._version import __version__
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.blocks import Block, EncodedBlock, FiledBlock, Placed, encode_block, group_blocks
from vllm_delta_snapshot.format.container import DEFAULT_MAX_FILE_BYTES, PlannedFile, plan_file
from vllm_delta_snapshot.format.digest import add_digests, format_digest
from vllm_delta_snapshot.format.metadata import DeltaMetadata, FileEntry, TensorEntry, Timings
from vllm_delta_snapshot.format.openrl_write import is_openrl_tensor
from vllm_delta_snapshot.store import Store
from vllm_delta_snapshot.types import Change, TensorDifference, TensorSpec
from vllm_delta_snapshot.util.ordered import ordered_map
from vllm_delta_snapshot.util.traffic import WRITTEN, count_bytes

__all__ = [
    "TOOL",
    "DigestedChange",
    "Lineage",
    "WriterNotes",
    "WrittenDelta",
    "WrittenPayload",
    "describe_delta",
    "utc_now",
    "write_delta_folder",
    "write_part",
]

TOOL = f"vllm-delta-snapshot {__version__}"


@dataclass(frozen=True, slots=True)
class Lineage:
    """Where a delta starts and ends.

    Attributes:
        run_id: the run.
        version: the version it leads to.
        base_version: the version it starts from.
        base_state_digest: the state it starts from.
        total_elements: elements of the whole checkpoint.
    """

    run_id: str
    version: int
    base_version: int
    base_state_digest: str
    total_elements: int


@dataclass(frozen=True, slots=True)
class WriterNotes:
    """What the writer adds for people and plots; nothing depends on it."""

    base_model: str | None = None
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    diff_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class DigestedChange:
    """A change with its digests, and the encoding to write it in.

    Attributes:
        change: what changes in one tensor.
        old_digest: the digest of the values it replaces; ``None`` if only the move is known.
        new_digest: the digest of the values it brings, or the move.
        encoding: its encoding; by default the uncompressed one.
    """

    change: Change
    old_digest: int | None
    new_digest: int
    encoding: str | None = None

    @property
    def move(self) -> int:
        """By how much the digest of the tensor moves; may be negative."""
        return self.new_digest - (self.old_digest or 0)

    @property
    def encoding_name(self) -> str:
        """The encoding to write it in."""
        return self.encoding or ("raw_difference" if isinstance(self.change, TensorDifference) else "raw")


@dataclass(frozen=True, slots=True, eq=False)
class WrittenDelta:
    """A delta's folder as it was written.

    Attributes:
        metadata: its metadata.
        data: metadata.json as written.
    """

    metadata: DeltaMetadata
    data: bytes


@dataclass(frozen=True, slots=True, eq=False)
class WrittenPayload:
    """Payload files that are written and not yet described in a metadata.json.

    Attributes:
        files: the files.
        entries: what is in them; ``file`` counts among `files`.
    """

    files: tuple[FileEntry, ...]
    entries: tuple[TensorEntry, ...]


def write_delta_folder(
    store: Store,
    folder: str,
    publication_id: str,
    lineage: Lineage,
    digested: Iterable[DigestedChange],
    notes: Callable[[], WriterNotes],
    *,
    keep: Callable[[EncodedBlock], None] | None = None,
    pool: ThreadPoolExecutor | None = None,
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
) -> WrittenDelta:
    """Encode changes and write them under `folder`; metadata.json last. Blocks until all is durable.

    Args:
        store: where to.
        folder: a key that only this writer knows.
        publication_id: 32 hexadecimal digits.
        lineage: where the delta starts and leads to.
        digested: the changed tensors, taken one by one.
        notes: asked at the end what to record beside.
        keep: told of every block once it is encoded.
        pool: threads to encode on; ``None`` for the caller's.
        max_file_bytes: soft limit of a payload file.

    Raises:
        StoreError, StoreUnavailable: something was not written; the folder may be partly there and is never read.
        Exception: what `digested` raises.
    """
    started = time.monotonic()
    files = _Files(store, folder, max_file_bytes)
    table = _Table()
    _write_blocks(files, table, group_blocks(table.taken(digested)), keep, pool)
    written = WrittenPayload(files.close(), tuple(table.entries()))
    # What OpenRL's reader takes: one file, raw, real numbers.
    is_openrl = len(written.files) == 1 and all(
        row.encoding == "raw" and is_openrl_tensor(row.spec) for row in table.rows
    )
    seconds = time.monotonic() - started
    metadata = describe_delta(
        publication_id, lineage, written, notes(), seconds=seconds, format_version=2 if is_openrl else 3
    )
    data = metadata.to_json()
    store.put(f"{folder}/{layout.METADATA_NAME}", [memoryview(data)])
    return WrittenDelta(metadata, data)


def write_part(
    store: Store,
    folder: str,
    prefix: str,
    digested: Iterable[DigestedChange],
    order: Mapping[str, int],
    *,
    is_file_forced: bool = False,
    keep: Callable[[EncodedBlock], None] | None = None,
    pool: ThreadPoolExecutor | None = None,
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
) -> WrittenPayload:
    """Write one trainer's part of a delta that several write together; no metadata.json. Blocks until it is durable.

    Args:
        store: where to.
        folder: a key that only these trainers know.
        prefix: what the names of its files begin with; no other trainer's do.
        digested: the changes in the tensors that it holds, or in its parts of them, taken one by one.
        order: the place of every tensor in the run. The tensors of a block are in that order, whatever the order they
            come in, so that the parts of all trainers fit into one table.
        is_file_forced: write a file also if nothing changed.
        keep: see `write_delta_folder`.
        pool: see `write_delta_folder`.
        max_file_bytes: see `write_delta_folder`.

    Returns:
        Its files, none if nothing changed and none is forced, and its entries, in the order of the run.

    Raises:
        StoreError, StoreUnavailable: something was not written; the folder may be partly there and is never read.
        Exception: what `digested` raises.
    """
    files = _Files(store, folder, max_file_bytes, prefix)
    table = _Table(is_block_said=True)
    blocks = group_blocks(table.taken(digested), lambda placed: order[placed.change.spec.name])
    _write_blocks(files, table, blocks, keep, pool)
    written = files.close() if table.rows or is_file_forced else ()
    return WrittenPayload(written, tuple(sorted(table.entries(), key=lambda entry: order[entry.name])))


def utc_now() -> str:
    """Return the time for people, ISO 8601 in UTC. Nothing is ordered by it."""
    return datetime.now(UTC).isoformat()


@dataclass(slots=True)
class _Row:
    """What metadata says of a tensor, as it comes to be known."""

    spec: TensorSpec
    changed: int
    old_digest: int | None
    new_digest: int
    encoding: str = ""
    file: int = 0
    block: int | None = None


class _Table:
    """The rows of metadata: written down when a change is taken, completed when its block is in a file."""

    def __init__(self, *, is_block_said: bool = False) -> None:
        self._is_block_said = is_block_said
        self.rows: list[_Row] = []

    def taken(self, digested: Iterable[DigestedChange]) -> Iterator[Placed]:
        for place, item in enumerate(digested):
            self.rows.append(_Row(item.change.spec, item.change.changed, item.old_digest, item.new_digest))
            yield Placed(place, item.change, item.encoding_name)

    def put(self, block: EncodedBlock, file: int) -> None:
        for member in block.members:
            row = self.rows[member.place]
            row.encoding, row.file = block.encoding, file
            row.block = block.place if self._is_block_said or len(block.members) > 1 else None

    def entries(self) -> Iterator[TensorEntry]:
        for row in self.rows:
            yield TensorEntry(
                name=row.spec.name,
                shape=row.spec.shape,
                dtype=row.spec.dtype,
                changed=row.changed,
                encoding=row.encoding,
                file=row.file,
                block=row.block,
                old_digest=None if row.old_digest is None else format_digest(row.old_digest),
                new_digest=format_digest(row.new_digest),
            )


class _Files:
    """The payload files: each is written when it is full, and the last one at the end."""

    def __init__(self, store: Store, folder: str, max_file_bytes: int, prefix: str = "") -> None:
        self._prefix = prefix
        self._store = store
        self._folder = folder
        self._max_file_bytes = max_file_bytes
        self._entries: list[FileEntry] = []
        self._blocks: list[FiledBlock] = []
        self._size = 0

    def add(self, block: EncodedBlock) -> int:
        """Put a block into a file; return the file's number."""
        if self._blocks and self._size + block.num_bytes > self._max_file_bytes:
            self._write(is_only=False)
        self._blocks.append(block.filed)
        self._size += block.num_bytes
        return len(self._entries)

    def close(self) -> tuple[FileEntry, ...]:
        """Write the last file; there is at least one, even if nothing changed."""
        self._write(is_only=not self._entries)
        return tuple(self._entries)

    def _write(self, *, is_only: bool) -> None:
        name = self._prefix + layout.delta_file_name(None if is_only else len(self._entries))
        self._entries.append(_write_file(self._store, self._folder, plan_file(name, self._blocks)))
        self._blocks, self._size = [], 0


def describe_delta(
    publication_id: str,
    lineage: Lineage,
    written: WrittenPayload,
    notes: WriterNotes,
    *,
    seconds: float,
    format_version: Literal[2, 3, 4],
) -> DeltaMetadata:
    """Return the metadata of a delta whose payload is written.

    Args:
        publication_id: 32 hexadecimal digits.
        lineage: where the delta starts and leads to.
        written: the payload, in the order of ``layer_names``.
        notes: what to record beside.
        seconds: how long the writer was at it, the diff among it.
        format_version: which form it has.
    """
    entries = written.entries
    changed = sum(entry.changed for entry in entries)
    state = add_digests(int(lineage.base_state_digest, 16), *(entry.moves_digest for entry in entries))
    now = datetime.now(UTC)
    return DeltaMetadata(
        format_version=format_version,
        base_model=notes.base_model,
        created_at=now.isoformat(),
        timestamp=now.timestamp(),
        changed_elements=changed,
        total_elements=lineage.total_elements,
        density_pct=round(100.0 * changed / max(1, lineage.total_elements), 3),
        layer_names=tuple(entry.name for entry in entries),
        layer_shapes=tuple(entry.shape for entry in entries),
        run_id=lineage.run_id,
        publication_id=publication_id,
        version=lineage.version,
        base_version=lineage.base_version,
        base_state_digest=lineage.base_state_digest,
        state_digest=format_digest(state),
        files=written.files,
        tensors=entries,
        step=notes.step,
        metrics=dict(notes.metrics),
        timings=Timings(diff_s=round(notes.diff_s, 6), upload_s=round(max(0.0, seconds - notes.diff_s), 6)),
        writer=TOOL,
    )


def _write_blocks(
    files: _Files,
    table: _Table,
    blocks: Iterable[Block],
    keep: Callable[[EncodedBlock], None] | None,
    pool: ThreadPoolExecutor | None,
) -> None:
    for encoded in ordered_map(encode_block, blocks, pool):
        for block in encoded:
            table.put(block, files.add(block))
            if keep:
                keep(block)


def _write_file(store: Store, folder: str, planned: PlannedFile) -> FileEntry:
    digest = xxhash.xxh3_128()

    def hashed(chunks: Iterable[memoryview]) -> Iterator[memoryview]:
        for chunk in chunks:
            digest.update(chunk)
            count_bytes(WRITTEN, len(chunk))
            yield chunk

    num_bytes = store.put(f"{folder}/{planned.name}", hashed(planned.chunks()))
    return FileEntry(name=planned.name, bytes=num_bytes, xxh3_128=digest.hexdigest())
