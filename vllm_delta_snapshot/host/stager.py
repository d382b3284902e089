# SPDX-License-Identifier: Apache-2.0
"""Stage: follow a run, and have the next update ready before anybody asks for it.

One process a host and checkpoint, at low priority, beside the engines. It alone reads the store: it lists new
versions, fetches and verifies them, merges what a worker has missed into one update, maps that to where each worker's
weights lie, and hands it over in the stage area. It imports neither torch nor vLLM. It goes when the last worker is
gone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time
from collections.abc import Sequence
from typing import Final

from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import (
    BaseMismatch,
    BrokenChain,
    ChainError,
    DeltaSnapshotError,
    FormatError,
    StageError,
)
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.digest import format_digest
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.host.area import Problem, StageArea, StagerState, pair_of
from vllm_delta_snapshot.host.attachment import Worker, living_workers
from vllm_delta_snapshot.host.fetched import FetchedVersions
from vllm_delta_snapshot.host.mapping import map_update, write_lanes
from vllm_delta_snapshot.host.mirror_keeper import MirrorKeeper
from vllm_delta_snapshot.host.places import PlaceMap
from vllm_delta_snapshot.host.tensor_digests import TensorDigests
from vllm_delta_snapshot.host.update_folders import UpdateFolders
from vllm_delta_snapshot.runs.chain import Step
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import open_store
from vllm_delta_snapshot.types import Change, TensorDifference
from vllm_delta_snapshot.util.new_folder import appearing
from vllm_delta_snapshot.util.traffic import FETCHED, count_retry, moved_bytes, retries

__all__ = ["Stager"]

logger = logging.getLogger(__name__)

_KEPT: Final = 2
"""How many updates from one version are kept, the newest ones."""


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
        self._places: dict[str, PlaceMap] = {}
        self._retry_at = 0.0
        self._mirror_retry_at = 0.0
        self._pair_retry_at: dict[tuple[int, int], float] = {}

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
        workers = set(living_workers(self._area, self._state.start_version))
        if not workers:
            return False
        if self._state.status == "following":
            try:
                self._follow(workers)
            except OSError as error:
                # The local disk: what was staged stays, and room may be made.
                self._report(self._state.newest + 1, StageError("staging failed", found=error))
        counted = (self._state.fetched_bytes, self._state.retries)
        if counted != (moved_bytes(FETCHED), retries()) or not self._area.state.exists():
            self._set_state(self._state)
        return True

    def _start(self) -> None:
        run = self._folder.read_run()
        checkpoint = Checkpoint(self._config.checkpoint)
        checkpoint.check_fits(dict(run.specs()), what=f"run {run.run_id}")
        self._area.begin_run(run)
        version = self._version_of(checkpoint, run.base.state_digest)
        self._fetched = FetchedVersions(
            self._folder, self._area, checkpoint, version, cache_bytes=self._config.cache_bytes
        )
        self._digests = TensorDigests(self._fetched, checkpoint, version)
        self._mirror = MirrorKeeper(self._area, checkpoint, run.run_id, version)
        self._updates = UpdateFolders(self._area, run.run_id, self._fetched, checkpoint, version, self._mirror)
        # A stager that takes over from a dead one has no use for what all workers have already.
        newest = min((worker.version for worker in living_workers(self._area, version)), default=version)
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
        newest, _ = self._folder.newest_and_stray()
        for version in reversed([version for version in self._folder.versions() if version <= newest]):
            if self._folder.read_version(version).state_digest == checkpoint.state_digest:
                return version
        raise BaseMismatch(
            "the engine's checkpoint is neither the base of the run nor one of its versions",
            file=str(checkpoint.folder),
            expected=f"state digest {base_digest} (the base)",
            found=f"state digest {checkpoint.state_digest}",
            hint="Start the engine from the base, or make a version: delta-snapshot materialize <sync_dir>@N <folder>",
        )

    def _follow(self, workers: set[Worker]) -> None:
        if time.monotonic() >= self._retry_at:
            self._fetch_new()
        bases = {worker.version for worker in workers}
        for base, version in self._pairs(bases):
            if time.monotonic() < self._pair_retry_at.get((base, version), 0.0):
                continue
            try:
                self._updates.stage(base, version)
                for worker in sorted(workers):
                    if worker.version == base and worker.places:
                        self._map(base, version, worker.places)
            except DeltaSnapshotError as error:
                self._report(version, error, base=base)
        self._keep_mirror()
        self._answer_digests()
        self._prune(bases)

    def _answer_digests(self) -> None:
        """Write the digests of all tensors at the versions that somebody asked for. The first time reads every byte."""
        for path in self._area.digests.glob("*.wanted"):
            version = int(path.stem)
            try:
                digests = self._digests.at(version)
            except DeltaSnapshotError as error:
                answer: dict[str, object] = {"error": error.to_fields()}
            else:
                answer = {"digests": digests}
            self._area.write(path.with_suffix(".json"), json.dumps(answer).encode())
            path.unlink(missing_ok=True)

    def _keep_mirror(self) -> None:
        target = self._area.read_mirror_target()
        is_time = time.monotonic() >= self._mirror_retry_at
        if target is None or not is_time or not self._state.start_version <= target <= self._state.newest:
            return
        try:
            self._mirror.keep(target, self._updates.absolute)
            if self._state.mirror_error is not None:
                self._set_state(self._state.model_copy(update={"mirror_error": None}))
        except DeltaSnapshotError as error:
            logger.warning("cannot bring the mirror to version=%d: %s", target, error)
            self._mirror_retry_at = time.monotonic() + self._config.retry_interval_s
            self._set_state(self._state.model_copy(update={"mirror_error": error.to_fields()}))

    def _fetch_new(self) -> None:
        """Fetch and check what leads to the newest version, in order; stop at the first delta that is wrong."""
        version = self._state.newest + 1
        try:
            existing = self._folder.versions()
            for step in self._steps_to_newest(existing):
                version = step[1]
                self._fetched.load_step(step)
                self._set_state(self._state.model_copy(update={"newest": version, "problem": None}))
                version += 1
            if existing and existing[-1] >= version and version not in existing:
                raise BrokenChain(
                    f"version {version} is missing",
                    file=f"{self._config.sync_dir}/{layout.version_key(version)}",
                    found=f"version {existing[-1]} exists",
                    hint="Restore the record from a copy (docs/operations.md); delete what is beyond, if it is stray.",
                )
        except DeltaSnapshotError as error:
            self._report(version, error)

    def _steps_to_newest(self, existing: Sequence[int]) -> list[Step]:
        """Return the deltas to fetch, up to a gap: what lies before one can be served."""
        target = self._state.newest
        for version in existing:
            target += version == target + 1
        try:
            return self._fetched.way(self._state.newest, target)
        except (ChainError, FormatError) as error:
            if self._state.newest < self._folder.pruned():
                raise  # there is no next
            # Something on the way is damaged. What comes before it is good, and this finds out which it is.
            logger.warning("no way to version=%d, taking the next: %s", target, error)
            return [(self._state.newest, self._state.newest + 1)]

    def _pairs(self, bases: set[int]) -> list[tuple[int, int]]:
        """Return the updates to stage: from where workers are to the newest version, and those that somebody wants."""
        newest = self._state.newest
        pairs = {(base, newest) for base in bases if base < newest}
        for path in self._area.wanted.iterdir():
            pair = pair_of(path)
            if pair and pair[0] in bases and pair[0] != pair[1] and max(pair) <= newest:
                pairs.add(pair)
        return sorted(pairs)

    def _map(self, base: int, version: int, places: str) -> None:
        final = self._area.mapped_folder(base, version, places)
        if final.exists():
            return
        started = time.monotonic()
        if places not in self._places:
            self._places[places] = PlaceMap.load(self._area.places / places)
        metadata, changes = self._updates.read(base, version)
        with appearing(final) as work:
            write_lanes(work, map_update(changes, self._places[places]), _head(metadata, changes))
        logger.debug("mapped base=%d version=%d seconds=%.3f", base, version, time.monotonic() - started)

    def _prune(self, bases: set[int]) -> None:
        """Forget what no living worker can need any more."""
        self._fetched.forget(min(bases))
        wanted = {pair_of(path) for path in self._area.wanted.iterdir()}
        for area in (self._area.staged, self._area.mapped):
            folders = [(pair, path) for path in area.iterdir() if (pair := pair_of(path))]
            for (base, version), path in folders:
                # A worker may be about to open the newest but one: it was the newest when it asked.
                newer = {other for (of, other), _ in folders if of == base and other > version}
                is_old = len(newer) >= _KEPT and (base, version) not in wanted
                if base not in bases or is_old:
                    shutil.rmtree(path, ignore_errors=True)
        for path in self._area.wanted.iterdir():
            pair = pair_of(path)
            if pair is None or pair[0] not in bases:
                path.unlink(missing_ok=True)

    def _report(self, version: int, error: DeltaSnapshotError, *, base: int | None = None) -> None:
        """Say what is wrong with a version, or with the update to it from `base`; and wait before trying it again."""
        logger.warning("cannot stage base=%s version=%d: %s", base, version, error)
        count_retry("stage")
        retry_at = time.monotonic() + self._config.retry_interval_s
        if base is None:
            self._retry_at = retry_at
        else:
            self._pair_retry_at[base, version] = retry_at
        problem = Problem(version=version, base=base, error=error.to_fields())
        with contextlib.suppress(OSError):
            self._set_state(self._state.model_copy(update={"problem": problem}))

    def _set_state(self, state: StagerState) -> None:
        self._state = state = state.model_copy(update={"fetched_bytes": moved_bytes(FETCHED), "retries": retries()})
        self._area.write(self._area.state, state.to_json())


def _head(metadata: DeltaMetadata, changes: Sequence[Change]) -> dict[str, object]:
    """Return what a worker checks an update against."""
    return {
        "run_id": metadata.run_id,
        "version": metadata.version,
        "base_version": metadata.base_version,
        "base_state_digest": metadata.base_state_digest,
        "state_digest": metadata.state_digest,
        "has_differences": any(isinstance(change, TensorDifference) for change in changes),
        "tensors": [
            [entry.name, entry.changed, entry.old_digest, format_digest(entry.moves_digest)]
            for entry in metadata.by_tensor
        ],
    }
