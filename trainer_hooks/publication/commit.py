# SPDX-License-Identifier: Apache-2.0
"""Publish: write a version's files, then commit it. The order is the whole point of this module.

1. payload files into a folder that carries a fresh publication id, each durable;
2. metadata.json in the same folder, durable;
3. versions/N.json, created exclusively: from here on the version exists.

A failure before 3 leaves no folder, or one that nobody reads (`leftovers`). "Exists" and "unknown" at 3
are told apart by reading the object back: one's own publication id means success, another's that a second trainer is at
work. And 3 proves that the run is still one's own (`runs.own_run`) and that the version before is there.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import xxhash

from vllm_delta_snapshot.errors import (
    BrokenChain,
    FormatError,
    ObjectExists,
    ObjectNotFound,
    RunMismatch,
    StoreError,
    StoreUnavailable,
    VersionConflict,
)
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.blocks import EncodedBlock
from vllm_delta_snapshot.format.container import DEFAULT_MAX_FILE_BYTES
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.format.version import MAX_VERSION_BYTES, VersionRecord
from vllm_delta_snapshot.runs.delta_folder import DigestedChange, Lineage, WriterNotes, utc_now, write_delta_folder
from vllm_delta_snapshot.runs.own_run import OwnRun, run_id_of
from vllm_delta_snapshot.store import Store
from vllm_delta_snapshot.upkeep.failed_folder import removed_if_failed
from vllm_delta_snapshot.upkeep.retention import remove_folder

__all__ = ["commit", "is_committed", "record_of", "write_publication"]

logger = logging.getLogger(__name__)


def write_publication(
    store: Store,
    lineage: Lineage,
    digested: Iterable[DigestedChange],
    notes: Callable[[], WriterNotes],
    *,
    keep: Callable[[EncodedBlock], None] | None = None,
    pool: ThreadPoolExecutor | None = None,
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
) -> VersionRecord:
    """Write one version's files: steps 1 and 2. Blocks until they are durable; nobody sees them yet.

    Args:
        store: the run's store.
        lineage: where the delta starts and ends.
        digested: the changed tensors, taken one by one; none for an empty delta.
        notes: asked at the end what to record beside.
        keep: told of every block once it is encoded.
        pool: threads to encode on; ``None`` for the caller's.
        max_file_bytes: soft limit of a payload file.

    Returns:
        The record to commit.

    Raises:
        VersionConflict: not everything was written, and meanwhile another trainer has committed this version, which may
            have removed what was.
        StoreError, StoreUnavailable: not everything was written; publish again.
        Exception: what `digested` raises.
    """
    publication_id = uuid.uuid4().hex
    folder = layout.delta_folder(lineage.version, publication_id)
    with _told_who_was_first(store, lineage), removed_if_failed(store, folder):
        written = write_delta_folder(
            store,
            folder,
            publication_id,
            lineage,
            digested,
            notes,
            keep=keep,
            pool=pool,
            max_file_bytes=max_file_bytes,
        )
    return record_of(lineage, publication_id, folder, written.metadata, written.data)


@contextlib.contextmanager
def _told_who_was_first(store: Store, lineage: Lineage) -> Iterator[None]:
    """Have a failure to write say that the version is another trainer's by now, if it is."""
    try:
        yield
    except StoreError as error:
        key = layout.version_key(lineage.version)
        try:
            existing = VersionRecord.from_json(store.read(key, max_bytes=MAX_VERSION_BYTES), file=f"{store.uri}/{key}")
        except (StoreError, FormatError):
            existing = None
        if existing is None or existing.run_id != lineage.run_id:
            raise
        raise _taken(existing, f"{store.uri}/{key}", expected="this trainer's next version") from error


def _taken(existing: VersionRecord, where: str, *, expected: str) -> VersionConflict:
    return VersionConflict(
        f"version {existing.version} was committed by another trainer",
        file=where,
        expected=expected,
        found=f"publication {existing.publication_id} of {existing.created_at}",
        hint="Stop one of the two trainers. A trainer that restarts now continues after the newest version.",
    )


def record_of(
    lineage: Lineage, publication_id: str, folder: str, metadata: DeltaMetadata, data: bytes
) -> VersionRecord:
    """Return the record that commits a publication whose files are written.

    Args:
        lineage: where the delta starts and ends.
        publication_id: the publication.
        folder: where its files are.
        metadata: its metadata.
        data: metadata.json as written.
    """
    return VersionRecord(
        run_id=lineage.run_id,
        version=lineage.version,
        base_version=lineage.base_version,
        publication_id=publication_id,
        folder=folder,
        metadata_bytes=len(data),
        metadata_xxh3_128=xxhash.xxh3_128_hexdigest(data),
        payload_bytes=sum(entry.bytes for entry in metadata.files),
        changed_elements=metadata.changed_elements,
        base_state_digest=lineage.base_state_digest,
        state_digest=metadata.state_digest,
        created_at=utc_now(),
    )


def commit(own: OwnRun, record: VersionRecord) -> None:
    """Make a version visible: step 3. Or find out that it is, after a lost answer.

    Raises:
        RunMismatch: the folder is another run's by now; nothing of this run was left there.
        BrokenChain: the version before is gone.
        VersionConflict: the version, or the one before, exists and is another publication's. Nothing of theirs was
            touched.
        StoreError: it does not exist.
        StoreUnavailable: it may or may not exist; ask `is_committed` before anything else is published.
    """
    key, data = layout.version_key(record.version), record.to_json()
    try:
        _prove_parent(own, record)
        try:
            own.create(key, data)
        except (ObjectExists, StoreUnavailable) as error:
            if not is_committed(own, record):
                raise error from None
    except RunMismatch:
        with contextlib.suppress(StoreError):  # only this publication has written there
            remove_folder(own.store, record.folder)
        raise
    own.last = (key, data)


def is_committed(own: OwnRun, record: VersionRecord) -> bool:
    """Say whether a version exists, is this publication, and lies in the run that it was made for.

    Returns:
        ``False`` if the version does not exist.

    Raises:
        RunMismatch: the folder is another run's by now; if the version had come into it, it was withdrawn.
        VersionConflict: it exists and is another publication's.
        StoreError, StoreUnavailable: it cannot be found out now.
    """
    key = layout.version_key(record.version)
    data = own.find(key, record.to_json())
    if data is None:
        return False
    existing = VersionRecord.from_json(data, file=f"{own.store.uri}/{key}")
    if existing.publication_id != record.publication_id:
        raise _taken(existing, f"{own.store.uri}/{key}", expected=f"publication {record.publication_id}")
    own.last = (key, data)
    return True


def _prove_parent(own: OwnRun, record: VersionRecord) -> None:
    """Check that the version before is there, and leads to where this one starts."""
    if record.base_version == 0:
        return
    key = layout.version_key(record.base_version)
    where = f"{own.store.uri}/{key}"
    try:
        data = own.store.read(key, max_bytes=MAX_VERSION_BYTES)
    except ObjectNotFound:
        data = _restored_parent(own, key)
    if run_id_of(data) != own.run_id:
        own.check()
        if own.remove_foreign(key):
            data = _restored_parent(own, key)
    parent = VersionRecord.from_json(data, file=where)
    if parent.state_digest != record.base_state_digest:
        raise VersionConflict(
            f"version {record.base_version} is not the one that this trainer published",
            file=where,
            expected=f"state digest {record.base_state_digest}",
            found=f"state digest {parent.state_digest} of publication {parent.publication_id}",
            hint="Another trainer goes on here, perhaps from an older copy of the run. Stop one of the two; one that "
            "restarts continues after the newest version.",
        )


def _restored_parent(own: OwnRun, key: str) -> bytes:
    """Put back the record that this trainer committed last, if somebody took it away and nothing else.

    A trainer that outlived its run and takes back what it created may meet, under the same name, what has just been
    created by this one.
    """
    own.check()
    lost = BrokenChain(
        "the version before is gone, so nothing would lead to this one",
        file=f"{own.store.uri}/{key}",
        hint="The run has gone back, or lost a record. Restore it from a copy, or start a new run in a sync_dir of its "
        "own (docs/operations.md).",
    )
    if own.last is None or own.last[0] != key:
        raise lost
    data = own.last[1]
    folder = VersionRecord.from_json(data, file=key).folder
    try:
        own.store.size(f"{folder}/{layout.METADATA_NAME}")
    except ObjectNotFound:
        raise lost from None
    with contextlib.suppress(ObjectExists):
        own.create(key, data)
        logger.warning("put back %s/%s, which somebody had taken away", own.store.uri, key)
    return own.store.read(key, max_bytes=MAX_VERSION_BYTES)
