# SPDX-License-Identifier: Apache-2.0
"""TRL: trainers that sample from a vLLM server send it deltas instead of whole weights.

::

    fleet = DeltaSync(["http://127.0.0.1:8000"], sync_dir="/shared/run-1")
    with use_delta_sync(sync_dir="/shared/run-1", base="/models/base", fleet=fleet):
        trainer = GRPOTrainer(..., args=GRPOConfig(use_vllm=True, vllm_mode="server", ...))
    trainer.train()

TRL has no setting for this. Its trainers make a `VLLMGeneration`, whose `sync_weights` they call on every rank before
they sample with new weights; `use_delta_sync` has the trainers that are built inside it make ours. No NCCL group is
formed. `DeltaWeightTransfer` is for the experimental asynchronous trainer, which does have a setting.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient

from trainer_hooks.integrations.rounds import FleetResult, Rounds
from trainer_hooks.publication.publication import Fleet
from vllm_delta_snapshot.errors import SourceError

__all__ = ["DeltaWeightTransfer", "use_delta_sync"]


@contextlib.contextmanager
def use_delta_sync(
    *,
    sync_dir: str,
    base: str | Path,
    fleet: Fleet[FleetResult] | None = None,
    samplers: Sequence[str] = (),
    **options: Any,
) -> Iterator[None]:
    """Have TRL's trainers that are built inside send deltas to their vLLM server. Use it on every rank.

    For `GRPOTrainer`, `RLOOTrainer` and others of TRL with ``use_vllm=True, vllm_mode="server"``. The server runs with
    the `delta_snapshot` backend. The run is opened at the first sync, when the model is as it will be trained.

    Args:
        sync_dir: the run's folder: ``/path``, ``s3://bucket/prefix`` or ``gs://bucket/prefix``.
        base: the checkpoint that trainer and server start from.
        fleet: all servers that the trainer samples from, a `vllm_delta_snapshot.drive.DeltaSync`.
        samplers: names of servers in follow mode, to wait for instead.
        options: those of `Rounds` and of `DeltaPublisher`.

    Raises:
        SourceError: there is neither a fleet nor a sampler; the trainer would sample from weights that never change.
    """
    settings = _settings(sync_dir, base, fleet, samplers, options)
    original = vllm_generation.VLLMGeneration
    ours = _generation_class(original, settings)
    # TRL's trainers read the name from their own module; the experimental ones import it when they are built.
    homes = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("trl.") and vars(module).get("VLLMGeneration") is original
    ]
    for home in homes:
        vars(home)["VLLMGeneration"] = ours
    try:
        yield
    finally:
        for home in homes:
            vars(home)["VLLMGeneration"] = original


class DeltaWeightTransfer:
    """What the experimental `AsyncGRPOTrainer` takes as `weight_transfer`. Make it on every rank.

    ::

        transfer = DeltaWeightTransfer(sync_dir=..., base=..., fleet=DeltaSync([url], sync_dir=...))
        trainer = AsyncGRPOTrainer(..., weight_transfer=transfer)
        transfer.attach(trainer)

    TRL offers full tensors under the names that they have in the module, gathered one by one where the model is
    sharded; they are not asked for: the model is read, under checkpoint names, and of a sharded one every rank
    publishes its own part. Pausing and resuming is the fleet's, and shorter than TRL's: a version is staged before it.

    Args:
        sync_dir: the run's folder.
        base: the checkpoint that trainer and servers start from.
        fleet: the servers, a `vllm_delta_snapshot.drive.DeltaSync`.
        samplers: names of servers in follow mode, to wait for instead.
        options: those of `Rounds` and of `DeltaPublisher`.

    Raises:
        SourceError: there is neither a fleet nor a sampler.
    """

    def __init__(
        self,
        *,
        sync_dir: str,
        base: str | Path,
        fleet: Fleet[FleetResult] | None = None,
        samplers: Sequence[str] = (),
        **options: Any,
    ) -> None:
        self._settings = _settings(sync_dir, base, fleet, samplers, options)
        self._trainer: Any = None
        self._rounds: Rounds | None = None

    def attach(self, trainer: Any) -> None:
        """Say which trainer this is for, on every rank, before it trains: the trainer exists after this object.

        Raises:
            SourceError: it is no trainer that hands weights over as TRL 1.16's does.
        """
        if not callable(getattr(trainer, "_streaming_iter", None)):
            raise SourceError(
                "this is no asynchronous trainer of TRL as it is known",
                expected="an AsyncGRPOTrainer, TRL 1.16",
                found=type(trainer).__name__,
                hint="Publish with DeltaSnapshotCallback or DeltaPublisher instead.",
            )
        self._trainer = trainer
        # Iterated on all ranks: what TRL gathers is read by nobody, and this is where the other ranks join in.
        trainer._streaming_iter = self._join

    @property
    def version(self) -> int | None:
        """The newest version, once training has begun, on ranks that publish."""
        return None if self._rounds is None else self._rounds.version

    def init_weight_transfer(self) -> None:
        """Do nothing but check; the run is opened by the first weights, when all ranks are called.

        Raises:
            SourceError: no trainer was attached.
        """
        if self._trainer is None:
            raise SourceError("no model to publish", hint="Call attach(trainer) on every rank before trainer.train().")

    def pause(self) -> None:
        """Do nothing: generation goes on until the version is staged."""

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Publish, and bring the servers there. Blocks; TRL calls it on the first rank, and iterates on the others.

        Raises:
            SourceError: no trainer was attached.
            DeltaSnapshotError: see `Rounds.publish`.
        """
        self.init_weight_transfer()
        del iterator
        self._publish()

    def resume(self) -> None:
        """Do nothing: the servers were resumed when they had the version."""

    def destroy(self) -> None:
        """Let go of the run. TRL calls it on the first rank; it is the end of the training."""
        if self._rounds is not None:
            self._rounds.release()

    def _join(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Take a rank's part where TRL would gather, and yield nothing."""
        self._publish()
        yield from ()

    def _publish(self) -> None:
        if self._rounds is None:
            accelerator = self._trainer.accelerator
            model = accelerator.unwrap_model(self._trainer.model)
            self._rounds = Rounds(model, is_first=accelerator.is_main_process, **self._settings)
        self._rounds.publish()


def _settings(
    sync_dir: str,
    base: str | Path,
    fleet: Fleet[FleetResult] | None,
    samplers: Sequence[str],
    options: dict[str, Any],
) -> dict[str, Any]:
    if fleet is None and not samplers:
        raise SourceError(
            "nobody would bring the server to what is trained",
            hint="Give fleet=DeltaSync([url]), or the names of samplers in follow mode.",
        )
    return {"sync_dir": sync_dir, "base": base, "fleet": fleet, "samplers": samplers, **options}


def _generation_class(original: type[Any], settings: dict[str, Any]) -> type[Any]:
    class DeltaGeneration(original):
        """`VLLMGeneration`, of which only what concerns weights is replaced."""

        _rounds: Rounds | None = None

        @property
        def version(self) -> int | None:
            """The newest version, on ranks that publish."""
            return None if self._rounds is None else self._rounds.version

        def _init_vllm(self) -> None:
            if self.mode != "server":
                raise SourceError(
                    "weights are sent as deltas to a server", expected='vllm_mode="server"', found=self.mode
                )
            if self.accelerator.is_main_process:
                url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
                self.vllm_client = VLLMClient(base_url=url, connection_timeout=self.server_timeout)
            self.accelerator.wait_for_everyone()

        def sync_weights(self) -> None:
            """Publish, and bring the servers there. Blocks; called on every rank."""
            if self._rounds is None:
                self._rounds = Rounds(self.model, is_first=self.accelerator.is_main_process, **settings)
            self._rounds.publish()

    return DeltaGeneration
