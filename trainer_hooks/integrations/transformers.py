# SPDX-License-Identifier: Apache-2.0
"""transformers: a callback that publishes the model that a `Trainer` trains.

::

    callback = DeltaSnapshotCallback(sync_dir="/shared/run-1", base="/models/base")
    trainer = Trainer(model, args, ..., callbacks=[callback])

It acts when an optimizer step is done and the gradients are gone: once for all micro-batches of an accumulated step. A
step that the optimizer skipped (an fp16 overflow) changes nothing and is published as an empty version, so that steps
and versions keep their distance. Under ZeRO-3 weights change before the optimizer's own events, which are not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trainer_hooks.integrations.rounds import FleetResult, Rounds
from trainer_hooks.publication.hook import check_every
from trainer_hooks.publication.publication import Fleet, Publication

__all__ = ["DeltaSnapshotCallback"]


class DeltaSnapshotCallback(TrainerCallback):
    """Publishes every `every` optimizer steps and once more at the end, and brings engines there.

    Give it to the `Trainer` on every rank. When training begins on a run that has versions already, or from a trainer
    checkpoint, what was loaded is published first. Blocks the step as `DeltaPublisher.publish` does, and with engines
    until they serve the version.

    Args:
        sync_dir: the run's folder: ``/path``, ``s3://bucket/prefix`` or ``gs://bucket/prefix``.
        base: the checkpoint that trainer and engines start from.
        every: how many optimizer steps lie between two versions.
        fleet: engines to bring to each version, a `vllm_delta_snapshot.drive.DeltaSync`.
        samplers: names of engines in follow mode, to wait for instead.
        strict: whether an engine that does not get a version ends the training; else it is logged.
        options: `DeltaPublisher`'s.

    Attributes:
        publication: the newest, on ranks that publish.

    Raises:
        ValueError: `every` is less than 1.
    """

    publication: Publication | None = None

    def __init__(
        self,
        *,
        sync_dir: str,
        base: str | Path,
        every: int = 1,
        fleet: Fleet[FleetResult] | None = None,
        samplers: Sequence[str] = (),
        strict: bool = True,
        **options: Any,
    ) -> None:
        check_every(every)
        self._every = every
        self._settings = {
            "sync_dir": sync_dir,
            "base": base,
            "fleet": fleet,
            "samplers": samplers,
            "strict": strict,
            **options,
        }
        self._rounds: Rounds | None = None
        self._published_step: int | None = None

    @property
    def version(self) -> int | None:
        """The newest version, once training has begun, on ranks that publish."""
        return None if self._rounds is None else self._rounds.version

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the run. The model is whole, wrapped and loaded by now.

        Raises:
            DeltaSnapshotError: see `Rounds`.
        """
        self._rounds = Rounds(kwargs["model"], is_first=state.is_world_process_zero, **self._settings)
        self._published_step = None
        if state.global_step or self._rounds.version:
            self._publish(state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Publish, if this step is one of those.

        Raises:
            DeltaSnapshotError: see `Rounds.publish`.
        """
        if state.global_step % self._every == 0:
            self._publish(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Publish what the model is now, if it has not been, and close.

        Raises:
            DeltaSnapshotError: see `Rounds.publish`.
        """
        if self._rounds is None:
            return
        # `load_best_model_at_end` has just put other weights into the model.
        if self._published_step != state.global_step or args.load_best_model_at_end:
            self._publish(state)
        self._rounds.close()

    def _publish(self, state: TrainerState) -> None:
        if self._rounds is not None:
            self.publication = self._rounds.publish(step=state.global_step)
            self._published_step = state.global_step
