# SPDX-License-Identifier: Apache-2.0
"""Verified reads of a run's small objects: run.json, the version records, and the metadata they pin.

Nothing is returned that does not belong to the run or whose bytes are not the ones that the record names. Payload
files are not read here (`stage.fetch`), nothing is written (`trainer_hooks.publish`).
"""

from __future__ import annotations

import xxhash

from vllm_delta_snapshot.errors import BrokenChain, CorruptFile, ObjectNotFound, RunMismatch, UnsupportedFormat
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.encodings import ENCODINGS
from vllm_delta_snapshot.format.metadata import MAX_METADATA_BYTES, DeltaMetadata, parse_metadata
from vllm_delta_snapshot.format.run import MAX_RUN_BYTES, RunInfo
from vllm_delta_snapshot.format.version import MAX_VERSION_BYTES, VersionRecord
from vllm_delta_snapshot.store import Store

__all__ = ["RunFolder"]


class RunFolder:
    """A run in a store, for reading.

    Args:
        store: the store whose root is the run's folder.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._run: RunInfo | None = None

    def read_run(self) -> RunInfo:
        """Return run.json; read once, it never changes.

        Raises:
            ObjectNotFound: there is none: no run was started here.
            CorruptFile, UnsupportedFormat, LimitExceeded, StoreUnavailable: it cannot be read.
        """
        if self._run is None:
            try:
                data = self.store.read(layout.RUN_KEY, max_bytes=MAX_RUN_BYTES)
            except ObjectNotFound as error:
                raise ObjectNotFound(
                    "no run here",
                    file=f"{self.store.uri}/{layout.RUN_KEY}",
                    hint="Check sync_dir; the trainer's DeltaPublisher creates run.json when it starts.",
                ) from error
            self._run = RunInfo.from_json(data, file=self._where(layout.RUN_KEY))
        return self._run

    def versions(self) -> list[int]:
        """Return the committed versions, ascending. One listing.

        Raises:
            StoreUnavailable: try again.
        """
        names = self.store.list(layout.VERSIONS_FOLDER)
        found = (layout.version_of_key(name) for name in names)
        return sorted(version for version in found if version is not None)

    def read_version(self, version: int) -> VersionRecord:
        """Return the record of a version, checked to be of this run and of this number.

        Raises:
            BrokenChain: there is no such version.
            RunMismatch: the record is of another run.
            CorruptFile, UnsupportedFormat, LimitExceeded, StoreUnavailable: it cannot be read.
        """
        key = layout.version_key(version)
        try:
            data = self.store.read(key, max_bytes=MAX_VERSION_BYTES)
        except ObjectNotFound as error:
            raise BrokenChain(
                f"version {version} does not exist",
                file=self._where(key),
                hint=f"See which do: delta-snapshot log {self.store.uri}",
            ) from error
        record = VersionRecord.from_json(data, file=self._where(key))
        self._check_run(record.run_id, key)
        if record.version != version:
            raise CorruptFile(
                "the record is of another version",
                file=self._where(key),
                expected=version,
                found=record.version,
            )
        return record

    def read_metadata(self, record: VersionRecord) -> DeltaMetadata:
        """Return the metadata of a publication, its bytes compared with the record.

        Raises:
            CorruptFile: it is missing, its bytes are others, or it contradicts the record.
            RunMismatch: it is of another run.
            UnsupportedFormat, LimitExceeded, StoreUnavailable: it cannot be read.
        """
        key = f"{record.folder}/{layout.METADATA_NAME}"
        try:
            data = self.store.read(key, max_bytes=min(record.metadata_bytes, MAX_METADATA_BYTES))
        except ObjectNotFound as error:
            raise CorruptFile(
                f"version {record.version} is committed but its metadata is missing", file=self._where(key)
            ) from error
        found = (len(data), xxhash.xxh3_128_hexdigest(data))
        if found != (record.metadata_bytes, record.metadata_xxh3_128):
            raise CorruptFile(
                "metadata was changed after it was published",
                file=self._where(key),
                expected=f"{record.metadata_bytes} bytes, xxh3-128 {record.metadata_xxh3_128}",
                found=f"{found[0]} bytes, xxh3-128 {found[1]}",
            )
        metadata = parse_metadata(data, file=self._where(key))
        if not isinstance(metadata, DeltaMetadata):
            raise CorruptFile("metadata is OpenRL's, not of this run", file=self._where(key))
        self._check_run(metadata.run_id, key)
        _check_same(record, metadata, self._where(key))
        self._check_encodings(metadata, key)
        return metadata

    def _check_run(self, run_id: str, key: str) -> None:
        expected = self.read_run().run_id
        if run_id != expected:
            raise RunMismatch(
                "belongs to another run", file=self._where(key), expected=f"run {expected}", found=f"run {run_id}"
            )

    def _check_encodings(self, metadata: DeltaMetadata, key: str) -> None:
        """Receivers have prepared for the encodings that the run named when it began, and for no others."""
        allowed = self.read_run().encodings
        for entry in metadata.tensors:
            if entry.encoding not in allowed:
                is_known = entry.encoding in ENCODINGS
                raise (CorruptFile if is_known else UnsupportedFormat)(
                    "an encoding that the run does not use" if is_known else "unknown encoding",
                    file=self._where(key),
                    tensor=entry.name,
                    expected=" ".join(allowed),
                    found=entry.encoding,
                )

    def _where(self, key: str) -> str:
        return f"{self.store.uri}/{key}"


def _check_same(record: VersionRecord, metadata: DeltaMetadata, file: str) -> None:
    for field in (
        "version",
        "base_version",
        "publication_id",
        "base_state_digest",
        "state_digest",
        "changed_elements",
    ):
        expected, found = getattr(record, field), getattr(metadata, field)
        if expected != found:
            raise CorruptFile(f"{field} is not what the version record says", file=file, expected=expected, found=found)
    for entry in metadata.files:
        layout.check_file_name(entry.name)
