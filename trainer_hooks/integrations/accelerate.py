# SPDX-License-Identifier: Apache-2.0
"""Accelerate: the publisher in a training loop of one's own, on every rank.

::

    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    with AcceleratePublisher(accelerator, model, sync_dir="/shared/run-1", base="/models/base") as weights:
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            weights.step()

Mixed precision trains fp32 masters; what is published is these, cast to the types of the base checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from accelerate import Accelerator
from torch import nn

from trainer_hooks.integrations.rounds import FleetResult, Rounds
from trainer_hooks.publication.hook import check_every
from trainer_hooks.publication.publication import Fleet, Publication

__all__ = ["AcceleratePublisher"]


class AcceleratePublisher:
    """Publishes a prepared model every `every` optimizer steps. Make it on every rank, after `accelerator.prepare`.

    Args:
        accelerator: the accelerator.
        model: the model, as `prepare` returned it.
        sync_dir: the run's folder: ``/path``, ``s3://bucket/prefix`` or ``gs://bucket/prefix``.
        base: the checkpoint that trainer and engines start from.
        every: how many optimizer steps lie between two versions.
        fleet: engines to bring to each version, a `vllm_delta_snapshot.drive.DeltaSync`.
        samplers: names of engines in follow mode, to wait for instead.
        strict: whether an engine that does not get a version is an error; else it is logged.
        options: `DeltaPublisher`'s.

    Raises:
        ValueError: `every` is less than 1.
        DeltaSnapshotError: see `Rounds`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
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
        self._accelerator = accelerator
        self._every = every
        self._steps = 0
        self._rounds = Rounds(
            # The wrapper that casts what forward returns stays: taking it off would change the model that is trained.
            accelerator.unwrap_model(model, keep_fp32_wrapper=True),
            is_first=accelerator.is_main_process,
            sync_dir=sync_dir,
            base=base,
            fleet=fleet,
            samplers=samplers,
            strict=strict,
            **options,
        )

    @property
    def version(self) -> int | None:
        """The newest version, on ranks that publish."""
        return self._rounds.version

    def step(self, *, metrics: Mapping[str, float] | None = None) -> Publication | None:
        """Say that a batch is done, on every rank. Publishes if it was an optimizer step, and one of those to publish.

        Args:
            metrics: finite numbers to record with the version.

        Returns:
            The publication, if there was one and this rank publishes.

        Raises:
            DeltaSnapshotError: see `Rounds.publish`.
        """
        if not self._accelerator.sync_gradients:  # a micro-batch: the optimizer has not moved
            return None
        self._steps += 1
        if self._steps % self._every:
            return None
        return self._rounds.publish(step=self._steps, metrics=metrics)

    def close(self) -> None:
        """End with the last weights of `step` published, and let go of the run. Blocks. May be repeated.

        Raises:
            DeltaSnapshotError: they could not be published.
        """
        self._rounds.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rounds.__exit__(kind, error, trace)
