"""A tiny trainer and the runs it publishes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import xxhash

from tests.support.checkpoints import TINY_SPECS, tiny_tensors, write_checkpoint
from tests.support.tensors import bits_of, random_bits, rng_of
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.format.version import VersionRecord
from vllm_delta_snapshot.run_folder import RunFolder
from vllm_delta_snapshot.stage.decode import decode
from vllm_delta_snapshot.stage.fetch import fetch
from vllm_delta_snapshot.store.posix import PosixStore
from vllm_delta_snapshot.types import TensorPatch, TensorSpec

State = dict[str, Bits]
"""The bits of every tensor at one version."""


class TinyTrainer:
    """Weights that change at random: a few elements a step, to any bit patterns."""

    def __init__(self, seed: object = 0) -> None:
        self.seed = seed
        self.weights = tiny_tensors(seed)

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the pairs: what a publisher takes as its source."""
        yield from self.weights.items()

    def step(self, number: int) -> None:
        """Change about a tenth of every second tensor, and the scalar."""
        for place, spec in enumerate(TINY_SPECS):
            if spec.numel and (place + number) % 2 == 0:
                count = max(1, spec.numel // 10)
                positions = rng_of(self.seed, number, place).choice(spec.numel, count, replace=False)
                self.poke(spec.name, positions, random_bits(spec.dtype, count, self.seed, number, place))

    def poke(self, name: str, positions: np.ndarray, values: Bits) -> None:
        """Write bit patterns."""
        tensor = self.weights[name]
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        flat = tensor.reshape(-1).view(integer).numpy().view(values.dtype)
        flat[positions] = values

    def state(self) -> State:
        """Return a copy of the bits."""
        return {name: bits_of(tensor) for name, tensor in self.weights.items()}


@dataclass
class TinyRun:
    """A run of a `TinyTrainer`, with the state at every version."""

    base: Path
    sync_dir: Path
    trainer: TinyTrainer
    publisher: DeltaPublisher
    history: list[State] = field(default_factory=list)

    @property
    def folder(self) -> RunFolder:
        """A fresh reader."""
        return RunFolder(PosixStore(self.sync_dir))

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """The table of tensors."""
        return dict(self.folder.read_run().specs())

    def record(self, version: int) -> VersionRecord:
        """Return a version's record."""
        return self.folder.read_version(version)

    def metadata(self, version: int) -> DeltaMetadata:
        """Return a version's metadata."""
        return self.folder.read_metadata(self.record(version))

    def payload(self, version: int) -> Path:
        """Return the first payload file of a version, in the store."""
        return self.sync_dir / self.record(version).folder / self.metadata(version).files[0].name

    def patches(self, version: int, local: Path) -> list[TensorPatch]:
        """Fetch and decode a version by way of `local`."""
        metadata = self.metadata(version)
        fetch(PosixStore(self.sync_dir), self.record(version), metadata, local)
        return decode(metadata, local, self.specs)


def make_run(folder: Path, versions: int = 3, *, seed: object = 0, max_file_bytes: int | None = None) -> TinyRun:
    """Publish `versions` versions under `folder`."""
    trainer = TinyTrainer(seed)
    base = write_checkpoint(folder / "base", trainer.weights)
    limits = {} if max_file_bytes is None else {"max_file_bytes": max_file_bytes}
    publisher = DeltaPublisher(trainer, sync_dir=str(folder / "run"), base=base, **limits)
    run = TinyRun(base, folder / "run", trainer, publisher, [trainer.state()])
    for number in range(1, versions + 1):
        trainer.step(number)
        publisher.publish()
        run.history.append(trainer.state())
    return run


def replay(sync_dir: Path, base: Path, scratch: Path) -> list[State]:
    """Rebuild the state at every version, each delta applied by hand; the reader knows nothing of the trainer."""
    folder = RunFolder(PosixStore(sync_dir))
    checkpoint = Checkpoint(base)
    states = [{spec.name: np.array(bits) for spec, bits in checkpoint.items()}]
    for version in folder.versions():
        record = folder.read_version(version)
        metadata = folder.read_metadata(record)
        local = scratch / f"replay-{version}"
        fetch(folder.store, record, metadata, local)
        state = {name: bits.copy() for name, bits in states[-1].items()}
        for patch in decode(metadata, local, folder.read_run().specs()):
            state[patch.spec.name][patch.positions] = patch.values
        states.append(state)
    return states


def assert_same_state(found: State, expected: State) -> None:
    """Compare two states bit for bit."""
    assert found.keys() == expected.keys()
    wrong = [name for name in expected if found[name].tolist() != expected[name].tolist()]
    assert wrong == []


def copy_of(run: TinyRun, folder: Path) -> TinyRun:
    """Return the same run with a sync_dir of its own, to be damaged."""
    shutil.copytree(run.sync_dir, folder)
    return replace(run, sync_dir=folder)


def edit_record(run: TinyRun, version: int, /, **changes: object) -> None:
    """Change fields of a version's record in place, as no honest writer would."""
    path = run.sync_dir / "versions" / f"{version:08d}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_metadata(run: TinyRun, version: int, /, **changes: object) -> None:
    """Change fields of a version's metadata, and pin the new bytes in its record."""
    record = json.loads((run.sync_dir / "versions" / f"{version:08d}.json").read_text())
    path = run.sync_dir / record["folder"] / "metadata.json"
    data = json.dumps(json.loads(path.read_text()) | changes).encode()
    path.write_bytes(data)
    edit_record(run, version, metadata_bytes=len(data), metadata_xxh3_128=xxhash.xxh3_128_hexdigest(data))
