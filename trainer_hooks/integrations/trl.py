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
from torch import nn
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient

from trainer_hooks.integrations.rounds import FleetResult, Rounds, is_sharded
from trainer_hooks.publication import Fleet
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
    """What the experimental `AsyncGRPOTrainer` takes as `weight_transfer`. TRL calls it on the first rank only.

    ::

        transfer = DeltaWeightTransfer(sync_dir=..., base=..., fleet=DeltaSync([url], sync_dir=...))
        trainer = AsyncGRPOTrainer(..., weight_transfer=transfer)
        transfer.attach(trainer.model)

    TRL offers full tensors under the names that they have in the module; the model is read instead, under checkpoint
    names. Pausing and resuming is the fleet's, and shorter than TRL's: a version is staged before it.

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
        self._model: nn.Module | None = None
        self._rounds: Rounds | None = None

    def attach(self, model: nn.Module) -> None:
        """Say which model is trained: the trainer makes it from a path, so this comes after the trainer."""
        self._model = model

    @property
    def version(self) -> int | None:
        """The newest version, once training has begun."""
        return None if self._rounds is None else self._rounds.version

    def init_weight_transfer(self) -> None:
        """Open the run.

        Raises:
            SourceError: no model was attached, or it is sharded: its other parts are on ranks that TRL does not call.
            DeltaSnapshotError: see `Rounds`.
        """
        if self._model is None:
            raise SourceError("no model to publish", hint="Call attach(trainer.model) before trainer.train().")
        if is_sharded(self._model):
            raise SourceError(
                "the model is sharded, and TRL's asynchronous trainer hands weights over on the first rank only",
                found=type(self._model).__name__,
                hint="Use GRPOTrainer with use_delta_sync, or train without FSDP.",
            )
        self._rounds = Rounds(self._model, is_first=True, **self._settings)

    def pause(self) -> None:
        """Do nothing: generation goes on until the version is staged."""

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Publish, and bring the servers there. Blocks.

        Raises:
            SourceError: `init_weight_transfer` was not called.
            DeltaSnapshotError: see `Rounds.publish`.
        """
        for _ in iterator:  # the other ranks are in its collectives
            pass
        if self._rounds is None:
            raise SourceError("the run is not open", hint="Call init_weight_transfer() first.")
        self._rounds.publish()

    def resume(self) -> None:
        """Do nothing: the servers were resumed when they had the version."""

    def destroy(self) -> None:
        """Let go of the run."""
        if self._rounds is not None:
            self._rounds.close()


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
