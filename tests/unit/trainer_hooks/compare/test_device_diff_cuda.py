"""Comparing weights on a real GPU. What the CPU cannot show: streams that run late, memory that is used again.

`torch.cuda._sleep` keeps a stream busy, so that what is read too early has not been written yet.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.checkpoints import write_checkpoint
from tests.support.runs import State, assert_same_state, replay
from tests.support.tensors import TORCH_CODES, bits_of, random_bits, special_bits, to_torch
from trainer_hooks import DeltaPublisher
from trainer_hooks.compare.device_diff import DeviceDiff, DiffOn
from trainer_hooks.compare.diff import Piece, TensorDiff, diff_tensor, pieces
from trainer_hooks.compare.differ import diff_pieces
from trainer_hooks.compare.lanes import StreamLanes, stream_lanes
from trainer_hooks.compare.pinned import HostMemory
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.types import TensorSpec
from vllm_delta_snapshot.util.ordered import thread_pool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch finds none here")

LONG = 500_000_000
"""Clock ticks: a quarter of a second or so."""

SIZE = 6_000_000
SPEC = TensorSpec("w", (SIZE,), "BF16")


@pytest.fixture(params=["device", "host"])
def way(request: pytest.FixtureRequest) -> DiffOn:
    found: DiffOn = request.param
    return found


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def found_by(way: DiffOn, cut: Iterator[Piece], threads: int = 4) -> list[TensorDiff]:
    with thread_pool(threads) as pool:
        return list(diff_pieces(cut, pool, device_diff=DeviceDiff(way)))


def check(found: list[TensorDiff], spec: TensorSpec, before: Bits, after: torch.Tensor) -> None:
    """Compare with the diff of tensors on the host."""
    expected = diff_tensor(spec, before, after)
    if expected is None:
        assert found == []
        return
    (one,) = found
    assert one.spec == spec
    for given, wanted in ((one.positions, expected.positions), (one.old, expected.old), (one.new, expected.new)):
        assert given.dtype == wanted.dtype
        assert np.array_equal(given, wanted)
    assert (one.old_digest, one.new_digest) == (expected.old_digest, expected.new_digest)


@pytest.fixture(scope="module")
def before() -> Bits:
    return HostMemory(is_pinned=True).copy_of(random_bits("BF16", SIZE, "before"))


@pytest.fixture(scope="module")
def after(before: Bits) -> torch.Tensor:
    changed = before.copy()
    changed[::97] ^= 1
    return to_torch(changed, SPEC).pin_memory()


@pytest.mark.parametrize("is_pinned", [True, False])
def test_every_type_gives_what_the_host_gives(is_pinned: bool, way: DiffOn, device: torch.device):
    memory = HostMemory(is_pinned=is_pinned)
    for code in TORCH_CODES:
        bits = np.concatenate([special_bits(code), random_bits(code, 5000)])
        other = bits.copy()
        other[::3] = np.roll(bits, 1)[::3]
        for shape in ((bits.size,), (0,), ()):
            spec = TensorSpec("w", shape, code)
            old, new = other[: spec.numel], to_torch(bits[: spec.numel], spec)
            found = found_by(way, pieces(spec, memory.copy_of(old), new.to(device)))
            check(found, spec, old, new)


@pytest.mark.parametrize("code", ["BF16", "F16", "F32"])
def test_masters_are_cast_as_torch_casts_there(code: str, way: DiffOn, device: torch.device):
    spec = TensorSpec("w", (1_200_000,), code)
    master = torch.randn(spec.shape, dtype=torch.float64, device=device).to(torch.float32 if code != "F32" else None)
    master[:5] = torch.tensor([float("inf"), -0.0, float("nan"), 1e-41, 65520.0])
    cast = master.to(getattr(torch, spec.element.torch_name)).cpu()
    old = bits_of(cast)
    assert found_by(way, pieces(spec, old, master)) == []
    old[::7] ^= 1
    check(found_by(way, pieces(spec, old, master)), spec, old, cast)


def test_strided_weights_give_what_the_host_gives(way: DiffOn, device: torch.device):
    tensor = torch.randn(2000, 3000, device=device).to(torch.bfloat16)
    for strided in (tensor.t(), tensor[:, ::2], tensor[5:, 7:100], tensor[0].expand(4, 3000)):
        spec = TensorSpec("w", tuple(strided.shape), "BF16")
        old = bits_of(strided.cpu())
        old[::1001] ^= 1
        check(found_by(way, pieces(spec, old, strided)), spec, old, strided.cpu())


@pytest.mark.parametrize("threads", [1, 4])
def test_weights_are_read_after_what_is_queued_on_the_trainers_stream(
    before: Bits, after: torch.Tensor, way: DiffOn, threads: int, device: torch.device
):
    live = to_torch(before, SPEC).to(device)
    trainer = torch.cuda.Stream(device)
    trainer.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(trainer):
        torch.cuda._sleep(LONG)  # the optimizer's step
        live.copy_(after, non_blocking=True)
        found = found_by(way, pieces(SPEC, before, live), threads)
    check(found, SPEC, before, after)


def test_weights_written_on_any_stream_right_after_the_diff_are_not_in_it(
    before: Bits, after: torch.Tensor, way: DiffOn, device: torch.device
):
    live = after.to(device)
    other = torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    for _ in range(5):
        found = found_by(way, pieces(SPEC, before, live))
        with torch.cuda.stream(other):
            live.zero_()
        check(found, SPEC, before, after)
        torch.cuda.synchronize(device)
        live.copy_(after)


def test_what_was_found_stays_when_baseline_and_buffers_are_used_again(
    before: Bits, after: torch.Tensor, way: DiffOn, device: torch.device
):
    baseline = HostMemory(is_pinned=True).copy_of(before)
    device_diff = DeviceDiff(way)
    with thread_pool(4) as pool:
        first = list(diff_pieces(pieces(SPEC, baseline, after.to(device)), pool, device_diff=device_diff))
        baseline[first[0].positions] = first[0].new  # as `advance` does
        second = list(diff_pieces(pieces(SPEC, baseline, after.to(device) * 2), pool, device_diff=device_diff))
    check(first, SPEC, before, after)
    check(second, SPEC, bits_of(after), after * 2)


def test_memory_of_converted_tensors_is_used_again_only_when_they_were_read(way: DiffOn, device: torch.device):
    """A source makes each tensor anew, on the trainer's stream: the allocator gives the next the last one's place."""
    count, size = 24, 1_500_000
    specs = [TensorSpec(f"w{number}", (size,), "BF16") for number in range(count)]
    old = np.zeros(size, np.uint16)
    made: set[int] = set()

    def cut() -> Iterator[Piece]:
        for number, spec in enumerate(specs):
            torch.cuda._sleep(LONG // 100)
            tensor = torch.full((size,), float(number + 1), dtype=torch.bfloat16, device=device)
            made.add(tensor.data_ptr())
            yield from pieces(spec, old, tensor)
            del tensor

    found = found_by(way, cut())
    assert [of.spec.name for of in found] == [spec.name for spec in specs]
    for number, of in enumerate(found):
        assert of.new.size == size
        assert (of.new == bits_of(torch.tensor([number + 1.0]).to(torch.bfloat16))[0]).all()
    assert len(made) < count, "no place was used twice, so this shows nothing"


def test_device_without_room_leaves_the_rest_to_the_host(
    before: Bits, after: torch.Tensor, device: torch.device, caplog: pytest.LogCaptureFixture
):
    live = after.to(device)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + (1 << 20)) / total, device)
    try:
        with caplog.at_level(logging.WARNING):
            found = found_by("device", pieces(SPEC, before, live))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    check(found, SPEC, before, after)
    assert sum("no room to compare there" in record.message for record in caplog.records) == 1


def test_memory_that_cannot_be_pinned_is_plain_and_gives_the_same(
    before: Bits, after: torch.Tensor, way: DiffOn, device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    real = torch.empty

    def no_pins(*args: object, pin_memory: bool = False, **more: object) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return real(*args, **more)  # type: ignore[call-overload,no-any-return]

    live = after.to(device)
    monkeypatch.setattr(torch, "empty", no_pins)
    plain = HostMemory(is_pinned=True).copy_of(before)
    check(found_by(way, pieces(SPEC, plain, live)), SPEC, before, after)


def test_baseline_of_a_process_that_uses_a_gpu_is_pinned_unless_the_host_compares(device: torch.device):
    torch.zeros(1, device=device)
    bits = np.arange(100, dtype=np.uint16)
    pinned = DeviceDiff("auto").host_memory().copy_of(bits)
    assert torch.from_numpy(pinned.view(np.int16)).is_pinned()
    plain = DeviceDiff("host").host_memory().copy_of(bits)
    assert not torch.from_numpy(plain.view(np.int16)).is_pinned()


def test_lanes_say_what_room_the_device_has(device: torch.device):
    lanes = stream_lanes(device)
    assert isinstance(lanes, StreamLanes)
    assert 0 < lanes.room() <= torch.cuda.get_device_properties(device).total_memory


@pytest.mark.parametrize("asked", ["auto", "device", "host"])
def test_published_chain_of_a_training_on_a_gpu_is_its_weights(tmp_path: Path, asked: DiffOn, device: torch.device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 1500), torch.nn.ReLU(), torch.nn.Linear(1500, 9)).to(device)
    base = write_checkpoint(
        tmp_path / "base", {name: tensor.to(torch.bfloat16).cpu() for name, tensor in model.state_dict().items()}
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wanted: list[State] = []
    with DeltaPublisher(model, sync_dir=str(tmp_path / "run"), base=base, diff_on=asked, threads=4) as publisher:
        for step in range(4):
            model(torch.randn(64, 300, device=device)).square().mean().backward()
            optimizer.step()
            torch.cuda._sleep(LONG // 10)
            publisher.publish(step=step)
            wanted.append({name: bits_of(value.to(torch.bfloat16).cpu()) for name, value in model.state_dict().items()})
    found = replay(tmp_path / "run", base, tmp_path)
    assert len(found) == 1 + len(wanted)
    for state, weights in zip(found[1:], wanted, strict=True):
        assert_same_state(state, weights)
