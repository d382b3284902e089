# SPDX-License-Identifier: Apache-2.0
"""Verified reads of a run's small objects: run.json, records, the metadata that they pin, the mark of what was pruned.

Records are those of versions, merged deltas and anchors. Nothing is returned that does not belong to the run or whose
bytes are not the ones that the record names. Payload files are not read here (`runs.fetch`), nothing is written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import xxhash

from vllm_delta_snapshot.errors import (
    BrokenChain,
    ChainError,
    CorruptFile,
    DeltaSnapshotError,
    FormatError,
    LimitExceeded,
    ObjectNotFound,
    UnsupportedFormat,
)
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.anchor import MAX_ANCHOR_BYTES, AnchorMetadata, AnchorRecord
from vllm_delta_snapshot.format.encodings import ENCODINGS
from vllm_delta_snapshot.format.metadata import MAX_METADATA_BYTES, DeltaMetadata, parse_metadata
from vllm_delta_snapshot.format.run import MAX_RUN_BYTES, RunInfo
from vllm_delta_snapshot.format.version import MAX_VERSION_BYTES, DeltaRecord, MergedRecord, VersionRecord
from vllm_delta_snapshot.format.wire import WireModel
from vllm_delta_snapshot.runs.chain import Shortcuts, newest_in_line
from vllm_delta_snapshot.runs.foreign import OwnRecords, mismatch
from vllm_delta_snapshot.runs.pruned_marks import PrunedMarks
from vllm_delta_snapshot.store import Store

__all__ = ["RunFolder"]

T = TypeVar("T")

logger = logging.getLogger(__name__)


class RunFolder:
    """A run in a store, for reading.

    Args:
        store: the store whose root is the run's folder.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._run: RunInfo | None = None
        self._own = OwnRecords(store)
        self._marks = PrunedMarks(store, lambda: self.read_run().run_id, lambda: self.newest_and_stray()[0])
        self._good_anchors: set[int] = set()

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
        return self._numbers(layout.VERSIONS_FOLDER)

    def newest(self) -> int:
        """Return the newest version; 0 is the base. One listing, and one more if something is out of line.

        Raises:
            BrokenChain: there are records that nothing leads to; names the first.
            RunMismatch: the newest record is another run's; or the folder is, by now.
            StoreUnavailable: try again.
        """
        newest, stray = self.newest_and_stray()
        if stray is not None:
            raise stray
        return newest

    def newest_and_stray(self) -> tuple[int, ChainError | None]:
        """Return the newest version that something leads to, and what is wrong with the records beyond it, if any.

        Raises:
            StoreUnavailable: try again.
        """
        versions, foreign = self._own.versions(self.versions(), lambda: self.read_run().run_id)
        newest = versions[-1] if versions else 0
        if len(versions) == newest:  # every number from 1 on, once
            return newest, foreign
        anchors = [version for version in self._numbers(layout.ANCHORS_FOLDER) if self._is_anchor(version)]
        newest = newest_in_line(versions, anchors)
        beyond = [version for version in versions if version > newest]
        if not beyond:
            return newest, foreign
        return newest, BrokenChain(
            f"nothing leads to version {beyond[0]}, so its record is out of line",
            file=self._where(layout.version_key(beyond[0])),
            expected=f"version {newest + 1} next",
            found=f"{len(beyond)} records beyond the gap",
            hint=f"If it is stray, delete that file. If {layout.version_key(newest + 1)} was lost, restore it from a "
            "copy (docs/operations.md).",
        )

    def shortcuts(self) -> Shortcuts:
        """Return what shortens the way: anchors, merged deltas; and what was pruned. Three listings.

        Raises:
            StoreUnavailable: try again.
        """
        # The mark last: a delta that was pruned since is then known to be gone.
        merged = map(layout.merged_of_key, self.store.list(layout.MERGED_FOLDER))
        return Shortcuts(
            anchors=tuple(self._numbers(layout.ANCHORS_FOLDER)),
            merged=tuple(sorted(pair for pair in merged if pair is not None)),
            pruned=self.pruned(),
        )

    def pruned(self) -> int:
        """Return up to which version deltas are gone; 0 if none is. One listing, and a read for a new mark.

        A mark that lies is not believed; see `mark_problem`.

        Raises:
            StoreUnavailable: try again.
        """
        return self._marks.find()[0]

    def mark_problem(self) -> DeltaSnapshotError | None:
        """Return what is wrong with the mark of what was pruned, if anything.

        Raises:
            StoreUnavailable: try again.
        """
        return self._marks.find()[1]

    def _is_anchor(self, version: int) -> bool:
        """Say whether an anchor's record is this run's, and of the state that its version's record says."""
        if version not in self._good_anchors:
            try:
                if self.read_anchor(version).state_digest != self.read_version(version).state_digest:
                    return False
            except (ChainError, FormatError):
                return False
            self._good_anchors.add(version)
        return True

    def _numbers(self, folder: str) -> list[int]:
        return layout.numbers_of(self.store.list(folder))

    def read_version(self, version: int) -> VersionRecord:
        """Return the record of a version, checked to be of this run and of this number.

        Raises:
            BrokenChain: there is no such version.
            RunMismatch: the record is of another run.
            CorruptFile, UnsupportedFormat, LimitExceeded, StoreUnavailable: it cannot be read.
        """
        return _twice(lambda: self._read_version(version))

    def state_digest(self, version: int) -> str:
        """Return the state digest that a version leads to; of version 0 that of the base.

        Raises: see `read_version` and `read_run`.
        """
        return self.read_version(version).state_digest if version else self.read_run().base.state_digest

    def _read_version(self, version: int) -> VersionRecord:
        key = layout.version_key(version)
        data = self._read_small(key, f"version {version}")
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

    def read_delta(self, base_version: int, version: int) -> DeltaRecord:
        """Return the record of the delta between two versions: a version's own, or a merged one.

        Raises:
            BrokenChain: there is none.
            RunMismatch, CorruptFile, UnsupportedFormat, LimitExceeded, StoreUnavailable: it cannot be read.
        """
        if base_version == version - 1:
            return self.read_version(version)
        return self.read_merged(base_version, version)

    def read_merged(self, base_version: int, version: int) -> MergedRecord:
        """Return the record of a merged delta, checked to be of this run and to say what its name says.

        Raises:
            BrokenChain: there is none.
            RunMismatch, CorruptFile, UnsupportedFormat, LimitExceeded, StoreUnavailable: it cannot be read.
        """
        key = layout.merged_key(base_version, version)
        data = self._read_small(key, f"the merged delta from version {base_version} to {version}")
        record = MergedRecord.from_json(data, file=self._where(key))
        self._check_run(record.run_id, key)
        if (record.base_version, record.version) != (base_version, version):
            raise CorruptFile(
                "the record is of another merged delta",
                file=self._where(key),
                expected=f"{base_version} to {version}",
                found=f"{record.base_version} to {record.version}",
            )
        return record

    def read_anchor(self, version: int) -> AnchorRecord:
        """Return the record of an anchor, checked to be of this run and of this version.

        Raises:
            BrokenChain: there is none.
            RunMismatch, CorruptFile, UnsupportedFormat, LimitExceeded, StoreUnavailable: it cannot be read.
        """
        key = layout.anchor_key(version)
        record = AnchorRecord.from_json(
            self._read_small(key, f"the anchor of version {version}"), file=self._where(key)
        )
        self._check_run(record.run_id, key)
        if record.version != version:
            raise CorruptFile(
                "the record is of another anchor", file=self._where(key), expected=version, found=record.version
            )
        return record

    def read_anchor_metadata(self, record: AnchorRecord) -> AnchorMetadata:
        """Return what files an anchor has, the bytes compared with the record.

        Raises:
            CorruptFile: it is missing, its bytes are others, or it contradicts the record.
            UnsupportedFormat, LimitExceeded, StoreUnavailable: it cannot be read.
        """
        data, key = self._read_pinned(record, f"the anchor of version {record.version}", MAX_ANCHOR_BYTES)
        metadata = AnchorMetadata.from_json(data, file=self._where(key))
        for field in ("run_id", "version", "publication_id", "state_digest"):
            _check_field(record, metadata, field, self._where(key))
        for entry in metadata.files:
            layout.check_file_name(entry.name)
        return metadata

    def read_metadata(self, record: DeltaRecord) -> DeltaMetadata:
        """Return the metadata of a publication, its bytes compared with the record.

        Raises:
            CorruptFile: it is missing, its bytes are others, or it contradicts the record.
            RunMismatch: it is of another run.
            UnsupportedFormat, LimitExceeded, StoreUnavailable: it cannot be read.
        """
        return _twice(lambda: self._read_metadata(record))

    def _read_metadata(self, record: DeltaRecord) -> DeltaMetadata:
        most = _most_metadata(self.read_run())
        data, key = self._read_pinned(record, f"version {record.version}", most)
        metadata = parse_metadata(data, file=self._where(key))
        if not isinstance(metadata, DeltaMetadata):
            raise CorruptFile("metadata is OpenRL's, not of this run", file=self._where(key))
        self._check_run(metadata.run_id, key)
        _check_same(record, metadata, self._where(key))
        self._check_encodings(metadata, key)
        return metadata

    def _read_small(self, key: str, what: str) -> bytes:
        try:
            return self.store.read(key, max_bytes=MAX_VERSION_BYTES)
        except ObjectNotFound as error:
            hint = f"See what there is: delta-snapshot log {self.store.uri}"
            raise BrokenChain(f"{what} does not exist", file=self._where(key), hint=hint) from error

    def _read_pinned(self, record: DeltaRecord | AnchorRecord, what: str, most: int) -> tuple[bytes, str]:
        """Return the bytes of a publication's metadata.json, which are those that the record names, and its key."""
        key = f"{record.folder}/{layout.METADATA_NAME}"
        if record.metadata_bytes > most:
            raise LimitExceeded(
                "metadata larger than it can need to be",
                file=self._where(key),
                expected=f"at most {most} bytes",
                found=f"{record.metadata_bytes} bytes",
            )
        try:
            data = self.store.read(key, max_bytes=record.metadata_bytes)
        except ObjectNotFound as error:
            if isinstance(record, DeltaRecord) and record.version <= self.pruned():
                raise BrokenChain(
                    f"the delta to version {record.version} was pruned",
                    file=self._where(key),
                    hint="An engine that starts now comes past it, from an anchor: restart this one.",
                ) from error
            lying = self.mark_problem()
            raise CorruptFile(
                f"{what} is committed but its metadata is missing",
                file=self._where(key),
                hint=f"Restore the folder from a copy; see what else is damaged: delta-snapshot verify {self.store.uri}"
                if lying is None
                else f"It may have been pruned; the mark cannot be believed: {lying}",
            ) from error
        found = (len(data), xxhash.xxh3_128_hexdigest(data))
        if found != (record.metadata_bytes, record.metadata_xxh3_128):
            raise CorruptFile(
                "metadata was changed after it was published",
                file=self._where(key),
                expected=f"{record.metadata_bytes} bytes, xxh3-128 {record.metadata_xxh3_128}",
                found=f"{found[0]} bytes, xxh3-128 {found[1]}",
            )
        return data, key

    def _check_run(self, run_id: str, key: str) -> None:
        if run_id != self.read_run().run_id:
            raise mismatch(self.store, self.read_run().run_id, run_id, key)

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


def _twice(read: Callable[[], T]) -> T:
    """Read; and once more if it is corrupt, since what was damaged on its way is right the second time."""
    try:
        return read()
    except CorruptFile as error:
        logger.warning("reading again: %s", error)
        return read()


def _most_metadata(run: RunInfo) -> int:
    """Return how large a version's metadata can be: so much for each tensor, and for what the trainer notes."""
    return min(MAX_METADATA_BYTES, (4 << 20) + sum(4096 + 24 * len(entry.name) for entry in run.tensors))


def _check_same(record: DeltaRecord, metadata: DeltaMetadata, file: str) -> None:
    fields = ("version", "base_version", "publication_id", "base_state_digest", "state_digest", "changed_elements")
    for field in fields:
        _check_field(record, metadata, field, file)
    for entry in metadata.files:
        layout.check_file_name(entry.name)


def _check_field(record: WireModel, metadata: WireModel, field: str, file: str) -> None:
    expected, found = getattr(record, field), getattr(metadata, field)
    if expected != found:
        raise CorruptFile(f"{field} is not what the record says", file=file, expected=expected, found=found)
