# SPDX-License-Identifier: Apache-2.0
"""What a worker was initialized with, and its tie to the stager of the run that it follows; no tie without a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch

from vllm_delta_snapshot.engine.identity import served
from vllm_delta_snapshot.engine.log import logger
from vllm_delta_snapshot.engine.messages import DeltaSnapshotInitInfo, DeltaSnapshotUpdateInfo
from vllm_delta_snapshot.engine.switch import Switch
from vllm_delta_snapshot.engine.ways import Way
from vllm_delta_snapshot.engine.write.fitness import Fitness
from vllm_delta_snapshot.engine.write.updates import Weights
from vllm_delta_snapshot.errors import NotStaged, RunMismatch
from vllm_delta_snapshot.host.area import StagerConfig, default_stage_root
from vllm_delta_snapshot.host.handoff import Handoff

__all__ = ["NO_LINEAGE", "Following"]

NO_LINEAGE: Final = Weights("no-run", 0, "")
"""What weights are that an OpenRL folder was written into: a version of nothing."""


class Following:
    """See the module.

    Args:
        info: what the engine was initialized with.
        folder: the checkpoint that its weights were loaded from.

    Attributes:
        handoff: the tie; ``None`` without a run, and before `join`.
        sync_dir: where the run lies; empty without one.
    """

    def __init__(self, info: DeltaSnapshotInitInfo, folder: Path) -> None:
        self.info = info
        self.handoff: Handoff | None = None
        self.sync_dir = info.sync_dir or ""
        self._folder = folder
        self._switch: Switch | None = None

    def join(self, fitness: Fitness, moved_to: Weights | None) -> Weights:
        """Tie this worker to the run's stager, and return which weights it has. Blocks.

        Args:
            fitness: where its weights lie.
            moved_to: what they became by updates; ``None`` if they are the checkpoint's.

        Raises:
            RunMismatch: they are a version of another run, or of none.
            DeltaSnapshotError: the run, the store or the checkpoint cannot be read.
        """
        if not self.sync_dir:
            return Weights("", 0, "")
        self.handoff = self._tie(self.sync_dir, fitness, timeout_s=self.info.init_timeout_s)
        run_id = self.handoff.read_run().run_id
        if moved_to is None:
            return Weights(run_id, self.handoff.start_version, self.handoff.start_digest)
        if moved_to == NO_LINEAGE:
            raise RunMismatch(
                "the weights of this engine are a version of no run: an OpenRL folder was written into them",
                file=self.sync_dir,
                expected=f"a version of run {run_id}, or the checkpoint that it starts from",
                found="weights that nothing here knows",
                hint="Restart the engine, then initialize it with this sync_dir.",
            )
        if moved_to.run_id != run_id:
            raise RunMismatch(
                "the weights of this engine are a version of another run",
                file=self.sync_dir,
                expected=f"run {run_id}",
                found=f"it {served(moved_to)}",
                hint="Initialize it with the folder of its own run; or move it from there: "
                "delta-snapshot sync SYNC_DIR --server URL --switch-run; or restart it.",
            )
        self.handoff.set_version(moved_to.version)
        return moved_to

    def turn_to(self, sync_dir: str, fitness: Fitness) -> None:
        """Begin a way to another run; go on with the one that was begun.

        Raises:
            RunMismatch: there is no run to go from.
            StageError: the stage area cannot be written.
        """
        if self.handoff is None:
            raise RunMismatch("this engine follows no run", hint="Initialize it with the run's sync_dir instead.")
        if self._switch is not None and self._switch.sync_dir != sync_dir:
            self.drop_switch()
        if self._switch is None:
            self._switch = Switch(self.handoff, self._tie(sync_dir, fitness, timeout_s=None), sync_dir, self.sync_dir)

    def go_over(
        self,
        info: DeltaSnapshotUpdateInfo,
        at: Weights,
        fitness: Fitness,
        model: torch.nn.Module,
        way: Way,
        config: Any,
    ) -> Weights | None:
        """Have the way ready that `turn_to` began, or go it, as `info` says. Collective over the engine's workers.

        Args:
            info: the version of the other run.
            at: which weights the engine has.
            fitness: where they lie.
            model: the live model.
            way: how plain weights are written.
            config: vLLM's configuration of the engine.

        Returns:
            Which weights it has now; ``None`` if it was only made ready.

        Raises: see `Switch.prepare` and `Switch.commit`.
        """
        switch = self._switch
        assert switch is not None  # noqa: S101 - `turn_to`
        try:
            if not switch.is_ready(info):
                switch.prepare(info, at, fitness)
            if info.action == "prepare_switch":
                return None
            gone_to = switch.commit(info, fitness, model, way, config)
        except NotStaged:
            raise  # the stager of the other run goes on
        except BaseException:
            self.drop_switch()
            raise
        switch.old.close()
        self.handoff, self.sync_dir, self._switch = switch.new, switch.sync_dir, None
        self.handoff.set_version(gone_to.version)
        self.handoff.release()
        logger.info("went over to run=%s version=%d", gone_to.run_id, gone_to.version)
        return gone_to

    def drop_switch(self) -> None:
        """Forget the way to another run. Nothing happens if there is none."""
        switch, self._switch = self._switch, None
        if switch is not None:
            switch.new.close()

    def close(self) -> None:
        """Let go of every stager. Nothing happens the second time."""
        self.drop_switch()
        if self.handoff is not None:
            self.handoff.close()
            self.handoff = None

    def _tie(self, sync_dir: str, fitness: Fitness, *, timeout_s: float | None) -> Handoff:
        return Handoff(
            StagerConfig(sync_dir=sync_dir, checkpoint=str(self._folder), cache_bytes=self.info.cache_bytes),
            Path(self.info.stage_dir) if self.info.stage_dir else default_stage_root(),
            fitness.plan.places,
            timeout_s=timeout_s,
            needs_mirror=bool(fitness.reload.modules),
            needs_absolute=fitness.plan.loses_bits(fitness.specs),
        )
