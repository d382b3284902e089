# SPDX-License-Identifier: Apache-2.0
"""Stage: follow a run, and have the next update ready before anybody asks for it.

One process a host and checkpoint, at low priority, beside the engines. It alone reads the store: it lists new
versions, fetches and verifies them, merges what a worker has missed into one update, and hands that over in the stage
area. It imports neither torch nor vLLM. It goes when the last worker is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
import uuid
from pathlib import Path

from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.delta_folder import DigestedPatch, Lineage, WriterNotes, write_delta_folder
from vllm_delta_snapshot.errors import BaseMismatch, BrokenChain, DeltaSnapshotError, StageError
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.digest import add_digests, patch_digest
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.run_folder import RunFolder
from vllm_delta_snapshot.stage.area import Problem, StageArea, StagerState
from vllm_delta_snapshot.stage.attachment import living_versions
from vllm_delta_snapshot.stage.decode import decode
from vllm_delta_snapshot.stage.fetch import fetch
from vllm_delta_snapshot.stage.merge import merge
from vllm_delta_snapshot.store import open_store
from vllm_delta_snapshot.store.posix import PosixStore
from vllm_delta_snapshot.types import TensorPatch

__all__ = ["Stager"]

logger = logging.getLogger(__name__)


class Stager:
    """See the module. `run` is the process: `start`, then `step` again and again.

    Args:
        area: the stage area, whose lock the caller holds.
    """

    def __init__(self, area: StageArea) -> None:
        self._area = area
        self._config = area.read_config()
        self._folder = RunFolder(open_store(self._config.sync_dir))
        self._state = StagerState(status="starting", pid=os.getpid())
        self._metadata: dict[int, DeltaMetadata] = {}
        self._patches: dict[int, list[TensorPatch]] = {}
        self._retry_at = 0.0

    def run(self) -> None:
        """Follow until the last worker is gone. Blocks."""
        self.start()
        while self.step():
            time.sleep(self._config.poll_interval_s)
        logger.info("no worker left")

    def start(self) -> None:
        """Find out which version the engines' checkpoint is, by reading every byte. An error goes into the state."""
        self._set_state(self._state)
        try:
            self._start()
        except DeltaSnapshotError as error:
            logger.error("failed: %s", error)
            self._set_state(self._state.model_copy(update={"status": "failed", "error": error.to_fields()}))

    def step(self) -> bool:
        """Do one round.

        Returns:
            Whether any worker is left.
        """
        bases = living_versions(self._area, self._state.start_version)
        if not bases:
            return False
        if self._state.status == "following":
            try:
                self._follow(bases)
            except OSError as error:
                # The local disk: what was staged stays, and room may be made.
                self._report(self._state.newest + 1, StageError("staging failed", found=error))
        if not self._area.state.exists():
            self._set_state(self._state)
        return True

    def _start(self) -> None:
        run = self._folder.read_run()
        checkpoint = Checkpoint(self._config.checkpoint)
        checkpoint.check_fits(dict(run.specs()), what=f"run {run.run_id}")
        self._area.write(self._area.run, run.to_json())
        version = self._version_of(checkpoint, run.base.state_digest)
        self._specs = run.specs()
        self._run_id = run.run_id
        # A stager that takes over from a dead one has no use for what all workers have already.
        newest = min(living_versions(self._area, version), default=version)
        update = {
            "status": "following",
            "start_version": version,
            "start_digest": checkpoint.state_digest,
            "newest": newest,
        }
        self._set_state(self._state.model_copy(update=update))
        logger.info("following run=%s sync_dir=%s from version=%d", run.run_id, self._config.sync_dir, version)

    def _version_of(self, checkpoint: Checkpoint, base_digest: str) -> int:
        if checkpoint.state_digest == base_digest:
            return 0
        for version in reversed(self._folder.versions()):
            if self._folder.read_version(version).state_digest == checkpoint.state_digest:
                return version
        raise BaseMismatch(
            "the engine's checkpoint is neither the base of the run nor one of its versions",
            file=str(checkpoint.folder),
            expected=f"state digest {base_digest} (the base)",
            found=f"state digest {checkpoint.state_digest}",
            hint="Start the engine from the base, or make a version: delta-snapshot materialize <sync_dir>@N <folder>",
        )

    def _follow(self, bases: list[int]) -> None:
        if time.monotonic() >= self._retry_at:
            self._fetch_new()
        oldest = min(bases)
        for version in self._targets():
            for base in set(bases):
                if base < version and not self._area.staged_folder(base, version).exists():
                    try:
                        self._stage(base, version)
                    except DeltaSnapshotError as error:
                        self._report(version, error)
        self._prune(oldest, set(bases))

    def _fetch_new(self) -> None:
        """Fetch and check every new version, in order; stop at the first that is wrong."""
        version = self._state.newest + 1
        try:
            existing = self._folder.versions()
            while version in existing:
                self._load(version)
                self._set_state(self._state.model_copy(update={"newest": version, "problem": None}))
                version += 1
            if existing and existing[-1] >= version:
                raise BrokenChain(
                    f"version {version} is missing",
                    file=f"{self._config.sync_dir}/{layout.version_key(version)}",
                    found=f"version {existing[-1]} exists",
                )
        except DeltaSnapshotError as error:
            self._report(version, error)

    def _load(self, version: int) -> None:
        """Have a version's metadata and patches at hand: fetched, verified, decoded."""
        if version in self._patches:
            return
        record = self._folder.read_version(version)
        metadata = self._folder.read_metadata(record)
        at = self._digest_of(version - 1)
        if (metadata.base_version, metadata.base_state_digest) != (version - 1, at):
            raise BaseMismatch(
                f"version {version} does not continue version {version - 1}",
                expected=f"base version {version - 1} with state digest {at}",
                found=f"base version {metadata.base_version} with state digest {metadata.base_state_digest}",
            )
        target = self._area.fetched_folder(version)
        fetch(self._folder.store, record, metadata, target)
        self._patches[version] = decode(metadata, target, self._specs)
        self._metadata[version] = metadata
        logger.info("fetched version=%d bytes=%d", version, record.payload_bytes)

    def _digest_of(self, version: int) -> str:
        if version == self._state.start_version:
            return self._state.start_digest
        if version in self._metadata:
            return self._metadata[version].state_digest
        return self._folder.read_version(version).state_digest

    def _targets(self) -> list[int]:
        """Return the versions to stage: the newest, and those that somebody asked for."""
        wanted = {int(path.name) for path in self._area.wanted.iterdir() if path.name.isdigit()}
        return sorted({version for version in wanted if version <= self._state.newest} | {self._state.newest})

    def _stage(self, base: int, version: int) -> None:
        started = time.monotonic()
        final = self._area.staged_folder(base, version)
        work = final.with_name(f".{final.name}.{uuid.uuid4().hex}")
        try:
            for step in range(base + 1, version + 1):
                self._load(step)
            work.mkdir()
            if version == base + 1:
                self._stage_one(version, work)
            else:
                self._stage_merged(base, version, work)
            work.rename(final)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        logger.info("staged base=%d version=%d seconds=%.3f", base, version, time.monotonic() - started)

    def _stage_one(self, version: int, work: Path) -> None:
        metadata = self._metadata[version]
        for entry in metadata.files:
            os.link(self._area.fetched_folder(version) / entry.name, work / entry.name)
        (work / layout.METADATA_NAME).write_bytes(metadata.to_json())

    def _stage_merged(self, base: int, version: int, work: Path) -> None:
        steps = range(base + 1, version + 1)
        merged = merge(self._patches[step] for step in steps)
        moves: dict[str, int] = {}
        for step in steps:
            for entry in self._metadata[step].tensors:
                move = int(entry.new_digest, 16) - int(entry.old_digest, 16)
                moves[entry.name] = add_digests(moves.get(entry.name, 0), move)
        last = self._metadata[version]
        lineage = Lineage(
            run_id=self._run_id,
            version=version,
            base_version=base,
            base_state_digest=self._metadata[base + 1].base_state_digest,
            state_digest=last.state_digest,
            total_elements=last.total_elements,
        )
        digested = [_digested(patch, moves[patch.spec.name]) for patch in merged]
        notes = WriterNotes(base_model=last.base_model, step=last.step)
        write_delta_folder(PosixStore(work.parent), work.name, last.publication_id, lineage, digested, notes)

    def _prune(self, oldest: int, bases: set[int]) -> None:
        """Forget what no living worker can need any more."""
        for version in [version for version in self._patches if version <= oldest]:
            del self._patches[version]
            del self._metadata[version]
        for folder in self._area.fetched.iterdir():
            if folder.name.isdigit() and int(folder.name) <= oldest:
                shutil.rmtree(folder, ignore_errors=True)
        for folder in self._area.staged.iterdir():
            base, _, _version = folder.name.partition("-")
            if base.isdigit() and int(base) not in bases:
                shutil.rmtree(folder, ignore_errors=True)
        for path in self._area.wanted.iterdir():
            if not path.name.isdigit() or int(path.name) <= oldest:
                path.unlink(missing_ok=True)

    def _report(self, version: int, error: DeltaSnapshotError) -> None:
        logger.warning("cannot stage version=%d: %s", version, error)
        self._retry_at = time.monotonic() + self._config.retry_interval_s
        problem = Problem(version=version, error=error.to_fields())
        with contextlib.suppress(OSError):
            self._set_state(self._state.model_copy(update={"problem": problem}))

    def _set_state(self, state: StagerState) -> None:
        self._state = state
        self._area.write(self._area.state, state.to_json())


def _digested(patch: TensorPatch, move: int) -> DigestedPatch:
    # The sum over all versions of (new - old) is what the merged patch moves the digest by; so the digest of the
    # values that it replaces is known without having them.
    new = patch_digest(patch.spec, patch.positions, patch.values)
    return DigestedPatch(patch, add_digests(new, -move), new)
