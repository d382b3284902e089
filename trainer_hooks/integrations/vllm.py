# SPDX-License-Identifier: Apache-2.0
"""vLLM's trainer factory: `delta_snapshot` as a trainer engine. The one module of `trainer_hooks` that imports vLLM.

::

    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.plugins import load_general_plugins

    info = DeltaSnapshotTrainerInitInfo(sync_dir="/shared/run-1", base="/models/base", rank=rank)
    engine = WeightTransferTrainerFactory.trainer_init(info, client=DeltaSync([url]), source=ModuleSource(model))
    ...
    engine.send_weights()  # after an optimizer step, on every rank

Importing this module registers the engine. A source that shows its module (vLLM's `ModuleSource`, or any with an
attribute ``module`` or ``model``) is published from the module: under checkpoint names, and with nothing gathered. Of
any other the full tensors are read in one pass, under the names that it gives, which must be the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import ModuleSource, TrainerInitInfo, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.plugins import load_general_plugins

from trainer_hooks.integrations.handshake import ClientFleet, WeightSyncClient
from trainer_hooks.integrations.rounds import FleetResult, Rounds
from trainer_hooks.source import SourceItem
from vllm_delta_snapshot.errors import SourceError
from vllm_delta_snapshot.types import TensorSpec

__all__ = ["DeltaSnapshotTrainerEngine", "DeltaSnapshotTrainerInitInfo", "load_general_plugins", "register"]

BACKEND = "delta_snapshot"


@runtime_checkable
class DrivingClient(Protocol):
    """A client that brings engines to a version by itself: a `vllm_delta_snapshot.drive.DeltaSync`."""

    def init(self) -> FleetResult:
        """Initialize the engines."""
        ...

    def sync(self, version: int, *, run_id: str | None = None, state_digest: str | None = None) -> FleetResult:
        """Bring them to a version."""
        ...


@dataclass
class DeltaSnapshotTrainerInitInfo(TrainerInitInfo):
    """What `WeightTransferTrainerFactory.trainer_init` takes for this backend.

    Attributes:
        rank: this trainer process's; the first drives the engines.
        sync_dir: the run's folder: ``/path``, ``s3://bucket/prefix`` or ``gs://bucket/prefix``.
        base: the checkpoint that trainer and engines start from, a local folder.
        resets_caches: for clients that can do neither: whether the caller pauses generation and resets the prefix cache
            itself around `send_weights`.
        stage_timeout_s: how long a version may take to be staged.
        engine: further fields of the engines' `init_info`.
        publisher: further arguments of `DeltaPublisher`.
    """

    backend: ClassVar[str] = BACKEND

    sync_dir: str
    base: str
    resets_caches: bool = False
    stage_timeout_s: float = 300.0
    engine: dict[str, Any] = field(default_factory=dict)
    publisher: dict[str, Any] = field(default_factory=dict)


class DeltaSnapshotTrainerEngine(TrainerWeightTransferEngine[TrainerInitInfo]):
    """Publishes a source's weights and brings engines there. Made by `trainer_init`, on every rank."""

    init_info_cls = DeltaSnapshotTrainerInitInfo

    _rounds: Rounds
    _pass: _Pass | None
    _fleet: DrivingClient | ClientFleet

    @classmethod
    def trainer_init(
        cls, init_info: TrainerInitInfo, *, client: WeightSyncClient | DrivingClient, source: Any = None
    ) -> Self:
        """Open the run, and have the engines follow it. Called on every rank; the first does both.

        Args:
            init_info: a `DeltaSnapshotTrainerInitInfo`.
            client: a `DeltaSync`, or a client of vLLM's protocol.
            source: a `WeightSource`.

        Raises:
            SourceError: there is no source, or its tensors do not fit the base checkpoint.
            ApplyError: an engine refused, or the client can neither pause nor reset caches.
            DeltaSnapshotError: see `DeltaPublisher`.
        """
        if source is None:
            raise SourceError("there are no weights to publish", expected="source=ModuleSource(model)", found="None")
        info = cls.translate(init_info)
        engine = cls(client=client, source=source, is_sender=info.is_sender)
        engine._open(info, client)
        return engine

    @classmethod
    def translate(cls, init_info: TrainerInitInfo) -> DeltaSnapshotTrainerInitInfo:
        """Return `init_info` as ours; a subclass takes another's.

        Raises:
            TypeError: it is not.
        """
        if not isinstance(init_info, DeltaSnapshotTrainerInitInfo):
            raise TypeError(f"expected a DeltaSnapshotTrainerInitInfo, found a {type(init_info).__name__}")
        return init_info

    def send_weights(self) -> None:
        """Publish, and bring the engines there. Blocks; called on every rank.

        Raises:
            DeltaSnapshotError: see `Rounds.publish`.
        """
        try:
            self._rounds.publish()
        finally:
            if self._pass is not None:
                self._pass.end()

    @property
    def version(self) -> int | None:
        """The newest version, on ranks that publish."""
        return self._rounds.version

    def shutdown(self) -> None:
        """Let go of the run. The engines go on with the version that they have."""
        self._rounds.release()

    def _open(self, info: DeltaSnapshotTrainerInitInfo, client: WeightSyncClient | DrivingClient) -> None:
        module = _module_of(self.source)
        self._pass = None if module is not None else _Pass(self.source)
        if isinstance(client, DrivingClient):
            self._fleet = client
        else:
            self._fleet = ClientFleet(
                client,
                {"sync_dir": info.sync_dir, **info.engine},
                resets_caches=info.resets_caches,
                stage_timeout_s=info.stage_timeout_s,
            )
        self._rounds = Rounds(
            module if module is not None else self._pass,
            sync_dir=info.sync_dir,
            base=info.base,
            is_first=info.is_sender,
            fleet=self._fleet,
            **info.publisher,
        )
        if info.is_sender:
            self._fleet.init().check()


class _Pass:
    """A `WeightSource` as the publisher reads it. Tensors come in one pass, in order; all ranks join in it."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._pairs: Iterator[tuple[str, torch.Tensor]] | None = None

    def items(self, specs: Mapping[str, TensorSpec]) -> Iterator[SourceItem]:
        """See `ParameterSource.items`. Nothing is gathered before the first tensor is asked for."""
        del specs
        metadata = self._source.metadata  # a method up to vLLM 0.32, a property from 0.33 on
        for meta in metadata() if callable(metadata) else metadata:
            yield SourceItem((meta.name,), lambda name=meta.name: (self._next(name),))  # type: ignore[misc]
        if self._pairs is not None and (more := next(self._pairs, None)) is not None:
            raise SourceError("the source yields more than its metadata says", tensor=more[0])

    def end(self) -> None:
        """Read what is left, so that ranks that wait in its collectives go on."""
        for _ in self._begun():
            pass
        self._pairs = None

    def _begun(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._pairs is None:
            iter_full = getattr(self._source, "iter_full", None)  # from vLLM 0.33 on
            self._pairs = iter(self._source) if iter_full is None else iter(iter_full())
        return self._pairs

    def _next(self, name: str) -> tuple[str, torch.Tensor]:
        found = next(self._begun(), None)
        if found is None or found[0] != name:
            raise SourceError("the source does not yield what its metadata says", tensor=name, found=found and found[0])
        return found


def _module_of(source: Any) -> nn.Module | None:
    for name in ("module", "model"):
        module = getattr(source, name, None)
        if isinstance(module, nn.Module):
            return module
    if isinstance(source, ModuleSource):
        module = vars(source).get("_module")  # vLLM's own shows it to nobody
        if isinstance(module, nn.Module):
            return module
    return None


def register(name: str = BACKEND, engine: type[DeltaSnapshotTrainerEngine] = DeltaSnapshotTrainerEngine) -> None:
    """Register a trainer engine with vLLM, in the place of what has its name. Importing this module registers ours."""
    WeightTransferTrainerFactory._registry.pop(name, None)
    WeightTransferTrainerFactory.register_engine(name, engine)


register()
