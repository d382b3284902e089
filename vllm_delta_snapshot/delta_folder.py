# SPDX-License-Identifier: Apache-2.0
"""Write the folder of a delta: payload files first, then metadata.json. The commit is not made here.

The trainer writes such folders into the run, the stager writes one for its workers: merged deltas have the same form.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import xxhash

from vllm_delta_snapshot._version import __version__
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.container import DEFAULT_MAX_FILE_BYTES, PlannedFile, encode_delta
from vllm_delta_snapshot.format.digest import format_digest
from vllm_delta_snapshot.format.encodings import encoding_of
from vllm_delta_snapshot.format.metadata import DeltaMetadata, FileEntry, TensorEntry, Timings
from vllm_delta_snapshot.store import Store
from vllm_delta_snapshot.types import TensorPatch

__all__ = ["TOOL", "DigestedPatch", "Lineage", "WriterNotes", "utc_now", "write_delta_folder"]

TOOL = f"vllm-delta-snapshot {__version__}"


@dataclass(frozen=True, slots=True)
class Lineage:
    """Where a delta starts and ends.

    Attributes:
        run_id: the run.
        version: the version it leads to.
        base_version: the version it starts from.
        base_state_digest: the state it starts from.
        state_digest: the state it leads to.
        total_elements: elements of the whole checkpoint.
    """

    run_id: str
    version: int
    base_version: int
    base_state_digest: str
    state_digest: str
    total_elements: int


@dataclass(frozen=True, slots=True)
class WriterNotes:
    """What the writer adds for people and plots; nothing depends on it."""

    base_model: str | None = None
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    diff_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class DigestedPatch:
    """A patch with the digests of the values it replaces and of the values it brings."""

    patch: TensorPatch
    old_digest: int
    new_digest: int


def write_delta_folder(
    store: Store,
    folder: str,
    publication_id: str,
    lineage: Lineage,
    digested: Sequence[DigestedPatch],
    notes: WriterNotes,
    *,
    encoding: str = "raw",
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
) -> tuple[DeltaMetadata, bytes]:
    """Encode patches and write them under `folder`; metadata.json last. Blocks until all is durable.

    Args:
        store: where to.
        folder: a key that only this writer knows.
        publication_id: 32 hexadecimal digits.
        lineage: where the delta starts and ends.
        digested: the changed tensors.
        notes: what to record beside.
        encoding: name of the encoding.
        max_file_bytes: soft limit of a payload file.

    Returns:
        The metadata and its bytes as written.

    Raises:
        StoreError, StoreUnavailable: something was not written; the folder may be partly there and is never read.
    """
    started = time.monotonic()
    patches = [item.patch for item in digested]
    planned = encode_delta(patches, encoding_of(encoding), max_file_bytes=max_file_bytes)
    files = tuple(_write_file(store, folder, file) for file in planned)
    changed = sum(patch.changed for patch in patches)
    # What OpenRL's reader takes: one file, raw, floating point.
    is_openrl = encoding == "raw" and len(files) == 1 and all(patch.spec.element.is_float for patch in patches)
    now = datetime.now(UTC)
    metadata = DeltaMetadata(
        format_version=2 if is_openrl else 3,
        base_model=notes.base_model,
        created_at=now.isoformat(),
        timestamp=now.timestamp(),
        changed_elements=changed,
        total_elements=lineage.total_elements,
        density_pct=round(100.0 * changed / max(1, lineage.total_elements), 3),
        layer_names=tuple(patch.spec.name for patch in patches),
        layer_shapes=tuple(patch.spec.shape for patch in patches),
        run_id=lineage.run_id,
        publication_id=publication_id,
        version=lineage.version,
        base_version=lineage.base_version,
        base_state_digest=lineage.base_state_digest,
        state_digest=lineage.state_digest,
        files=files,
        tensors=tuple(_tensor_entries(digested, planned, encoding)),
        step=notes.step,
        metrics=dict(notes.metrics),
        timings=Timings(diff_s=round(notes.diff_s, 6), upload_s=round(time.monotonic() - started, 6)),
        writer=TOOL,
    )
    data = metadata.to_json()
    store.put(f"{folder}/{layout.METADATA_NAME}", [memoryview(data)])
    return metadata, data


def utc_now() -> str:
    """Return the time for people, ISO 8601 in UTC. Nothing is ordered by it."""
    return datetime.now(UTC).isoformat()


def _write_file(store: Store, folder: str, planned: PlannedFile) -> FileEntry:
    digest = xxhash.xxh3_128()

    def hashed(chunks: Iterable[memoryview]) -> Iterator[memoryview]:
        for chunk in chunks:
            digest.update(chunk)
            yield chunk

    num_bytes = store.put(f"{folder}/{planned.name}", hashed(planned.chunks()))
    return FileEntry(name=planned.name, bytes=num_bytes, xxh3_128=digest.hexdigest())


def _tensor_entries(
    digested: Sequence[DigestedPatch], planned: Sequence[PlannedFile], encoding: str
) -> Iterator[TensorEntry]:
    file_of = {place: number for number, file in enumerate(planned) for place in file.members}
    for place, item in enumerate(digested):
        yield TensorEntry(
            name=item.patch.spec.name,
            shape=item.patch.spec.shape,
            dtype=item.patch.spec.dtype,
            changed=item.patch.changed,
            encoding=encoding,
            file=file_of[place],
            old_digest=format_digest(item.old_digest),
            new_digest=format_digest(item.new_digest),
        )
