"""A tiny trainer and the runs it publishes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from tests.support.checkpoints import TINY_SPECS, tiny_tensors, write_checkpoint
from tests.support.tensors import apply_by_hand, bits_of, random_bits, rng_of
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.changes.decode import decode
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.format.choose import Chosen, choose
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.format.version import VersionRecord
from vllm_delta_snapshot.runs.fetch import fetch
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store.posix import PosixStore
from vllm_delta_snapshot.types import Change, TensorSpec

State = dict[str, Bits]
"""The bits of every tensor at one version."""


class TinyTrainer:
    """Weights that change at random: a few elements a step, to any bit patterns or by one unit of the last place.

    So the same tensor is published now as a difference, now as absolute values.
    """

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
                rng = rng_of(self.seed, number, place)
                positions = rng.choice(spec.numel, count, replace=False)
                values = random_bits(spec.dtype, count, self.seed, number, place)
                if (place + number) % 4 == 0:
                    one = np.ones(count, values.dtype)
                    values = bits_of(self.weights[spec.name])[positions] + np.where(rng.random(count) < 0.5, one, -one)
                self.poke(spec.name, positions, values)

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

    def changes(self, version: int, local: Path) -> list[Change]:
        """Fetch and decode a version by way of `local`."""
        metadata = self.metadata(version)
        fetch(PosixStore(self.sync_dir), self.record(version), metadata, local)
        return decode(metadata, local, self.specs)


def make_run(
    folder: Path,
    versions: int = 3,
    *,
    seed: object = 0,
    max_file_bytes: int | None = None,
    encoding: str | None = None,
) -> TinyRun:
    """Publish `versions` versions under `folder`."""
    trainer = TinyTrainer(seed)
    base = write_checkpoint(folder / "base", trainer.weights)
    limits = {} if max_file_bytes is None else {"max_file_bytes": max_file_bytes}
    publisher = DeltaPublisher(
        trainer, sync_dir=str(folder / "run"), base=base, encoding=encoding, **limits, asynchronous=False
    )
    run = TinyRun(base, folder / "run", trainer, publisher, [trainer.state()])
    for number in range(1, versions + 1):
        trainer.step(number)
        publisher.publish()
        run.history.append(trainer.state())
    return run


MIXED = ("difference", "difference", "raw", "auto", "bitmap_difference", "packed", "dense_difference", "dense")
"""Encodings of consecutive versions in which every tensor is changed now by a difference, now absolutely."""


def make_mixed_run(folder: Path, versions: int = len(MIXED)) -> TinyRun:
    """Publish versions in different encodings, each by a publisher that resumes the run."""
    run = make_run(folder, 0)
    for number, encoding in zip(range(1, versions + 1), MIXED, strict=False):
        run.publisher = DeltaPublisher(
            run.trainer, sync_dir=str(run.sync_dir), base=run.base, encoding=encoding, asynchronous=False
        )
        run.trainer.step(number)
        run.publisher.publish()
        run.history.append(run.trainer.state())
    return run


def forge_old_value(run: TinyRun, encoding: str) -> str:
    """Publish one version by a trainer that remembers one element wrong; return the tensor's name."""
    publisher = DeltaPublisher(
        run.trainer, sync_dir=str(run.sync_dir), base=run.base, encoding=encoding, asynchronous=False
    )
    name = TINY_SPECS[0].name
    state = run.trainer.state()[name]
    run.trainer.poke(name, np.array([5]), state[[5]] + np.uint16(1))
    publisher._published.baseline.bits(name)[5] ^= np.uint16(2)
    publisher.publish()
    return name


def forge_difference(run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> str:
    """Publish one version whose payload says another difference than its digests; return the tensor's name."""
    publisher = DeltaPublisher(
        run.trainer, sync_dir=str(run.sync_dir), base=run.base, encoding="difference", asynchronous=False
    )
    name = TINY_SPECS[0].name
    run.trainer.poke(name, np.array([5]), run.trainer.state()[name][[5]] + np.uint16(1))

    def forged(*args: Any) -> Chosen:
        chosen = choose(*args)
        return replace(chosen, change=replace(chosen.change, values=chosen.change.values + np.uint16(1)))

    with monkeypatch.context() as patched:
        patched.setattr("trainer_hooks.publication.whole_writing.choose", forged)
        publisher.publish()
    return name


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
        for change in decode(metadata, local, folder.read_run().specs()):
            state[change.spec.name] = apply_by_hand(state[change.spec.name], change)
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
