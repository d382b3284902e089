"""Sources that reuse, clear or free what they yielded: what is published is what each tensor was when it came."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.borrowed import EXPORTERS, Pairs, Weights, bucket, one_buffer
from tests.support.checkpoints import write_checkpoint
from tests.support.lanes import LateLanes, LateStream
from tests.support.runs import State, replay
from tests.support.tensors import bits_of, random_bits, to_torch
from trainer_hooks import DeltaPublisher, PartialTensor, ShardedPublisher, SourceItem
from trainer_hooks.compare.device_diff import DeviceDiff
from vllm_delta_snapshot.errors import SourceError
from vllm_delta_snapshot.types import TensorSpec

PIECE = 64
SIZES = {"a": 3, "b": 5 * PIECE + 7, "c": PIECE, "d": 0, "e": 3, "f": 2 * PIECE, "g": 9 * PIECE, "h": 1, "i": 40}
DTYPES = ("BF16", "F32", "F16")
Publisher = DeltaPublisher | ShardedPublisher
Export = Callable[[Weights], Pairs]


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make most tensors larger than what one thread compares at a time."""
    for module in ("diff", "differ", "shard_differ"):
        monkeypatch.setattr(f"trainer_hooks.compare.{module}.PIECE_ELEMENTS", PIECE)
    monkeypatch.setattr("trainer_hooks.compare.diff._OF_THREAD", threading.local())


class Training:
    """Random weights of several sizes and types, that change."""

    def __init__(self, sizes: Mapping[str, int] = SIZES, codes: Sequence[str] = DTYPES) -> None:
        self.weights = {
            name: to_torch(random_bits(code, size, name), TensorSpec(name, (size,), code))
            for (name, size), code in zip(sizes.items(), itertools.cycle(codes), strict=False)
        }

    def step(self, number: int) -> None:
        for place, (name, tensor) in enumerate(self.weights.items()):
            if (place + number) % 3 and tensor.numel():  # some stay as they are
                bits = random_bits({2: "BF16", 4: "F32"}[tensor.element_size()], tensor.numel(), name, number)
                tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])[::5] = torch.from_numpy(
                    bits.view(f"i{tensor.element_size()}")
                )[::5]

    def state(self) -> State:
        return {name: bits_of(tensor) for name, tensor in self.weights.items()}


def boxes(export: Export) -> Callable[[Weights], Iterator[PartialTensor]]:
    """Cut what an exporter yields into halves, out of order."""

    def halves(weights: Weights) -> Iterator[PartialTensor]:
        for name, tensor in export(weights):
            half = tensor.numel() // 2
            yield PartialTensor(name, tensor[half:], (half,))
            if half:
                yield PartialTensor(name, tensor[:half], (0,))

    return halves


def opened(kind: str, export: Export, training: Training, folder: Path, **options: Any) -> Publisher:
    source: Any = boxes(export) if kind == "boxes" else export
    publisher = DeltaPublisher if kind == "one process" else ShardedPublisher
    return publisher(
        lambda: source(training.weights), sync_dir=str(folder / "run"), base=folder / "base", threads=3, **options
    )


def play(publisher: Publisher, training: Training, steps: int = 3) -> list[State]:
    history = [training.state()]
    with publisher:
        for number in range(1, steps + 1):
            training.step(number)
            publisher.publish(step=number)
            history.append(training.state())
    return history


def check(folder: Path, history: list[State]) -> None:
    for found, expected in zip(replay(folder / "run", folder / "base", folder), history, strict=True):
        assert [name for name in expected if not np.array_equal(found[name], expected[name])] == []


KINDS = ("one process", "several", "boxes")


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("export", EXPORTERS.values(), ids=EXPORTERS)
def test_what_is_lent_is_published_as_it_was(tmp_path: Path, export: Export, kind: str, asynchronous: bool):
    training = Training()
    write_checkpoint(tmp_path / "base", training.weights)
    publisher = opened(kind, export, training, tmp_path, asynchronous=asynchronous)
    check(tmp_path, play(publisher, training))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 2])
def test_large_tensors_from_one_buffer_are_published_as_they_were(tmp_path: Path, kind: str, threads: int):
    training = Training({"a": 5 << 20, "b": 7, "c": (4 << 20) + 3, "d": 5 << 20})
    write_checkpoint(tmp_path / "base", training.weights)
    history = [training.state()]
    source: Any = boxes(one_buffer) if kind == "boxes" else one_buffer
    make = DeltaPublisher if kind == "one process" else ShardedPublisher
    where = {"sync_dir": str(tmp_path / "run"), "base": tmp_path / "base"}
    with make(lambda: source(training.weights), threads=threads, **where) as publisher:
        for tensor in training.weights.values():
            tensor[::1009] += 1
        publisher.publish()
        history.append(training.state())
    check(tmp_path, history)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["device", "host"])
def test_one_buffer_on_a_device_is_read_before_it_is_filled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, way: Any
):
    training, stream = Training(), LateStream()
    lanes = LateLanes(stream)
    for module in ("publisher", "sharded_publisher"):
        monkeypatch.setattr(f"trainer_hooks.{module}.DeviceDiff", lambda on: DeviceDiff(on, lanes_of=lambda _: lanes))
    write_checkpoint(tmp_path / "base", training.weights)

    def queued(weights: Weights) -> Pairs:
        """Fill one buffer as a GPU does: later, when somebody waits for it, and cleared behind."""
        buffer = torch.zeros(4 * 9 * PIECE, dtype=torch.uint8)
        for name, tensor in weights.items():
            view = buffer[: tensor.nbytes].view(tensor.dtype)
            stream.queue(lambda into=view, now=tensor: into.copy_(now))
            yield name, view
            stream.queue(lambda: buffer.fill_(0x5A))
            stream.run_to(stream.mark())  # the device is as fast as it can be

    check(tmp_path, play(opened(kind, queued, training, tmp_path, diff_on=way), training))
    assert (lanes.copies["to device"] > 0) == (way == "device")


COLLECTED: dict[str, Callable[[Pairs], Any]] = {"list": list, "tuple": tuple, "dict": dict}


@pytest.mark.parametrize("collect", COLLECTED.values(), ids=COLLECTED)
@pytest.mark.parametrize("export", [one_buffer, EXPORTERS["an array of numpy's"]])
@pytest.mark.parametrize("sizes", [SIZES, {"a": 8, "b": 8, "c": 8, "d": 8}], ids=["of all sizes", "alike"])
def test_what_was_lent_and_collected_is_refused(
    tmp_path: Path, export: Export, collect: Callable[[Pairs], Any], sizes: dict[str, int]
):
    training = Training(sizes, DTYPES if sizes is SIZES else ("BF16",))
    write_checkpoint(tmp_path / "base", training.weights)

    def source() -> Any:
        return collect(export(training.weights))

    with pytest.raises(SourceError, match="lie in the same memory, but are different ones") as caught:
        DeltaPublisher(source, sync_dir=str(tmp_path / "run"), base=tmp_path / "base").publish()
    assert "no list or dict" in str(caught.value.hint)
    assert not list((tmp_path / "run").glob("versions/*"))
    if collect is not dict:
        with pytest.raises(SourceError, match="lie in the same memory, but are different ones"):
            ShardedPublisher(source, sync_dir=str(tmp_path / "other"), base=tmp_path / "base")


def test_tied_weights_in_a_dict_are_published_under_both_names(tmp_path: Path):
    whole = torch.randn(12, 4)
    pairs = {"embed": whole, "head": whole.detach(), "used": whole[:9], "left": whole[:, :2], "right": whole[:, 2:]}
    write_checkpoint(tmp_path / "base", {name: tensor.clone() for name, tensor in pairs.items()})
    history = []
    with DeltaPublisher(pairs, sync_dir=str(tmp_path / "run"), base=tmp_path / "base") as publisher:
        for _ in range(3):
            history.append({name: bits_of(tensor) for name, tensor in pairs.items()})
            whole[3:7] += 1
            publisher.publish()
    check(tmp_path, [*history, {name: bits_of(tensor) for name, tensor in pairs.items()}])


class LazyMapping(Mapping[str, torch.Tensor]):
    """A mapping that makes its tensors when they are asked for, in one buffer."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._buffer = torch.empty(4 * 9 * PIECE, dtype=torch.uint8)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._weights[name]
        return self._buffer[: tensor.nbytes].view(tensor.dtype).copy_(tensor)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


class Again:
    """What can be iterated again and again."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def __iter__(self) -> Pairs:
        return bucket(self._weights)


class OwnSource:
    """A source of one's own, all of whose items are read from one buffer; two tensors to an item."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def items(self, specs: Mapping[str, TensorSpec]) -> Iterator[SourceItem]:
        names = list(specs)
        lazy = LazyMapping(self._weights)
        for at in range(0, len(names), 2):
            two = tuple(names[at : at + 2])
            yield SourceItem(two, lambda two=two: ((name, lazy[name]) for name in two))


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("kind", [LazyMapping, Again, OwnSource])
def test_any_source_that_makes_its_tensors_late_may_reuse_them(tmp_path: Path, kind: type[Any]):
    training = Training()
    write_checkpoint(tmp_path / "base", training.weights)
    publisher = DeltaPublisher(
        kind(training.weights), sync_dir=str(tmp_path / "run"), base=tmp_path / "base", threads=3
    )
    check(tmp_path, play(publisher, training))


class Fused(nn.Module):
    """Two parameters, each of which is three tensors of the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.one = nn.Parameter(torch.randn(6, PIECE).bfloat16())
        self.two = nn.Parameter(torch.randn(6, PIECE).bfloat16())

    def tensors(self) -> dict[str, torch.Tensor]:
        parts = {"q": slice(0, 3), "k": slice(3, 5), "v": slice(5, 6)}
        return {f"{n}.{key}": p.detach()[at] for n, p in self.named_parameters() for key, at in parts.items()}


def names_by_generator(module: Fused) -> Any:
    buffer = torch.empty(6, PIECE, dtype=torch.bfloat16)

    def names(name: str, tensor: torch.Tensor) -> Pairs:
        for key, at in (("q", slice(0, 3)), ("k", slice(3, 5)), ("v", slice(5, 6))):
            part = tensor[at]
            yield f"{name}.{key}", buffer[: len(part)].copy_(part)

    return names


def names_by_call(module: Fused) -> Any:
    buffer = torch.empty(6, PIECE, dtype=torch.bfloat16)

    def names(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        q, k, v = buffer.copy_(tensor).split([3, 2, 1])
        return [(f"{name}.q", q), (f"{name}.k", k), (f"{name}.v", v)]

    return names


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("make", [names_by_generator, names_by_call])
def test_a_names_function_may_reuse_what_it_returned(tmp_path: Path, make: Callable[[Fused], Any]):
    module = Fused()
    write_checkpoint(tmp_path / "base", module.tensors())
    where = {"sync_dir": str(tmp_path / "run"), "base": tmp_path / "base"}
    history = [{name: bits_of(tensor) for name, tensor in module.tensors().items()}]
    with DeltaPublisher(module, names=make(module), threads=3, **where) as publisher:
        for number in range(2):
            with torch.no_grad():
                module.one[number] += 1
                module.two[-1 - number] -= 1
            publisher.publish()
            history.append({name: bits_of(tensor) for name, tensor in module.tensors().items()})
    check(tmp_path, history)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_tensor_whose_memory_is_gone_already_is_refused(tmp_path: Path, kind: str):
    training = Training()
    write_checkpoint(tmp_path / "base", training.weights)
    is_freed = False

    def export(weights: Weights) -> Pairs:
        for name, tensor in weights.items():
            copy = tensor.clone()
            if is_freed and name == "b":
                copy.untyped_storage().resize_(8)
            yield name, copy

    publisher = opened(kind, export, training, tmp_path)
    publisher.publish().wait()
    is_freed = True
    with pytest.raises(SourceError, match="memory") as caught:
        publisher.publish()
    assert (caught.value.tensor, publisher.version) == ("b", 1)
    is_freed = False
    assert publisher.publish().report.version == 2


def test_a_source_that_fails_is_not_asked_for_more(tmp_path: Path):
    """A tensor that does not fit ends the pass at once, with nothing of what is behind it taken."""
    training = Training()
    write_checkpoint(tmp_path / "base", training.weights)
    asked: list[str] = []
    is_wrong = False

    def export(weights: Weights) -> Pairs:
        asked.clear()
        for name, tensor in weights.items():
            asked.append(name)
            yield name, tensor[:-1] if is_wrong and name == "b" else tensor

    publisher = opened("one process", export, training, tmp_path)
    is_wrong = True
    with pytest.raises(SourceError, match="another shape"):
        publisher.publish()
    assert asked == ["a", "b"]
