# SPDX-License-Identifier: Apache-2.0
"""Going over to another run of the same base, without a restart: back to the checkpoint, and on from there.

The checkpoint that the engine was started from is a state of both runs: two ordinary updates lead from one to the
other, each with the proof of its old values and the check of its new ones. Both are staged before anything is written;
the second is prepared between the two writes, because that is when its old values are there. Generation is paused over
both.

Invariant: all workers are at the version of the new run, or all at that of the old one, which is followed until then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_delta_snapshot.engine.agree import agree, gather_from_workers
from vllm_delta_snapshot.engine.messages import DeltaSnapshotUpdateInfo
from vllm_delta_snapshot.engine.ways import Way
from vllm_delta_snapshot.engine.write.fitness import Fitness
from vllm_delta_snapshot.engine.write.transaction import PreparedUpdate, prepare
from vllm_delta_snapshot.engine.write.updates import Update, Weights, staged_update
from vllm_delta_snapshot.errors import BaseMismatch, RunMismatch, WeightsUncertain
from vllm_delta_snapshot.host.handoff import Handoff, StagedUpdate

__all__ = ["Switch"]


@dataclass(eq=False)
class Switch:
    """A way from the run that an engine follows to another one.

    Args:
        old: the tie to the stager of the run that it follows.
        new: the tie to that of the other; it may not be joined yet.
        sync_dir: where that run lies.
        old_dir: where the run lies that the engine follows.
    """

    old: Handoff
    new: Handoff
    sync_dir: str
    old_dir: str
    _back: PreparedUpdate | None = None
    _ready_for: DeltaSnapshotUpdateInfo | None = None

    def prepare(self, info: DeltaSnapshotUpdateInfo, at: Weights, fitness: Fitness) -> None:
        """Have both updates staged, and the first one ready to be written. Collective over the engine's workers.

        Args:
            info: the version of the other run.
            at: which weights the engine has.
            fitness: where they lie.

        Raises:
            NotStaged: something is not there yet.
            RunMismatch: the other run is not the one that is named, or the version leads elsewhere.
            BaseMismatch: the runs do not start from the same weights.
            DeltaSnapshotError: a check failed; nothing was written.
        """
        failure: BaseException | None = None
        update: Update | None = None
        self._back = self._ready_for = None
        try:
            self._check_new(info)
            if at.version != self.old.oldest_version:
                update = self._update_back(at, fitness)
            if info.version != self.new.oldest_version:
                self._staged_on(info)
        except BaseException as error:  # noqa: BLE001 - the other workers must not wait for this one
            failure = error
        agree(failure, (at, self.new.oldest_digest if self.new.is_joined else None, update is None))
        if update is not None:
            self._back = prepare(fitness, update)
        self._ready_for = info

    def is_ready(self, info: DeltaSnapshotUpdateInfo) -> bool:
        """Say whether `prepare` was done for this version."""
        ready = self._ready_for
        return ready is not None and (ready.version, ready.run, ready.digest) == (info.version, info.run, info.digest)

    def commit(
        self, info: DeltaSnapshotUpdateInfo, fitness: Fitness, model: torch.nn.Module, way: Way, config: Any
    ) -> Weights:
        """Write both, and return which weights the engine has. Collective; generation must be paused.

        Args:
            info: the version of the other run.
            fitness: where the weights lie.
            model: the live model.
            way: how plain weights are written.
            config: vLLM's configuration of the engine.

        Raises:
            DeltaSnapshotError: this worker or another failed; all have the weights that they had.
            WeightsUncertain: this worker or another could not put its old weights back.
        """
        back, self._back, self._ready_for = self._back, None, None
        if back is not None:
            back.commit(model, way, config)
        try:
            return self._go_on(info, fitness, lambda update: update.commit(model, way, config))
        except WeightsUncertain:
            raise
        except BaseException as error:
            is_old = back is None or back.undo(model)
            if not all(gather_from_workers(is_old)):
                raise WeightsUncertain(
                    "going over to another run failed, and a worker could not put its old weights back",
                    found=error,
                    hint="Do not resume this engine: restart it; it catches up by itself.",
                ) from error
            raise

    def _go_on(
        self, info: DeltaSnapshotUpdateInfo, fitness: Fitness, write: Callable[[PreparedUpdate], None]
    ) -> Weights:
        assert info.run is not None  # noqa: S101 - `prepare` compared it
        home = Weights(info.run, self.new.oldest_version, self.new.oldest_digest)
        if info.version == home.version:
            return home
        failure: BaseException | None = None
        update: Update | None = None
        try:
            staged = self._staged_on(info)
            update = staged_update(
                staged,
                fitness.specs,
                run_id=home.run_id,
                base_version=home.version,
                version=_version_of(info),
                state_digest=home.state_digest,
                leads_to=info.digest,
            )
        except BaseException as error:  # noqa: BLE001 - the other workers must not wait for this one
            failure = error
        agree(failure, None if update is None else update.state_digest)
        assert update is not None  # noqa: S101 - or `agree` has raised
        write(prepare(fitness, update))
        return Weights(home.run_id, _version_of(info), update.state_digest)

    def _check_new(self, info: DeltaSnapshotUpdateInfo) -> None:
        self.new.join(0.0)
        run_id = self.new.read_run().run_id
        if run_id != info.run and self.sync_dir == self.old_dir:
            raise RunMismatch(
                "the run that this engine follows is no longer in its folder: another one was begun there",
                file=self.sync_dir,
                expected=f"run {info.run}",
                found=f"it serves a version of run {run_id}, whose deltas back to the checkpoint are gone",
                hint="Restart the engine, then initialize it again. Give each run a folder of its own: between such "
                "runs engines are moved without a restart.",
            )
        if run_id != info.run:
            raise RunMismatch(
                "another run lies there than the one to go over to",
                file=self.sync_dir,
                expected=f"run {info.run}",
                found=f"run {run_id}",
                hint="Is it the same folder for the driver and the server?",
            )
        if self.new.oldest_digest != self.old.oldest_digest:
            raise BaseMismatch(
                "the two runs do not start from the same weights",
                file=self.sync_dir,
                expected=f"state digest {self.old.oldest_digest}",
                found=f"state digest {self.new.oldest_digest}",
                hint="Restart the engine from the base of the run that it is to follow.",
            )
        if info.version == self.new.oldest_version and info.digest not in (None, self.new.oldest_digest):
            raise RunMismatch(
                f"the run's version {info.version} is not the checkpoint that it is said to be",
                file=self.sync_dir,
                expected=f"state digest {info.digest}",
                found=f"state digest {self.new.oldest_digest}",
                hint="Is it the same folder for the driver and the server?",
            )

    def _update_back(self, at: Weights, fitness: Fitness) -> Update:
        home = self.old.oldest_version
        return staged_update(
            self.old.find(at.version, home),
            fitness.specs,
            run_id=at.run_id,
            base_version=at.version,
            version=home,
            state_digest=at.state_digest,
            leads_to=self.old.oldest_digest,
        )

    def _staged_on(self, info: DeltaSnapshotUpdateInfo) -> StagedUpdate:
        return self.new.find(self.new.oldest_version, _version_of(info))


def _version_of(info: DeltaSnapshotUpdateInfo) -> int:
    assert info.version is not None  # noqa: S101 - the message was checked
    return info.version
