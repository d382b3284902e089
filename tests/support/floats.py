"""Runs of floating point weights only, for what OpenRL's form can hold, in any encoding."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from tests.support.checkpoints import write_checkpoint
from tests.support.runs import State
from tests.support.tensors import random_bits, rng_of, to_torch
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store.posix import PosixStore
from vllm_delta_snapshot.types import TensorSpec

FLOAT_SPECS = (
    TensorSpec("model.embed.weight", (40, 8), "BF16"),
    TensorSpec("model.layers.0.weight", (16, 16), "BF16"),
    TensorSpec("model.layers.0.bias", (9,), "F16"),
    TensorSpec("model.layers.0.fp8", (5, 7), "F8_E4M3"),
    TensorSpec("model.scale", (), "F32"),
    TensorSpec("model.void", (0, 4), "BF16"),
)


@dataclass
class FloatRun:
    """A run of a trainer that moves a few weights by one unit of the last place."""

    base: Path
    sync_dir: Path
    publisher: DeltaPublisher
    history: list[State] = field(default_factory=list)

    @property
    def folder(self) -> RunFolder:
        """A fresh reader."""
        return RunFolder(PosixStore(self.sync_dir))


def make_float_run(folder: Path, encodings: list[str]) -> FloatRun:
    """Publish a version in each encoding, in order."""
    state = {spec.name: random_bits(spec.dtype, spec.numel, spec.name) for spec in FLOAT_SPECS}
    base = write_checkpoint(folder / "base", _tensors(state))
    # The run allows what its first publisher may write: anything.
    publisher = DeltaPublisher(_tensors(state), sync_dir=str(folder / "run"), base=base, threads=1, asynchronous=False)
    run = FloatRun(base, folder / "run", publisher, [_copy(state)])
    for version, encoding in enumerate(encodings, start=1):
        _step(state, version)
        run.publisher = DeltaPublisher(
            _tensors(state), sync_dir=str(run.sync_dir), base=base, encoding=encoding, threads=1, asynchronous=False
        )
        run.publisher.publish(step=version)
        run.history.append(_copy(state))
    return run


def _step(state: State, version: int) -> None:
    for place, spec in enumerate(FLOAT_SPECS):
        if spec.numel and (place + version) % 3:
            rng = rng_of(version, place)
            at = rng.choice(spec.numel, max(1, spec.numel // 8), replace=False)
            one = np.ones(at.size, spec.element.bits)
            state[spec.name][at] += np.where(rng.random(at.size) < 0.5, one, -one)


def _tensors(state: State) -> dict[str, torch.Tensor]:
    return {spec.name: to_torch(state[spec.name], spec) for spec in FLOAT_SPECS}


def _copy(state: State) -> State:
    return {name: bits.copy() for name, bits in state.items()}
