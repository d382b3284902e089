"""Comparing what lies on an accelerator, there or on the host, gives what the diff of host tensors gives.

Here the accelerator is the CPU, with lanes that are as late as a real one's may be (tests/support/lanes.py); the code
is the same. On real ones: test_device_diff_cuda.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.checkpoints import write_checkpoint
from tests.support.lanes import LateLanes, LateStream
from tests.support.runs import State, assert_same_state, replay
from tests.support.strategies import bits_for, patches_for, specs
from tests.support.tensors import TORCH_CODES, apply_by_hand, bits_of, random_bits, rng_of, special_bits, to_torch
from trainer_hooks import DeltaPublisher
from trainer_hooks.compare import diff as diff_module
from trainer_hooks.compare.device_diff import DEVICE_BYTES, DeviceDiff, DiffOn
from trainer_hooks.compare.diff import Piece, TensorDiff, diff_tensor, pieces
from trainer_hooks.compare.differ import diff_pieces
from trainer_hooks.compare.lanes import stream_lanes
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.types import TensorSpec
from vllm_delta_snapshot.util.ordered import thread_pool

PIECE = 64
CPU = torch.device("cpu")
WAYS: tuple[DiffOn, ...] = ("device", "host")
Rows = list[tuple[object, ...]]


@pytest.fixture(autouse=True)
def _numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff_module, "load_kernel", lambda: None)  # compiling would take most of the time


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> DiffOn:
    found: DiffOn = request.param
    return found


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff_module, "PIECE_ELEMENTS", PIECE)
    monkeypatch.setattr("trainer_hooks.compare.differ.PIECE_ELEMENTS", PIECE)
    monkeypatch.setattr("trainer_hooks.compare.device_diff.CHUNK_ELEMENTS", PIECE // 4)


def rows(diffs: Sequence[TensorDiff]) -> Rows:
    found: Rows = []
    for of in diffs:
        found.append((of.spec.name, of.positions.tolist(), of.old.tolist(), of.new.tolist()))
        found.append((str(of.positions.dtype), str(of.new.dtype), of.old_digest, of.new_digest))
    return found


def on(lanes: LateLanes, way: DiffOn) -> DeviceDiff:
    return DeviceDiff(way, lanes_of=lambda device: lanes)


def there(
    given: Sequence[tuple[TensorSpec, Bits, torch.Tensor]], way: DiffOn, pool: ThreadPoolExecutor | None = None
) -> Rows:
    """Compare as if all were on a device; everything that it used is spoilt before anybody looks."""
    lanes = LateLanes()
    baselines = [before.copy() for _, before, _ in given]
    cut = (
        piece
        for (spec, _, tensor), before in zip(given, baselines, strict=True)
        for piece in pieces(spec, before, tensor)
    )
    found = list(diff_pieces(cut, pool, device_diff=on(lanes, way)))
    lanes.spoil()
    for before in baselines:
        before[...] = 0x5A if before.dtype == np.uint8 else 0x5A5A
    elements = sum(before.size for before in baselines)
    assert (lanes.copies["to device"] > 0) == (way == "device" and elements > 0)
    assert lanes.busy == 0
    return rows(found)


def here(given: Sequence[tuple[TensorSpec, Bits, torch.Tensor]]) -> Rows:
    found = [diff_tensor(spec, before, tensor.contiguous()) for spec, before, tensor in given]
    return rows([of for of in found if of is not None])


@pytest.mark.usefixtures("_small")
def test_every_type_with_any_bits_gives_what_the_host_gives(way: DiffOn):
    given = []
    for code in TORCH_CODES:
        for number, size in enumerate((0, 1, PIECE - 1, PIECE, 3 * PIECE + 5)):
            spec = TensorSpec(f"{code}.{number}", (size,), code)
            before, after = random_bits(code, size, "before"), random_bits(code, size, "after")
            after[::3] = before[::3]
            given.append((spec, before, to_torch(after, spec)))
        bits = special_bits(code)  # NaN payloads, both zeros, subnormals
        spec = TensorSpec(f"{code}.special", bits.shape, code)
        given.append((spec, bits ^ np.array(1, bits.dtype), to_torch(bits, spec)))
        given.append((TensorSpec(f"{code}.same", bits.shape, code), bits, to_torch(bits, spec)))
    with thread_pool(3) as pool:
        found = there(given, way, pool)
    assert found == here(given)
    assert len(found) >= 8 * len(TORCH_CODES)


@given(st.data())
def test_any_patched_tensor_gives_what_the_host_gives(data: st.DataObject):
    spec = data.draw(specs)
    before = data.draw(bits_for(spec, spec.numel))
    after = to_torch(apply_by_hand(before, data.draw(patches_for(spec))), spec)
    expected = here([(spec, before, after)])
    for way in WAYS:
        assert there([(spec, before, after)], way) == expected


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("code", ["BF16", "F16", "F32"])
def test_masters_are_cast_where_they_are(code: str, source: torch.dtype, way: DiffOn):
    spec = TensorSpec("w", (5, 2 * PIECE), code)
    tensor = torch.from_numpy(rng_of(code).standard_normal(spec.shape)).to(source)
    tensor[0, :4] = torch.tensor([float("inf"), -0.0, 1e-41, 65520.0], dtype=source)
    before = bits_of(tensor.to(getattr(torch, spec.element.torch_name)))
    assert there([(spec, before, tensor)], way) == []
    before[::7] ^= 1
    assert there([(spec, before, tensor)], way) == here([(spec, before, tensor)]) != []


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(
    "strided",
    [
        lambda: torch.randn(40, 30, dtype=torch.bfloat16).t(),
        lambda: torch.randn(600, dtype=torch.bfloat16)[::2],
        lambda: torch.randn(20, 30, dtype=torch.bfloat16)[:, 3:20],
        lambda: torch.randn(1, dtype=torch.bfloat16).expand(200),
        lambda: torch.randn((), dtype=torch.bfloat16),
        lambda: torch.randn(0, 5, dtype=torch.bfloat16),
    ],
    ids=["transposed", "every other", "columns", "expanded", "0-d", "empty"],
)
def test_any_strides_give_what_the_host_gives(strided: Callable[[], torch.Tensor], way: DiffOn):
    tensor = strided()
    spec = TensorSpec("w", tuple(tensor.shape), "BF16")
    before = bits_of(tensor)
    before[::5] ^= 3
    assert there([(spec, before, tensor)], way) == here([(spec, before, tensor)])


def test_baseline_that_is_not_contiguous_gives_the_same(way: DiffOn):
    spec = TensorSpec("w", (100,), "F32")
    before = random_bits("F32", 200)[::2]
    after = before.copy()
    after[[0, 50, 99]] ^= 1
    piece = Piece(spec, 0, before, to_torch(after, spec), is_last=True)
    (found,) = diff_pieces([piece], None, device_diff=on(LateLanes(), way))
    assert found.positions.tolist() == [0, 50, 99]
    assert found.old.tolist() == before[[0, 50, 99]].tolist()


def test_positions_of_a_shard_are_those_in_the_whole_tensor(way: DiffOn):
    spec = TensorSpec("w", (1000,), "U8")
    before = np.zeros(10, np.uint8)
    after = before.copy()
    after[[2, 9]] = 7
    piece = Piece(spec, 5, before, torch.from_numpy(after), True, lambda where: where * 10)
    (found,) = diff_pieces([piece], None, device_diff=on(LateLanes(), way))
    assert found.positions.tolist() == [70, 140]


class Trainer:
    """Weights whose writes are queued, and not done before somebody waits for them."""

    def __init__(self, count: int) -> None:
        self.stream = LateStream()
        self.specs = [TensorSpec(f"w{number}", (3 * PIECE,), "BF16") for number in range(count)]
        self.before = [random_bits("BF16", spec.numel, number) for number, spec in enumerate(self.specs)]
        self.after = [bits ^ np.uint16(1) for bits in self.before]

    def given(self) -> list[tuple[TensorSpec, Bits, torch.Tensor]]:
        return [(s, b, to_torch(a, s)) for s, b, a in zip(self.specs, self.before, self.after, strict=True)]

    def cut(self) -> Iterator[Piece]:
        """As a source that converts: each tensor is made, late, when it is its turn."""
        for spec, before, after in zip(self.specs, self.before, self.after, strict=True):
            tensor = torch.zeros(spec.shape, dtype=torch.bfloat16)
            self.stream.queue(lambda into=tensor, bits=after, of=spec: into.copy_(to_torch(bits, of)))
            yield from pieces(spec, before, tensor)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("threads", [1, 3])
def test_weights_are_read_after_what_the_trainer_queued(way: DiffOn, threads: int):
    trainer = Trainer(6)
    with thread_pool(threads) as pool:
        found = list(diff_pieces(trainer.cut(), pool, device_diff=on(LateLanes(trainer.stream), way)))
    assert rows(found) == here(trainer.given())


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("after", [0, 1, 7])
@pytest.mark.parametrize("asked", ["auto", "device"])
def test_device_that_runs_out_of_memory_leaves_the_rest_to_the_host(
    asked: DiffOn, after: int, caplog: pytest.LogCaptureFixture
):
    trainer = Trainer(6)
    lanes = LateLanes(trainer.stream, out_of_memory_after=after)
    with thread_pool(3) as pool:
        found = list(diff_pieces(trainer.cut(), pool, device_diff=on(lanes, asked)))
    assert rows(found) == here(trainer.given())
    assert after < lanes.copies["to device"] <= after + 3  # one a thread, at most, before all know
    assert [record.message for record in caplog.records if "no room" in record.message] == [
        "cpu has no room to compare there; going on on the host: CUDA out of memory"
    ]


@pytest.mark.parametrize(
    ("asked", "room", "is_there"),
    [
        ("auto", DEVICE_BYTES, True),
        ("auto", DEVICE_BYTES - 1, False),
        ("device", 0, True),
        ("host", DEVICE_BYTES, False),
    ],
)
def test_place_is_chosen_by_config_and_by_room_anew_in_every_pass(asked: DiffOn, room: int, is_there: bool):
    spec = TensorSpec("w", (4,), "U8")
    lanes = LateLanes(room=room)
    device_diff = on(lanes, asked)
    for count in (1, 2):
        piece = Piece(spec, 0, np.zeros(4, np.uint8), torch.ones(4, dtype=torch.uint8), is_last=True)
        assert len(list(diff_pieces([piece], None, device_diff=device_diff))) == 1
        assert lanes.copies["to device"] == (count if is_there else 0)
    lanes._room = 0
    assert device_diff.fits(lanes) is (asked == "device")


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("threads", [1, 3])
def test_pass_that_is_left_or_fails_leaves_no_work_on_a_lane(way: DiffOn, threads: int):
    trainer = Trainer(6)
    lanes = LateLanes(trainer.stream)
    with thread_pool(threads) as pool:
        begun = diff_pieces(trainer.cut(), pool, device_diff=on(lanes, way))
        next(begun)
        begun.close()  # type: ignore[attr-defined]
        assert lanes.busy == 0

        def failing() -> Iterator[Piece]:
            yield from list(trainer.cut())[:5]
            raise RuntimeError("the model is gone")

        with pytest.raises(RuntimeError, match="is gone"):
            list(diff_pieces(failing(), pool, device_diff=on(lanes, way)))
        assert lanes.busy == 0


def test_error_of_the_device_is_no_lack_of_memory_and_ends_the_pass(monkeypatch: pytest.MonkeyPatch):
    lanes = LateLanes()

    def broken() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(lanes, "spend", broken)
    piece = Piece(TensorSpec("w", (4,), "U8"), 0, np.zeros(4, np.uint8), torch.ones(4, dtype=torch.uint8), is_last=True)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        list(diff_pieces([piece], None, device_diff=on(lanes, "device")))
    assert lanes.busy == 0


def test_host_tensors_have_no_lanes_and_unknown_places_are_refused():
    assert stream_lanes(CPU) is None
    assert (
        not DeviceDiff().begin().mark([Piece(TensorSpec("w", (), "U8"), 0, np.zeros(1, np.uint8), torch.ones(1), True)])
    )
    with pytest.raises(ValueError, match="diff_on must be one of"):
        DeviceDiff("gpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_published_chain_is_what_the_weights_were_once_the_queue_had_come_to_the_call(
    tmp_path: Path, way: DiffOn, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
):
    lanes = LateLanes()
    monkeypatch.setattr("trainer_hooks.publisher.DeviceDiff", lambda asked: on(lanes, asked))
    spec = TensorSpec("w", (30, 10), "BF16")
    states = [random_bits("BF16", spec.numel, number) for number in range(4)]
    live = to_torch(states[0], spec)
    base = write_checkpoint(tmp_path / "base", {"w": live.clone()})
    wanted: list[State] = [{"w": bits} for bits in states]
    with DeltaPublisher(
        {"w": live}, sync_dir=str(tmp_path / "run"), base=base, diff_on=way, asynchronous=asynchronous, threads=2
    ) as publisher:
        for bits in states[1:]:
            lanes.stream.queue(lambda bits=bits: live.copy_(to_torch(bits, spec)))  # an optimizer's step
            publisher.publish()
            assert lanes.busy == 0
            live.zero_()  # as soon as it may be
    for found, state in zip(replay(tmp_path / "run", base, tmp_path), wanted, strict=True):
        assert_same_state(found, state)
    assert (lanes.copies["to device"] > 0) == (way == "device")


def test_publisher_refuses_a_place_that_there_is_not(tmp_path: Path):
    with pytest.raises(ValueError, match="diff_on must be one of"):
        DeltaPublisher({}, sync_dir=str(tmp_path / "run"), base=tmp_path, diff_on="gpu")  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
