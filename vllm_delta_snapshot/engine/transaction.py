# SPDX-License-Identifier: Apache-2.0
"""One update of one worker, all or nothing.

`prepare` makes every check that can fail and gathers the old values; it writes nothing and may run while generation
goes on. `commit` writes, reads back, and on any failure, here or on another worker, puts the old values back bit for
bit. If even that fails the weights are uncertain, and this worker must never serve again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vllm_delta_snapshot.engine.agree import agree, gather_from_workers
from vllm_delta_snapshot.engine.apply import Way, apply
from vllm_delta_snapshot.engine.fitness import Fitness
from vllm_delta_snapshot.engine.live import MappedPatch, map_patch
from vllm_delta_snapshot.engine.load_plan import LoadPlan
from vllm_delta_snapshot.engine.verify import verify_new, verify_old
from vllm_delta_snapshot.errors import ApplyError, TensorRefused, WeightsUncertain
from vllm_delta_snapshot.types import TensorPatch

__all__ = ["PreparedUpdate", "prepare"]


@dataclass(frozen=True, slots=True, eq=False)
class PreparedUpdate:
    """An update that only has to be written.

    Attributes:
        plan: where this worker holds the tensors.
        mapped: the patches that touch this worker.
        old: the live values they replace, place by place.
        compared: how many tensors' old values were proven to be the published ones.
    """

    plan: LoadPlan
    mapped: Sequence[MappedPatch]
    old: Sequence[Sequence[torch.Tensor]]
    compared: int

    def commit(self, model: torch.nn.Module, way: Way) -> None:
        """Write and read back. Collective over the engine's workers; generation must be paused.

        Raises:
            ApplyError: this worker or another failed; all have their old weights.
            WeightsUncertain: this worker or another could not put its old weights back.
        """
        failure: BaseException | None = None
        is_written = False
        try:
            if not (self.plan.is_current(model) and self._is_still_old()):
                raise ApplyError("live weights were changed since this update was prepared", hint="Ask again.")
            is_written = True
            apply(model, self.mapped, way)
            verify_new(self.mapped)
        except BaseException as error:  # noqa: BLE001 - whatever it was, the other workers must hear of it
            failure = error
        try:
            agree(failure)
        except BaseException as error:
            is_old = not is_written or self._undo()
            if not all(gather_from_workers(is_old)):
                raise WeightsUncertain(
                    "an update failed and a worker could not put its old weights back",
                    found=error,
                    hint="Do not resume this engine: restart it; it catches up by itself.",
                ) from error
            raise

    def _is_still_old(self) -> bool:
        return all(
            torch.equal(place.gather(), old)
            for item, values in zip(self.mapped, self.old, strict=True)
            for place, old in zip(item.places, values, strict=True)
        )

    def _undo(self) -> bool:
        """Put the old values back; say whether they are."""
        with contextlib.suppress(Exception):
            for item, values in zip(self.mapped, self.old, strict=True):
                item.write(values)
            return self._is_still_old()
        return False


def prepare(
    fitness: Fitness,
    patches: Sequence[TensorPatch],
    old_digests: Mapping[str, str],
) -> PreparedUpdate:
    """Check an update against this worker, and gather what it will replace. Writes nothing.

    Args:
        fitness: what this worker can take.
        patches: the update.
        old_digests: by name, the digest of the values that a patch starts from; empty if unknown.

    Raises:
        TensorRefused: a tensor is unknown, or has no exact place.
        BaseMismatch: live values are not the ones that the update starts from.
    """
    mapped, gathered, compared = [], [], 0
    for patch in patches:
        name = patch.spec.name
        if name in fitness.skipped:
            continue
        if fitness.specs.get(name) != patch.spec:
            raise TensorRefused(
                "the update has a tensor that this engine does not have",
                tensor=name,
                expected=fitness.specs.get(name, "no such tensor"),
                found=patch.spec,
            )
        if name in fitness.plan.problems:
            raise TensorRefused("the tensor cannot be patched", tensor=name, found=fitness.plan.problems[name])
        item = map_patch(fitness.plan, patch)
        old = item.gather()
        if name in old_digests and verify_old(item, old, old_digests[name]):
            compared += 1
        mapped.append(item)
        gathered.append(old)
    return PreparedUpdate(fitness.plan, mapped, gathered, compared)
