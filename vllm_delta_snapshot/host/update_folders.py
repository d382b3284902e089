# SPDX-License-Identifier: Apache-2.0
"""The folders of staged updates: from any version that a worker has to any that it wants, in the form of a delta.

One version is staged as it was fetched. Several are merged, or undone. On a host with a mirror, updates hold absolute
values only: the mirror writes them twice after a death, and there are workers that cannot know their old values.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from vllm_delta_snapshot.changes.decode import decode
from vllm_delta_snapshot.changes.merge import fold
from vllm_delta_snapshot.changes.resolve import resolve
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.errors import BaseMismatch, CorruptFile, DeltaSnapshotError, OutOfOrder, StageError
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.digest import add_digests, patch_digest
from vllm_delta_snapshot.format.encodings import encoding_of
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.host.area import StageArea, pair_of
from vllm_delta_snapshot.host.fetched import FetchedVersions
from vllm_delta_snapshot.host.mirror_keeper import MirrorKeeper
from vllm_delta_snapshot.interop.openrl import read_folder_metadata
from vllm_delta_snapshot.runs.assemble import assemble_absolute, assemble_back, assemble_forward
from vllm_delta_snapshot.runs.chain import Step
from vllm_delta_snapshot.runs.delta_folder import DigestedChange, Lineage, WriterNotes, write_delta_folder
from vllm_delta_snapshot.store.posix import PosixStore
from vllm_delta_snapshot.types import Change, TensorDifference, TensorPatch
from vllm_delta_snapshot.util.new_folder import appearing

__all__ = ["UpdateFolders"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Before:
    """A part of an update that is staged already, or nothing; and the deltas that lead on from there."""

    rest: list[Step]
    metadata: DeltaMetadata | None
    changes: list[Change]


class UpdateFolders:
    """See the module.

    Args:
        area: where the folders lie.
        run_id: the run.
        fetched: its versions.
        checkpoint: the engines' checkpoint.
        start: the version that it is.
        mirror: the host's mirror, if there is one.
    """

    def __init__(
        self,
        area: StageArea,
        run_id: str,
        fetched: FetchedVersions,
        checkpoint: Checkpoint,
        start: int,
        mirror: MirrorKeeper,
    ) -> None:
        self._area = area
        self._run_id = run_id
        self._fetched = fetched
        self._checkpoint = checkpoint
        self._start = start
        self._mirror = mirror
        self._as_fetched: set[Step] = set()
        self._absolute: set[Step] = set()

    def stage(self, base: int, version: int) -> None:
        """Have the update from `base` to `version` staged. Blocks; no work if it is.

        Raises:
            OutOfOrder: it would lead to before the engines' checkpoint.
            DeltaSnapshotError: it cannot be had.
        """
        folder = self._area.staged_folder(base, version)
        is_absolute = self._area.read_mirror_target() is not None
        if folder.exists():
            if not is_absolute or self._is_known_absolute(base, version):
                return
            self._clear(base, version)
        self._absolute.discard((base, version))  # what is staged from here on may be another form of it
        started = time.monotonic()
        with appearing(folder) as work:
            is_own = self._fetched.is_own(base, version)
            if is_own and not (is_absolute and self._has_differences(version)):
                self._link(version, work)
                self._as_fetched.add((base, version))
            else:
                self._write(base, version, work, is_absolute=is_absolute)
        logger.debug("staged base=%d version=%d seconds=%.3f", base, version, time.monotonic() - started)

    def read(self, base: int, version: int) -> tuple[DeltaMetadata, list[Change]]:
        """Return a staged update.

        Raises:
            CorruptFile, UnsupportedFormat, ObjectNotFound: it is damaged.
        """
        if (base, version) in self._as_fetched and version in self._fetched:
            return self._fetched.metadata(version), self._fetched.changes(version)
        folder = self._area.staged_folder(base, version)
        metadata = _metadata(folder)
        return metadata, decode(metadata, folder, self._checkpoint.specs)

    def absolute(self, base: int, version: int) -> tuple[DeltaMetadata, list[TensorPatch]]:
        """Stage and return an update of absolute values, for the mirror.

        Raises:
            DeltaSnapshotError: it cannot be had.
        """
        self.stage(base, version)
        metadata, changes = self.read(base, version)
        patches = [change for change in changes if isinstance(change, TensorPatch)]
        if len(patches) < len(changes):
            raise StageError("an update holds differences where a mirror is kept", hint="Ask again.")
        return metadata, patches

    def _is_known_absolute(self, base: int, version: int) -> bool:
        """Say whether a staged update holds absolute values only. Its metadata is read once: the stager asks often."""
        if (base, version) not in self._absolute and _is_absolute(_metadata(self._area.staged_folder(base, version))):
            self._absolute.add((base, version))
        return (base, version) in self._absolute

    def _has_differences(self, version: int) -> bool:
        return any(isinstance(change, TensorDifference) for change in self._fetched.changes(version))

    def _clear(self, base: int, version: int) -> None:
        """Take back an update of differences, now that absolute values are wanted."""
        self._as_fetched.discard((base, version))
        shutil.rmtree(self._area.staged_folder(base, version), ignore_errors=True)
        for folder in self._area.mapped.glob(f"{self._area.staged_folder(base, version).name}-*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _link(self, version: int, work: Path) -> None:
        folder = self._fetched.files(version)
        metadata = self._fetched.metadata(version)
        for entry in metadata.files:
            os.link(folder / entry.name, work / entry.name)
        (work / layout.METADATA_NAME).write_bytes(metadata.to_json())

    def _write(self, base: int, version: int, work: Path, *, is_absolute: bool) -> None:
        known = None if is_absolute else self._staged_before(base, version)
        digested = self._forward(base, version, known) if version > base else self._back(base, version)
        if is_absolute:
            digested = self._to_absolute(digested, base, version)
        last = self._fetched.metadata(max(base, version))
        lineage = Lineage(self._run_id, version, base, self._fetched.state_digest(base), last.total_elements)
        notes = WriterNotes(base_model=last.base_model, step=last.step if version > base else None)
        store = PosixStore(work.parent)
        written = write_delta_folder(store, work.name, last.publication_id, lineage, digested, lambda: notes)
        expected = self._fetched.state_digest(version)
        if written.metadata.state_digest != expected:
            raise CorruptFile(
                f"the versions between {base} and {version} do not lead there",
                expected=f"state digest {expected}",
                found=f"state digest {written.metadata.state_digest}",
                hint="Check the run: delta-snapshot verify <sync_dir>",
            )

    def _staged_before(self, base: int, version: int) -> _Before | None:
        """Return the newest staged update from `base` short of `version`: only the rest is merged then."""
        pairs = [pair_of(path) for path in self._area.staged.iterdir()]
        reached = [pair[1] for pair in pairs if pair and pair[0] == base and base < pair[1] < version]
        if not reached:
            return None
        try:
            return _Before(self._fetched.way(max(reached), version), *self.read(base, max(reached)))
        except DeltaSnapshotError as error:
            logger.warning("staging base=%d version=%d anew: %s", base, max(reached), error)
            return None

    def _forward(self, base: int, version: int, known: _Before | None) -> Iterator[DigestedChange]:
        known = known or _Before(self._fetched.way(base, version), None, [])
        first = [] if known.metadata is None else [known.metadata]
        steps = fold(chain([known.changes], map(self._fetched.step_changes, known.rest)))
        return assemble_forward(steps, [*first, *map(self._fetched.read_metadata, known.rest)])

    def _back(self, base: int, version: int) -> Iterator[DigestedChange]:
        if version < self._start:
            raise OutOfOrder(
                "cannot go back to before the engine's checkpoint",
                file=str(self._checkpoint.folder),
                expected=f"version {self._start} or later",
                found=f"version {version}",
                hint="Start an engine from that version: delta-snapshot materialize <sync_dir>@N <folder>",
            )
        way = self._fetched.way(version, base)
        undone = fold(map(self._fetched.step_changes, way))
        metadata = list(map(self._fetched.read_metadata, way))
        return assemble_back(lambda: self._from_start(version), undone, metadata, self._checkpoint.bits)

    def _to_absolute(self, digested: Iterator[DigestedChange], base: int, version: int) -> Iterator[DigestedChange]:
        """Resolve differences, by the mirror if it is at one end of the update, else from the checkpoint on."""
        items = list(digested)
        try:
            if (mirror := self._mirror.at(base)) is not None:
                return iter([_resolved(item, mirror.bits(item.change.spec.name)) for item in items])
            if not any(_is_mixed(item.change) for item in items) and (mirror := self._mirror.at(version)) is not None:
                return iter(list(assemble_absolute(iter(items), list, mirror.bits)))
        except BaseMismatch as error:
            logger.warning("the mirror is not what it says: %s", error)  # it is made anew when it is to move
        return assemble_absolute(iter(items), lambda: self._from_start(version), self._checkpoint.bits)

    def _from_start(self, version: int) -> list[Sequence[Change]]:
        return fold(self._fetched.each(self._start + 1, version))


def _is_mixed(change: Change) -> bool:
    """Say whether only some values are differences: against the values after, they cannot be proven."""
    return isinstance(change, TensorDifference) and change.is_mixed


def _resolved(item: DigestedChange, bits: Bits) -> DigestedChange:
    change = item.change
    if isinstance(change, TensorPatch):
        return item
    old = bits[change.positions]
    patch = resolve(change, old, old_digest=item.old_digest, move=item.move)
    before = item.old_digest  # proven, if it was known
    if before is None:
        before = patch_digest(change.spec, change.positions, old)
    return DigestedChange(patch, before, add_digests(before, item.move))


def _metadata(folder: Path) -> DeltaMetadata:
    metadata = read_folder_metadata(folder)
    if not isinstance(metadata, DeltaMetadata):
        raise StageError("a staged update lost its lineage", file=str(folder))
    return metadata


def _is_absolute(metadata: DeltaMetadata) -> bool:
    return not any(encoding_of(entry.encoding).is_difference for entry in metadata.tensors)
