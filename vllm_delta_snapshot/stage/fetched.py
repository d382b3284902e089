# SPDX-License-Identifier: Apache-2.0
"""The versions that a stager has at hand: fetched, verified, and linked to the version before.

Kept until `forget`, within a limit of disk; what is not there any more is fetched again when it is needed again. Of
decoded changes only the newest are kept, within a limit of memory: the rest is decoded again.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from vllm_delta_snapshot.errors import BaseMismatch
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.format.version import VersionRecord
from vllm_delta_snapshot.run_folder import RunFolder
from vllm_delta_snapshot.stage.area import StageArea
from vllm_delta_snapshot.stage.decode import decode
from vllm_delta_snapshot.stage.fetch import fetch
from vllm_delta_snapshot.stage.merge import FOLD_CHANGES
from vllm_delta_snapshot.types import Change, TensorSpec

__all__ = ["FetchedVersions"]

logger = logging.getLogger(__name__)


class FetchedVersions:
    """See the module.

    Args:
        folder: the run.
        area: where files are kept.
        specs: the run's tensors.
        start: the version of the engines' checkpoint.
        start_digest: its state digest.
        cache_bytes: how many bytes of files may be kept; the newest version is, whatever its size.
        kept_changes: how many decoded changes may be kept; the newest version's are, however many.
    """

    def __init__(
        self,
        folder: RunFolder,
        area: StageArea,
        specs: Mapping[str, TensorSpec],
        start: int,
        start_digest: str,
        *,
        cache_bytes: int = 1 << 40,
        kept_changes: int = FOLD_CHANGES,
    ) -> None:
        self._folder = folder
        self._area = area
        self._specs = specs
        self._start = (start, start_digest)
        self._cache_bytes = cache_bytes
        self._kept_changes = kept_changes
        self._records: dict[int, VersionRecord] = {}
        self._metadata: dict[int, DeltaMetadata] = {}
        self._decoded: dict[int, list[Change]] = {}

    def __contains__(self, version: object) -> bool:
        """Say whether a version was verified, and not forgotten since."""
        return version in self._metadata

    def load(self, version: int) -> None:
        """Have a version verified. Blocks if it has to be fetched.

        Raises:
            BaseMismatch: it does not continue the version before.
            BrokenChain, CorruptFile, UnsupportedFormat, StageError, StoreUnavailable: it cannot be had.
        """
        if version in self._metadata:
            return
        record = self._folder.read_version(version)
        metadata = self._folder.read_metadata(record)
        at = self.state_digest(version - 1)
        if (metadata.base_version, metadata.base_state_digest) != (version - 1, at):
            raise BaseMismatch(
                f"version {version} does not continue version {version - 1}",
                expected=f"base version {version - 1} with state digest {at}",
                found=f"base version {metadata.base_version} with state digest {metadata.base_state_digest}",
            )
        target = self._area.fetched_folder(version)
        fetch(self._folder.store, record, metadata, target)
        self._keep(version, decode(metadata, target, self._specs))
        self._records[version], self._metadata[version] = record, metadata
        self._trim(version)
        logger.info("fetched version=%d bytes=%d", version, record.payload_bytes)

    def each(self, first: int, last: int) -> Iterator[list[Change]]:
        """Yield the changes of the versions from `first` to `last`, each when it is asked for. Raises: see `load`."""
        for version in range(first, last + 1):
            yield self.changes(version)

    def metadata(self, version: int) -> DeltaMetadata:
        """Return the metadata of a verified version."""
        return self._metadata[version]

    def files(self, version: int) -> Path:
        """Return the folder with the files of a version, all there and intact. Raises: see `load`."""
        self.load(version)
        folder = self._area.fetched_folder(version)
        fetch(self._folder.store, self._records[version], self._metadata[version], folder)
        return folder

    def changes(self, version: int) -> list[Change]:
        """Return the changes of a version; decoded again, if it is not one of the newest. Raises: see `load`."""
        self.load(version)
        if version not in self._decoded:
            decoded = decode(self._metadata[version], self.files(version), self._specs)
            self._trim(version)
            if self._decoded and version < max(self._decoded):
                return decoded
            self._keep(version, decoded)
            return decoded
        return self._decoded[version]

    def state_digest(self, version: int) -> str:
        """Return the state digest of any version, at hand or not. Raises: as reading its record does."""
        if version == self._start[0]:
            return self._start[1]
        if version in self._metadata:
            return self._metadata[version].state_digest
        return self._folder.read_version(version).state_digest

    def forget(self, oldest: int) -> None:
        """Forget versions up to and including `oldest`, and delete their files."""
        for version in [version for version in self._metadata if version <= oldest]:
            del self._metadata[version], self._records[version]
            self._decoded.pop(version, None)
        for version, path in self._folders():
            if version <= oldest:
                shutil.rmtree(path, ignore_errors=True)

    def _keep(self, version: int, changes: list[Change]) -> None:
        self._decoded[version] = changes
        total = sum(change.changed for kept in self._decoded.values() for change in kept)
        for oldest in sorted(self._decoded)[:-1]:
            if total <= self._kept_changes:
                break
            total -= sum(change.changed for change in self._decoded.pop(oldest))

    def _trim(self, needed: int) -> None:
        """Delete the oldest files while there are more than may be kept; those of one version stay."""
        folders = self._folders()
        sizes = {version: sum(file.stat().st_size for file in path.iterdir()) for version, path in folders}
        total = sum(sizes.values())
        for version, path in folders:
            if total <= self._cache_bytes:
                break
            if version != needed:
                total -= sizes[version]
                shutil.rmtree(path, ignore_errors=True)

    def _folders(self) -> list[tuple[int, Path]]:
        """Return the folders of files, by version, the oldest first."""
        return sorted((int(path.name), path) for path in self._area.fetched.iterdir() if path.name.isdigit())
