# SPDX-License-Identifier: Apache-2.0
"""A checkpoint on the local disk that is taken from version to version, each step proven from its own bytes.

The digest of every tensor is known from the start on and moved by what is really overwritten and written, so that at
any version it is the digest of the bytes that lie there. Memory: a few blocks of a delta; disk: a checkpoint and a
delta. The copy is not made durable.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np

from vllm_delta_snapshot.changes.resolve import resolve_entry
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.checkpoint.patch_files import copy_checkpoint
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.errors import BaseMismatch, BrokenChain, DeltaSnapshotError, StageError, VerifyError
from vllm_delta_snapshot.format.digest import add_digests, format_digest, patch_digest, tensor_digest
from vllm_delta_snapshot.format.metadata import TensorEntry
from vllm_delta_snapshot.format.version import DeltaRecord
from vllm_delta_snapshot.runs.replay import streamed_entries
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.types import Change, TensorPatch
from vllm_delta_snapshot.util.traffic import COPIED, count_bytes

__all__ = ["WorkingCopy"]


class WorkingCopy:
    """See the module.

    Args:
        folder: the run.
        scratch: a local folder of the caller's.

    Attributes:
        at: the version that it is; ``None`` before `start`, and after a step that failed.
        digests: the digest of every tensor there.
    """

    def __init__(self, folder: RunFolder, scratch: Path) -> None:
        self._folder = folder
        self._scratch = scratch
        self._specs = folder.read_run().specs()
        self._checkpoint: Checkpoint | None = None
        self._writable: dict[Path, np.memmap[tuple[int], np.dtype[np.uint8]]] = {}
        self._place_of: dict[str, tuple[Path, int]] = {}
        self.at: int | None = None
        self.digests: dict[str, int] = {}

    @property
    def state_digest(self) -> str:
        """The state digest, from the digests of the tensors."""
        return format_digest(add_digests(*self.digests.values()))

    def start(self, checkpoint: Checkpoint, version: int) -> None:
        """Begin with a copy of a checkpoint. Blocks; reads every byte twice.

        Raises:
            StageError: the local disk failed.
        """
        self.at = None
        if self._checkpoint is not None:
            shutil.rmtree(self._checkpoint.folder, ignore_errors=True)
        place = self._scratch / uuid.uuid4().hex
        try:
            copy_checkpoint(checkpoint, place)
        except OSError as error:
            raise StageError("cannot copy the checkpoint", file=error.filename, found=error.strerror) from error
        self._checkpoint = Checkpoint(place)
        files = self._checkpoint.files
        self._writable = {file.path: np.memmap(file.path, dtype=np.uint8, mode="r+") for file in files}
        self._place_of = {name: (file.path, file.offset(name)) for file in files for name in file.specs}
        self.digests = dict(self._digested(self._checkpoint))
        self.at = version

    def take(self, record: DeltaRecord) -> None:
        """Apply a delta that starts from here, and check every digest that its writer noted.

        Raises:
            BaseMismatch: the values before are not those that it was made against, or do not lead where it says.
            VerifyError: it leads to another state than it says.
            CorruptFile, UnsupportedFormat, StageError, StoreUnavailable: it cannot be had.
        """
        checkpoint = self._known()
        self.at = None
        digests = dict(self.digests)
        with streamed_entries(self._folder, record, self._specs, scratch=self._scratch) as entries:
            for entry, change in entries:
                patch, moved = self._proven(checkpoint.bits, record, entry, change)
                digests[entry.name] = add_digests(digests[entry.name], moved)
                self._write(patch)
        self.digests = digests
        self._check_state(record)
        self.at = record.version

    def foresee(self, record: DeltaRecord) -> dict[str, int]:
        """Return the digests to which a delta that starts from here leads, checked likewise; nothing is written.

        Raises: see `take`.
        """
        bits, digests = self._known().bits, dict(self.digests)
        with streamed_entries(self._folder, record, self._specs, scratch=self._scratch) as entries:
            for entry, change in entries:
                _, moved = self._proven(bits, record, entry, change)
                digests[entry.name] = add_digests(digests[entry.name], moved)
        return digests

    def compare(self, other: Checkpoint, *, file: str, hint: str) -> None:
        """Compare every bit with another checkpoint of the same version.

        Args:
            other: that checkpoint, its table of tensors checked.
            file: where it comes from, for the message.
            hint: what to do if it differs, for the message.

        Raises:
            VerifyError: they differ; names the first tensor and position.
        """
        ours = self._known()
        for spec, theirs in other.items():
            mine = ours.bits(spec.name)
            count_bytes(COPIED, mine.nbytes)
            if np.array_equal(mine, theirs):
                continue
            at = int(np.flatnonzero(mine != theirs)[0])
            raise VerifyError(
                f"the anchor of version {self.at} has other weights than the deltas lead to",
                file=file,
                tensor=spec.name,
                expected=f"bits {mine[at]:#x} at position {at}",
                found=f"{theirs[at]:#x}",
                hint=hint,
            )

    def check_bytes(self) -> None:
        """Read all that lies there once more, and compare it with the digests.

        Raises:
            VerifyError: the local disk gives back something else than was written.
        """
        checkpoint = self._known()
        for name, digest in self._digested(checkpoint):
            if digest != self.digests[name]:
                raise VerifyError(
                    "the local copy is not what was written to it",
                    file=str(checkpoint.folder),
                    tensor=name,
                    expected=f"digest {format_digest(self.digests[name])}",
                    found=f"digest {format_digest(digest)}",
                    hint="The local disk or memory is damaged: use another machine, or another --scratch.",
                )

    def _known(self) -> Checkpoint:
        if self._checkpoint is None or self.at is None:
            raise BrokenChain(
                "there is no version to go on from",
                file=self._folder.store.uri,
                hint="Say where the base is: --base FOLDER",
            )
        return self._checkpoint

    @staticmethod
    def _digested(checkpoint: Checkpoint) -> list[tuple[str, int]]:
        found = []
        for spec, bits in checkpoint.items():
            found.append((spec.name, tensor_digest(spec, bits)))
            count_bytes(COPIED, bits.nbytes)
        return found

    def _proven(
        self, bits: Callable[[str], Bits], record: DeltaRecord, entry: TensorEntry, change: Change
    ) -> tuple[TensorPatch, int]:
        """Return what a change writes, and by how much that moves the tensor's digest; `bits` gives what is there."""
        before = patch_digest(change.spec, change.positions, bits(entry.name)[change.positions])
        self._check(record, entry, "the values before", entry.old_digest, before)
        patch = self._located(record, lambda: resolve_entry(entry, change, bits))
        after = patch_digest(patch.spec, patch.positions, patch.values)
        if entry.old_digest is not None:
            self._check(record, entry, "the new values", entry.new_digest, after)
        moved = add_digests(after, -before)
        self._check(record, entry, "the way from old to new", format_digest(entry.moves_digest), moved)
        return patch, moved

    def _check(self, record: DeltaRecord, entry: TensorEntry, what: str, expected: str | None, found: int) -> None:
        if expected is not None and int(expected, 16) != found:
            raise BaseMismatch(
                f"version {record.version}: {what} have another digest than the trainer noted",
                file=f"{self._folder.store.uri}/{record.folder}",
                tensor=entry.name,
                expected=f"digest {expected}",
                found=f"digest {format_digest(found)}",
                hint=self._hint(record),
            )

    def _located(self, record: DeltaRecord, resolve: Callable[[], TensorPatch]) -> TensorPatch:
        try:
            return resolve()
        except DeltaSnapshotError as error:
            raise type(error)(
                f"version {record.version}: {error.what}",
                file=f"{self._folder.store.uri}/{record.folder}",
                tensor=error.tensor,
                expected=error.expected,
                found=error.found,
                hint=self._hint(record),
            ) from error

    def _check_state(self, record: DeltaRecord) -> None:
        if self.state_digest != record.state_digest:
            raise VerifyError(
                f"version {record.version} does not lead to the state that was published",
                file=f"{self._folder.store.uri}/{record.folder}",
                expected=f"state digest {record.state_digest}",
                found=f"state digest {self.state_digest}",
                hint=self._hint(record),
            )

    def _hint(self, record: DeltaRecord) -> str:
        # Engines refuse it as well, each at its old values.
        return (
            f"Engines at version {record.base_version} refuse it; those that start from a later anchor do not meet it. "
            f"See what there is: delta-snapshot log {self._folder.store.uri}"
        )

    def _write(self, patch: TensorPatch) -> None:
        file, offset = self._place_of[patch.spec.name]
        data = self._writable[file][offset : offset + patch.spec.num_bytes]
        data.view(patch.spec.element.bits)[patch.positions] = patch.values
