# SPDX-License-Identifier: Apache-2.0
"""Fetch: one publication's payload files from the store into a local folder, size and checksum compared.

A file appears under its final name only when every byte was there and the digest is right. What fails may be tried
again; what is wrong in the store is an error that names the file.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import xxhash

from vllm_delta_snapshot.errors import CorruptFile, ObjectNotFound, StageError
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.anchor import AnchorMetadata, AnchorRecord
from vllm_delta_snapshot.format.digest import file_digest
from vllm_delta_snapshot.format.metadata import DeltaMetadata, FileEntry
from vllm_delta_snapshot.format.version import DeltaRecord
from vllm_delta_snapshot.store import Store
from vllm_delta_snapshot.util.ordered import ordered_map, thread_pool
from vllm_delta_snapshot.util.traffic import FETCHED, count_bytes

__all__ = ["fetch", "fetch_file", "is_intact"]

logger = logging.getLogger(__name__)

_HINT: Final = "Engines keep the version before; restore the file from a copy, and they go on by themselves."


def fetch(
    store: Store, record: DeltaRecord | AnchorRecord, metadata: DeltaMetadata | AnchorMetadata, folder: Path
) -> list[Path]:
    """Bring the files of a publication into `folder`. Files that are there and intact are kept.

    Args:
        store: the run's store.
        record: the record, which names the folder.
        metadata: its metadata, which names the files.
        folder: a local folder of the caller's; made if missing.

    Returns:
        The local paths, in the order of ``metadata.files``.

    Raises:
        CorruptFile: a file in the store is missing, or its size or checksum is wrong.
        StoreUnavailable: try again.
        StageError: the local folder cannot be written.
    """
    paths = []
    for entry in metadata.files:
        path = folder / layout.check_file_name(entry.name)
        key = f"{record.folder}/{entry.name}"
        if not is_intact(path, entry):
            try:
                _make_folder(folder)
                fetch_file(store, key, entry, path)
            except (StageError, CorruptFile):
                raise
            except ObjectNotFound as error:
                raise CorruptFile(
                    f"version {record.version} is committed but a file is missing",
                    file=f"{store.uri}/{key}",
                    hint=_HINT,
                ) from error
        paths.append(path)
    return paths


def fetch_file(store: Store, key: str, entry: FileEntry, path: Path) -> None:
    """Copy one object to `path`, by way of a temporary name beside it.

    Raises:
        CorruptFile: size or checksum is not the entry's.
        ObjectNotFound, StoreUnavailable: from the store.
        StageError: the local disk failed.
    """
    where = f"{store.uri}/{key}"
    size = store.size(key)
    if size != entry.bytes:
        raise CorruptFile(
            "file has a wrong size", file=where, expected=f"{entry.bytes} bytes", found=f"{size} bytes", hint=_HINT
        )
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        found = _fetch_ranges(store, key, entry, temporary, where)
        if found != entry.xxh3_128:
            # What was damaged on its way is right the second time; what is damaged in the store is not.
            logger.warning("fetching again, since its checksum is wrong: %s", where)
            found = _fetch_ranges(store, key, entry, temporary, where)
        if found != entry.xxh3_128:
            raise CorruptFile(
                "file has a wrong checksum", file=where, expected=f"xxh3-128 {entry.xxh3_128}", found=found, hint=_HINT
            )
        temporary.replace(path)
    except OSError as error:
        if isinstance(error, ObjectNotFound):
            raise
        raise StageError("cannot write the local copy", file=str(path), found=error) from error
    finally:
        temporary.unlink(missing_ok=True)


def _fetch_ranges(store: Store, key: str, entry: FileEntry, path: Path, where: str) -> str:
    """Read an object in ranges, several at once, and write each where it belongs.

    Returns:
        The xxh3-128 of the file as it lies there: taken range by range, while those after it are still on their way.
    """
    digest = xxhash.xxh3_128()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, entry.bytes)
        if entry.bytes:
            with mmap.mmap(descriptor, entry.bytes, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as landed:
                for offset in _ranges_landed(store, key, entry, descriptor, where):
                    with landed[offset : offset + store.range_bytes] as block:
                        digest.update(block)
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def _ranges_landed(store: Store, key: str, entry: FileEntry, descriptor: int, where: str) -> Iterator[int]:
    """Yield where each range begins, in order, once it is written."""
    kept = threading.local()  # one buffer a thread: fresh memory costs as much as the copy into it

    def one(offset: int) -> int:
        if not hasattr(kept, "buffer"):
            kept.buffer = memoryview(bytearray(min(store.range_bytes, entry.bytes)))
        block = kept.buffer[: entry.bytes - offset]
        done = 0
        while done < len(block):
            count = store.read_range(key, offset + done, block[done:])
            if count == 0:
                raise CorruptFile(
                    "file is cut off", file=where, expected=f"{entry.bytes} bytes", found=f"{offset + done} bytes"
                )
            done += count
        count_bytes(FETCHED, done)
        _write_at(descriptor, block, offset)
        return offset

    offsets = range(0, entry.bytes, store.range_bytes)
    with thread_pool(min(store.concurrency, len(offsets))) as pool:
        yield from ordered_map(one, offsets, pool, ahead=store.concurrency)


def _write_at(descriptor: int, block: memoryview, offset: int) -> None:
    while len(block):
        count = os.pwrite(descriptor, block, offset)
        block, offset = block[count:], offset + count


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StageError("cannot make the local folder", file=str(folder), found=error) from error


def is_intact(path: Path, entry: FileEntry) -> bool:
    """Say whether a local file has the size and the checksum that an entry names. Reads it."""
    try:
        return path.stat().st_size == entry.bytes and file_digest(path) == entry.xxh3_128
    except OSError:
        return False
