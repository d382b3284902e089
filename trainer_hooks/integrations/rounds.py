# SPDX-License-Identifier: Apache-2.0
"""One round, as every adapter makes it: publish, and have the engines take the version.

Who does what: a model that every rank has whole (one process, DDP) is published by the first rank alone. Of a sharded
one every rank publishes its own part, so every rank must call. Engines are driven, or waited for, by the first rank.

Invariant: when a round that was given engines returns on the first rank, those engines serve what was published, or it
raises. A trainer that samples from them would otherwise learn from answers of weights that it does not have.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from torch import nn

from trainer_hooks.publication.publication import Fleet, Publication
from trainer_hooks.publisher import DeltaPublisher
from trainer_hooks.sharded_publisher import ShardedPublisher
from vllm_delta_snapshot.errors import SourceError

__all__ = ["FleetResult", "Rounds", "is_sharded"]

logger = logging.getLogger(__name__)


class FleetResult(Protocol):
    """What a fleet reports: a `vllm_delta_snapshot.drive.FleetReport`."""

    def check(self) -> None:
        """Raise if an engine does not serve the version."""
        ...


class Rounds:
    """A publisher, and the engines that follow it. Make it on every rank.

    Args:
        model_or_source: see `DeltaPublisher`.
        sync_dir: the run's folder.
        base: the checkpoint that trainer and engines start from.
        is_first: whether this is the first rank.
        fleet: the engines to bring to each version, a `vllm_delta_snapshot.drive.DeltaSync`; that of
            the first rank is driven.
        samplers: names of engines in follow mode, to wait for instead.
        wait_s: how long to wait for these.
        strict: whether an engine that does not get a version is an error; else it is logged, and catches up later.
        options: the publisher's.

    Raises:
        SourceError: the tensors do not fit the base checkpoint, or the model has adapters (PEFT).
        DeltaSnapshotError: see `DeltaPublisher`.
    """

    def __init__(
        self,
        model_or_source: object,
        *,
        sync_dir: str,
        base: str | Path,
        is_first: bool,
        fleet: Fleet[FleetResult] | None = None,
        samplers: Sequence[str] = (),
        wait_s: float = 600.0,
        strict: bool = True,
        **options: Any,
    ) -> None:
        _refuse_adapters(model_or_source)
        self._fleet = fleet
        self._samplers = tuple(samplers)
        self._wait_s = wait_s
        self._strict = strict
        self.publisher: DeltaPublisher | ShardedPublisher | None = None
        """This rank's publisher; `None` if it publishes nothing."""
        self._has_engines = fleet is not None or bool(self._samplers)
        if is_sharded(model_or_source):
            sharded = ShardedPublisher(model_or_source, sync_dir=str(sync_dir), base=base, **options)
            self._has_engines = sharded.any_rank(self._has_engines)
            self.publisher = sharded
        elif is_first:
            self.publisher = DeltaPublisher(model_or_source, sync_dir=str(sync_dir), base=base, **options)

    @property
    def version(self) -> int | None:
        """The newest version, where this rank publishes."""
        return None if self.publisher is None else self.publisher.version

    def publish(self, *, step: int | None = None, metrics: Mapping[str, float] | None = None) -> Publication | None:
        """Publish, and have the engines take it. Call it on every rank; blocks where there are engines.

        Args:
            step: the optimizer step, recorded with the version.
            metrics: finite numbers to record beside it.

        Returns:
            The publication; ``None`` on a rank that publishes nothing.

        Raises:
            ApplyError: an engine does not serve the version, and `strict` says that it must.
            StageError: a sampler in follow mode did not get there in time.
            DeltaSnapshotError: see `DeltaPublisher.publish`.
        """
        publisher = self.publisher
        if publisher is None:
            return None
        publication = publisher.publish(step=step, metrics=metrics)
        if not self._has_engines:
            return publication
        if isinstance(publisher, ShardedPublisher):
            publisher.then(publication, self._bring_engines)
        else:
            publication.wait()
            self._bring_engines()
        return publication

    def close(self) -> None:
        """End with the last weights published, and let go of the run. Blocks. May be repeated.

        Raises:
            DeltaSnapshotError: they could not be published (see `DeltaPublisher.close`).
        """
        self.__exit__(None, None, None)

    def release(self) -> None:
        """Let go of the run without another look at the weights, on this rank alone. Blocks. May be repeated.

        Where every round was given engines nothing is left to publish, and frameworks end their first rank alone.

        Raises:
            DeltaSnapshotError: see `DeltaPublisher.close`.
        """
        if self.publisher is not None:
            self.publisher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.publisher is not None:
            self.publisher.__exit__(kind, error, trace)

    def _bring_engines(self) -> None:
        publisher = self.publisher
        assert publisher is not None  # noqa: S101 - called by ranks that publish
        if self._fleet is None and not self._samplers:
            raise SourceError("the first rank has no engines to bring to the version, another one has")
        if self._samplers:
            publisher.wait_applied(self._samplers, timeout_s=self._wait_s)
        if self._fleet is not None:
            report = self._fleet.sync(publisher.version, run_id=publisher.run_id, state_digest=publisher.state_digest)
            if self._strict:
                report.check()


def is_sharded(model_or_source: object) -> bool:
    """Say whether this rank has only a part of a model: FSDP2 and tensor parallel (`DTensor`), FSDP1, or ZeRO-3."""
    if not isinstance(model_or_source, nn.Module):
        return False
    if any(type(inner).__name__ == "FullyShardedDataParallel" for inner in model_or_source.modules()):
        return True
    return any(hasattr(p, "placements") or hasattr(p, "ds_shape") for p in model_or_source.parameters())


def _refuse_adapters(model_or_source: object) -> None:
    if isinstance(model_or_source, nn.Module) and hasattr(model_or_source, "peft_config"):
        raise SourceError(
            "the model has PEFT adapters, whose weights are in no checkpoint",
            found=type(model_or_source).__name__,
            hint="Train the full weights, or let vLLM load the adapter itself: it is small enough.",
        )
