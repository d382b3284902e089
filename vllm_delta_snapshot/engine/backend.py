# SPDX-License-Identifier: Apache-2.0
"""The `delta_snapshot` backend: vLLM's hooks, and what a worker remembers between them.

Every hook runs in the worker, in all workers at once, and generation stands still meanwhile; so none of them touches
the store. `init` checks fitness and starts following; `update_weights` with ``action="prepare"`` makes all checks
without writing; with ``action="apply"`` it writes; `finish` moves the label. A worker whose weights are uncertain
refuses everything from then on.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from vllm_delta_snapshot.engine.agree import agree
from vllm_delta_snapshot.engine.compat import check_vllm, checkpoint_folder
from vllm_delta_snapshot.engine.following import NO_LINEAGE, Following
from vllm_delta_snapshot.engine.identity import check_identity, check_serves
from vllm_delta_snapshot.engine.known import known_state
from vllm_delta_snapshot.engine.log import logger
from vllm_delta_snapshot.engine.messages import DeltaSnapshotInitInfo, DeltaSnapshotUpdateInfo
from vllm_delta_snapshot.engine.plan.compiled import refuse_moved_weights
from vllm_delta_snapshot.engine.plan.load_plan import LoadPlan, fingerprint_of
from vllm_delta_snapshot.engine.ways import Way, summary_of
from vllm_delta_snapshot.engine.write.fitness import Fitness, check_fitness
from vllm_delta_snapshot.engine.write.full_check import check_all
from vllm_delta_snapshot.engine.write.reload import BitsOf
from vllm_delta_snapshot.engine.write.repair import repair
from vllm_delta_snapshot.engine.write.transaction import PreparedUpdate, prepare
from vllm_delta_snapshot.engine.write.updates import Update, Weights, find_staged, find_update
from vllm_delta_snapshot.errors import NotInitialized, WeightsUncertain
from vllm_delta_snapshot.host.handoff import Handoff

__all__ = ["DeltaSnapshotWeightTransferEngine"]


class DeltaSnapshotWeightTransferEngine(WeightTransferEngine[DeltaSnapshotInitInfo, DeltaSnapshotUpdateInfo]):
    """One worker's end. Built by vLLM after the model is loaded.

    Raises:
        CompatibilityError: this vLLM has no patch loader.
    """

    init_info_cls = DeltaSnapshotInitInfo
    update_info_cls = DeltaSnapshotUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        check_vllm()
        self._as_loaded = fingerprint_of(model)  # vLLM captures graphs later
        self._following: Following | None = None
        self._fitness = Fitness(LoadPlan(), {})
        self._at = Weights("", 0, "")
        # What the weights became by updates; kept over a shutdown, since the weights are kept too.
        self._moved_to: Weights | None = None
        self._way: Way = "scatter"
        self._is_uncertain = False
        self._prepared: PreparedUpdate | None = None
        self._applied: Update | None = None
        if device.type == "cpu":
            logger.info("CPU backend: weights are kept plain, not packed, so that updates reach them")

    @torch.no_grad()
    def init_transfer_engine(self, init_info: DeltaSnapshotInitInfo) -> None:
        """Check what this engine can do, and start following the run. Collective over the engine's workers.

        May be called again, by a trainer that restarted: the engine stays at the version that it has.

        Raises:
            TensorRefused: layers or tensors that cannot be updated exactly; named.
            CompatibilityError: compiled code may hold weights of its own.
            BaseMismatch: the live weights are not the checkpoint's, or the checkpoint is not of this run.
            RunMismatch: the weights are already a version of another run.
            WeightsUncertain: this worker must not serve.
            DeltaSnapshotError: the run, the store or the checkpoint cannot be read.
        """
        self._require_certain()
        started = time.monotonic()
        self._prepared = None
        if self._handoff is not None:
            self._handoff.release()
        folder = checkpoint_folder(self.model_config, self.vllm_config.load_config, init_info.checkpoint)
        fitness = check_fitness(
            self.model,
            folder,
            init_info.skip,
            way=init_info.apply,
            are_weights_as_loaded=self._moved_to is None,
            has_mirror=init_info.sync_dir is not None,
            config=self.vllm_config,
        )
        following = Following(init_info, folder)
        failure: BaseException | None = None
        at = self._at
        try:
            at = following.join(fitness, self._moved_to)
        except BaseException as error:  # noqa: BLE001 - the other workers must not wait for this one
            failure = error
        try:
            agree(failure, at)
        except BaseException:
            following.close()  # what was followed before still is
            raise
        self.shutdown()
        self._following, self._fitness, self._way, self._at = following, fitness, init_info.apply, at
        logger.info(
            "initialized run=%s version=%d tensors=%d %s seconds=%.3f",
            self._at.run_id or None,
            self._at.version,
            len(self._fitness.specs),
            summary_of(self._fitness.choices),
            time.monotonic() - started,
        )

    def start_weight_update(self) -> None:
        """Begin an update. Returns at once.

        Raises:
            WeightsUncertain: this worker must not serve.
            NotInitialized: see there.
        """
        self._require_certain()
        self._require_ready()
        self._take_over_applied()

    @torch.no_grad()
    def receive_weights(self, update_info: DeltaSnapshotUpdateInfo) -> None:
        """Prepare or apply an update, or answer whether this worker may serve. Collective over the engine's workers.

        Raises:
            NotStaged: the version is not there (for ``prepare`` at once, for ``apply`` after the time-out).
            OutOfOrder: the engine is past that version.
            DeltaSnapshotError: a check failed; no weight was written.
            WeightsUncertain: this worker must not serve.
        """
        self._require_certain()
        self._require_ready()
        if update_info.action == "check":
            return
        if update_info.action in ("staged", "confirm"):
            self._ask(update_info)
            return
        if update_info.action == "verify":
            self._verify(update_info)
            return
        if update_info.action in ("prepare_switch", "switch"):
            self._go_over(update_info)
            return
        if update_info.action in ("prepare_repair", "repair"):
            self._repair(update_info)
            return
        self._prepare(update_info)
        if update_info.action == "apply":
            self._apply()

    def finish_weight_update(self) -> None:
        """Move this worker's version to what was applied. Does nothing if nothing was.

        Raises:
            WeightsUncertain: this worker must not serve.
        """
        self._require_certain()
        self._take_over_applied()

    def shutdown(self) -> None:
        """Let go of the stager. Nothing happens the second time."""
        if self._following is not None:
            self._following.close()
            self._following = None
        self._prepared = None

    @property
    def _handoff(self) -> Handoff | None:
        return None if self._following is None else self._following.handoff

    @property
    def _stage_timeout_s(self) -> float:
        return 0.0 if self._following is None else self._following.info.stage_timeout_s

    def _take_over_applied(self) -> None:
        """Be at the version that was applied, also if nobody said that the update is finished: the weights are."""
        applied, self._applied = self._applied, None
        if self._handoff is not None and self._prepared is None:
            self._handoff.release()
        if applied is None:
            return
        if applied.version is None:
            self._moved_to = NO_LINEAGE
            return
        self._at = self._moved_to = Weights(self._at.run_id, applied.version, applied.state_digest)
        if self._handoff is not None:
            self._handoff.set_version(applied.version)

    def _go_over(self, info: DeltaSnapshotUpdateInfo) -> None:
        """Have the way to another run ready, or go it."""
        following = self._following
        assert following is not None  # noqa: S101 - `_require_ready`
        self._prepared = None
        failure: BaseException | None = None
        try:
            self._refresh()
            following.turn_to(str(info.sync_dir), self._fitness)
        except BaseException as error:  # noqa: BLE001 - the other workers must not wait for this one
            failure = error
        agree(failure, self._at)
        try:
            gone_to = following.go_over(info, self._at, self._fitness, self.model, self._way, self.vllm_config)
        except WeightsUncertain:
            self._is_uncertain = True
            raise
        if gone_to is not None:
            self._at = self._moved_to = gone_to

    def _prepare(self, update_info: DeltaSnapshotUpdateInfo) -> None:
        """Have the update ready to be written; do nothing if it is, or if there is nothing to write."""
        failure: BaseException | None = None
        update: Update | None = None
        try:
            self._check_identity(update_info)
            if not self._is_prepared(update_info):
                self._prepared = None
                self._refresh()
                update = find_update(
                    update_info, self._handoff, self._at, self._fitness, stage_timeout_s=self._stage_timeout_s
                )
        except BaseException as error:  # noqa: BLE001 - the other workers must not wait for this one
            failure = error
        agree(failure, (self._at, self._prepared is None, update is None))
        if update is not None:
            self._prepared = prepare(self._fitness, update)

    def _is_prepared(self, asked: DeltaSnapshotUpdateInfo) -> bool:
        if self._prepared is None or asked.version is None:
            return False
        ready = self._prepared.update
        return ready.version == asked.version and asked.digest in (None, ready.state_digest)

    def _ask(self, update_info: DeltaSnapshotUpdateInfo) -> None:
        """Fail if a version is not staged, or is not the one served; a worker that asks loses microseconds."""
        failure: BaseException | None = None
        try:
            self._check_identity(update_info)
            if update_info.action == "confirm":
                check_serves(update_info, self._at)
            elif update_info.version != self._at.version:
                find_staged(update_info, self._handoff, self._at)
        except BaseException as error:  # noqa: BLE001 - the other workers must not wait for this one
            failure = error
        agree(failure, self._at)

    def _refresh(self) -> None:
        """Find weights again that were re-created, by sleeping or by a reload."""
        fitness = self._fitness.refreshed(self.model, self.vllm_config)
        if fitness is not self._fitness:
            self._fitness = fitness
            if self._handoff is not None:
                self._handoff.set_places(fitness.plan.places)

    def _apply(self) -> None:
        if self._prepared is None:
            logger.info("nothing to apply version=%d", self._at.version)
            return
        started = time.monotonic()
        prepared, self._prepared = self._prepared, None
        try:
            prepared.commit(self.model, self._way, self.vllm_config)
        except WeightsUncertain:
            self._is_uncertain = True
            raise
        update = self._applied = prepared.update
        logger.info(
            "applied version=%s changed=%d tensors=%d proven=%d seconds=%.4f",
            update.version,
            sum(update.changed.values()),
            len(update.changed),
            prepared.proven,
            time.monotonic() - started,
        )

    def _verify(self, update_info: DeltaSnapshotUpdateInfo) -> None:
        """Compare all live weights with a version."""
        started = time.monotonic()
        version = self._own_version() if update_info.version is None else update_info.version
        fitness = self._fitness
        is_mirrored = self._handoff is not None and self._handoff.has_mirror
        needs_mirror = bool(fitness.reload.modules) or (is_mirrored and fitness.plan.loses_bits(fitness.specs))
        with self._known(version, update_info, needs_mirror=needs_mirror) as (expected, bits):
            check_all(self.model, self._fitness, expected, version=version, bits=bits, config=self.vllm_config)
        logger.info("verified version=%d tensors=%d seconds=%.3f", version, len(expected), time.monotonic() - started)

    def _repair(self, update_info: DeltaSnapshotUpdateInfo) -> None:
        """Write over weights that are not those of this engine's version; or only see that it can be done."""
        started = time.monotonic()
        version = self._own_version()
        with self._known(version, update_info, needs_mirror=True) as (expected, bits):
            if update_info.action == "prepare_repair" or bits is None:
                return
            try:
                wrong = repair(self.model, self._fitness, expected, bits=bits, config=self.vllm_config)
            except WeightsUncertain:
                self._is_uncertain = True
                raise
        logger.warning(
            "repaired version=%d differed=%d seconds=%.3f: %s",
            version,
            len(wrong),
            time.monotonic() - started,
            "; ".join(wrong[:5]),
        )

    def _own_version(self) -> int:
        self._take_over_applied()
        return self._at.version

    def _known(
        self, version: int, update_info: DeltaSnapshotUpdateInfo, *, needs_mirror: bool
    ) -> contextlib.AbstractContextManager[tuple[dict[str, str], BitsOf | None]]:
        """Give what the weights must be at a version. Collective: see `known_state`."""

        def check() -> None:
            self._check_identity(update_info)
            self._refresh()

        # An update that was prepared has the mirror held at its version; it may be needed at another.
        self._prepared = None
        timeout_s = self._stage_timeout_s if update_info.timeout_s is None else update_info.timeout_s
        if update_info.action == "prepare_repair":
            timeout_s = 0.0
        return known_state(
            self._handoff, self._at, version, needs_mirror=needs_mirror, timeout_s=timeout_s, check=check
        )

    def _check_identity(self, update_info: DeltaSnapshotUpdateInfo) -> None:
        check_identity(update_info, self._at, sync_dir="" if self._following is None else self._following.sync_dir)

    def _require_certain(self) -> None:
        if self._is_uncertain:
            raise WeightsUncertain(
                "an earlier update failed half-way and could not be undone",
                hint="Do not resume this engine: restart it; it catches up by itself.",
            )
        refuse_moved_weights(self.vllm_config, self.model, self._as_loaded)

    def _require_ready(self) -> None:
        if self._following is None:
            raise NotInitialized(
                "the weight transfer engine is not initialized",
                hint='Call init_weight_transfer_engine with {"sync_dir": ...} first.',
            )
