# SPDX-License-Identifier: Apache-2.0
"""One update of one worker, all or nothing.

`prepare` makes every check that can fail and gathers the old values; it writes nothing and needs no pause. `commit`
writes, reads back, and on any failure, here or on another worker, puts the old values back bit for bit. If even that
fails the weights are uncertain, and this worker must never serve again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.engine.agree import agree, gather_from_workers
from vllm_delta_snapshot.engine.plan.belongings import address_of, same_bits
from vllm_delta_snapshot.engine.plan.moving import refuse_asleep, refuse_moving
from vllm_delta_snapshot.engine.threads import run_each
from vllm_delta_snapshot.engine.ways import Way
from vllm_delta_snapshot.engine.write.apply import apply
from vllm_delta_snapshot.engine.write.fitness import Fitness
from vllm_delta_snapshot.engine.write.lanes import LiveLane, RunDigest, digest_runs, ready_lanes, seem_old, undo_lanes
from vllm_delta_snapshot.engine.write.reload import LayerBackup, reload_layers
from vllm_delta_snapshot.engine.write.updates import Update
from vllm_delta_snapshot.engine.write.verify import sum_over_workers, verify_moves, verify_old
from vllm_delta_snapshot.errors import ApplyError, TensorRefused, WeightsUncertain

__all__ = ["PreparedUpdate", "prepare"]


@dataclass(frozen=True, slots=True, eq=False)
class PreparedUpdate:
    """An update that only has to be written.

    Attributes:
        update: what it is.
        fitness: where this worker holds the tensors.
        lanes: what is written, and what was there.
        layers: what is reloaded, and what was there.
        derived: by layer, the tensors that are computed again, each with a copy of what was there.
        proven: of how many tensors the values before were proven to be the published ones.
        is_processed: whether some worker reloads layers or computes tensors again.
    """

    update: Update
    fitness: Fitness
    lanes: Sequence[LiveLane]
    layers: LayerBackup
    derived: Mapping[str, Sequence[tuple[torch.Tensor, torch.Tensor]]]
    proven: int
    is_processed: bool

    def commit(self, model: torch.nn.Module, way: Way, config: Any = None) -> None:
        """Write and read back. Collective over the engine's workers; generation must be paused.

        Args:
            model: the live model.
            way: how plain weights are written.
            config: vLLM's configuration of the engine.

        Raises:
            ApplyError: this worker or another failed; all have their old weights.
            WeightsUncertain: this worker or another could not put its old weights back.
        """
        failure: BaseException | None = None
        is_written = False
        try:
            refuse_moving(config)
            if not (self.fitness.plan.is_current(model) and seem_old(self.lanes)):
                raise ApplyError("live weights were changed since this update was prepared", hint="Ask again.")
            is_written = True
            apply(model, self.lanes, self.update, way)
            content = self._content()
        except BaseException as error:  # noqa: BLE001 - whatever it was, the other workers must hear of it
            failure = error
        try:
            if self.is_processed:
                agree(failure)  # what follows may have collectives of vLLM's: nobody begins it alone
                try:
                    self._process(model, content, config)
                except BaseException as error:  # noqa: BLE001 - the same
                    failure = error
            if failure is None and not self.fitness.plan.is_current(model):
                failure = ApplyError("an update put weights elsewhere, where no captured graph reads them")
            agree(failure)
        except BaseException as error:
            is_old = not is_written or self.undo(model)
            if not all(gather_from_workers(is_old)):
                raise WeightsUncertain(
                    "an update failed and a worker could not put its old weights back",
                    found=error,
                    hint="Do not resume this engine: restart it; it catches up by itself.",
                ) from error
            raise

    def _content(self) -> dict[str, Bits]:
        """Have at hand what layers are reloaded from."""
        tensors = self.fitness.reload.tensors
        names = dict.fromkeys(name for layer in self.layers.modules for name in tensors[layer])
        return {name: self.update.mirror_bits(name) for name in names}

    def _process(self, model: torch.nn.Module, content: Mapping[str, Bits], config: Any) -> None:
        layers = list(self.layers.modules)
        if layers:
            reload_layers(model, self.fitness.reload, layers, self.fitness.specs, content.__getitem__, config)
        self.fitness.derived.recompute(self.derived, config)

    def undo(self, model: torch.nn.Module) -> bool:
        """Put the old values back, on this worker; say whether they are."""
        with contextlib.suppress(Exception), torch.no_grad():
            is_old = self.layers.restore()
            for tensor, copy in chain.from_iterable(self.derived.values()):
                tensor.data.copy_(copy)
                is_old = is_old and same_bits(tensor, copy)
            return undo_lanes(self.lanes) and is_old and self.fitness.plan.is_current(model)
        return False


def prepare(fitness: Fitness, update: Update) -> PreparedUpdate:
    """Check an update against this engine, and gather what it will replace. Writes nothing.

    Collective over the engine's workers.

    Args:
        fitness: what this worker can take.
        update: the update, mapped for this worker.

    Raises:
        TensorRefused: a tensor is unknown, or has no exact place.
        BaseMismatch: live values are not the ones that the update starts from, or differences do not lead to the
            published ones.
        DeltaSnapshotError: another worker found one of these.
    """
    failure: BaseException | None = None
    lanes: list[LiveLane] = []
    layers = fitness.reload.backup(())
    derived: Mapping[str, Sequence[tuple[torch.Tensor, torch.Tensor]]] = {}
    digests: tuple[list[RunDigest], list[RunDigest]] = ([], [])
    try:
        refuse_asleep()
        _check_names(fitness, update)
        lanes = ready_lanes(fitness.plan, update.lanes)
        touched = fitness.reload.touched(update.changed)
        layers = fitness.reload.backup(touched)
        changed = [*(tensor for tensor, _ in layers.tensors), *(lane.flat for lane in lanes)]
        derived = fitness.derived.backup(fitness.derived.touched(map(address_of, changed)))
        if update.old_digests:
            old = run_each(lambda lane: digest_runs(fitness.plan, lane), lanes)
            new = run_each(lambda lane: digest_runs(fitness.plan, lane, is_new=True), lanes if update.moves else [])
            digests = (list(chain.from_iterable(old)), list(chain.from_iterable(new)))
    except BaseException as error:  # noqa: BLE001 - the other workers must not wait for this one
        failure = error
    agree(failure, bool(update.moves))  # an update may be staged anew, absolute, between two workers' looks at it
    written = {name for name, choice in fitness.choices.items() if choice.way in ("scatter", "loader")}
    served = [name for name in update.old_digests if name in written and update.changed[name]]
    of_workers = gather_from_workers((*digests, bool(layers.modules or derived)))
    before = sum_over_workers([old for old, _, _ in of_workers])
    proven = verify_old(before, {name: update.old_digests[name] for name in served})
    if update.moves:
        after = sum_over_workers([new for _, new, _ in of_workers])
        # Also of tensors in which nothing changes after all: their digests must not move either.
        proven |= verify_moves(before, after, {name: move for name, move in update.moves.items() if name in written})
    is_processed = any(processed for _, _, processed in of_workers)
    return PreparedUpdate(update, fitness, lanes, layers, derived, len(proven), is_processed)


def _check_names(fitness: Fitness, update: Update) -> None:
    for name in update.changed:
        if name in fitness.skipped:
            continue
        if name not in fitness.specs:
            raise TensorRefused(
                "the update has a tensor that this engine does not have",
                tensor=name,
                hint="Trainer and engine must start from the same checkpoint.",
            )
        if name in fitness.plan.problems:
            raise TensorRefused("the tensor cannot be patched", tensor=name, found=fitness.plan.problems[name])
