# SPDX-License-Identifier: Apache-2.0
"""The versions that a stager has at hand: fetched, verified, decoded, and linked to the version before.

Kept until `forget`; what was forgotten is fetched again when it is needed again.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping

from vllm_delta_snapshot.errors import BaseMismatch
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.run_folder import RunFolder
from vllm_delta_snapshot.stage.area import StageArea
from vllm_delta_snapshot.stage.decode import decode
from vllm_delta_snapshot.stage.fetch import fetch
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
    """

    def __init__(
        self, folder: RunFolder, area: StageArea, specs: Mapping[str, TensorSpec], start: int, start_digest: str
    ) -> None:
        self._folder = folder
        self._area = area
        self._specs = specs
        self._start = (start, start_digest)
        self._metadata: dict[int, DeltaMetadata] = {}
        self._changes: dict[int, list[Change]] = {}

    def __contains__(self, version: object) -> bool:
        """Say whether a version is at hand."""
        return version in self._changes

    def load(self, version: int) -> None:
        """Have a version at hand. Blocks if it has to be fetched.

        Raises:
            BaseMismatch: it does not continue the version before.
            BrokenChain, CorruptFile, UnsupportedFormat, StageError, StoreUnavailable: it cannot be had.
        """
        if version in self._changes:
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
        self._changes[version] = decode(metadata, target, self._specs)
        self._metadata[version] = metadata
        logger.info("fetched version=%d bytes=%d", version, record.payload_bytes)

    def load_all(self, first: int, last: int) -> range:
        """Have all versions from `first` to `last` at hand, and return them. Raises: see `load`."""
        steps = range(first, last + 1)
        for step in steps:
            self.load(step)
        return steps

    def metadata(self, version: int) -> DeltaMetadata:
        """Return the metadata of a version at hand."""
        return self._metadata[version]

    def changes(self, version: int) -> list[Change]:
        """Return the changes of a version at hand."""
        return self._changes[version]

    def state_digest(self, version: int) -> str:
        """Return the state digest of any version, at hand or not. Raises: as reading its record does."""
        if version == self._start[0]:
            return self._start[1]
        if version in self._metadata:
            return self._metadata[version].state_digest
        return self._folder.read_version(version).state_digest

    def forget(self, oldest: int) -> None:
        """Forget versions up to and including `oldest`, and delete their files."""
        for version in [version for version in self._changes if version <= oldest]:
            del self._changes[version]
            del self._metadata[version]
        for path in self._area.fetched.iterdir():
            if path.name.isdigit() and int(path.name) <= oldest:
                shutil.rmtree(path, ignore_errors=True)
