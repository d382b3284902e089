"""Fitness: the way of each tensor, told from what the workers say together; and the proofs on live weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import write_checkpoint
from tests.support.tensors import random_bits, to_torch
from tests.support.toys import Toy, specs_of
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.engine.plan.load_plan import LoadPlan, PlanSummary, record_load_plan
from vllm_delta_snapshot.engine.ways import Choice, refuse_tensors
from vllm_delta_snapshot.engine.write import fitness
from vllm_delta_snapshot.engine.write.fitness import check_live_bits, check_memory, choose_ways
from vllm_delta_snapshot.errors import ApplyError, BaseMismatch, TensorRefused
from vllm_delta_snapshot.host.places import Box
from vllm_delta_snapshot.types import TensorSpec

SPECS = specs_of(w=(4, 6))
Part = tuple[Box, int]
WHOLE: Part = (("segment", 0, ((1, 24),)), 24)
UPPER: Part = (("segment", 0, ((1, 12),)), 12)
LOWER: Part = (("segment", 12, ((1, 12),)), 12)


UNREAD = {"w": Choice("unread", "never read")}


def _worker(*parts: Part, problem: str | None = None) -> PlanSummary:
    return PlanSummary({"w": frozenset(parts)} if parts else {}, {"w": problem} if problem else {})


@pytest.mark.parametrize(
    "workers",
    [
        [_worker(WHOLE)],
        [_worker(WHOLE), _worker(WHOLE)],
        [_worker(UPPER), _worker(LOWER)],
        [_worker(UPPER, LOWER)],
        [_worker(UPPER), _worker(LOWER), _worker(UPPER), _worker(LOWER)],
        [_worker(), _worker(WHOLE)],
    ],
    ids=["one", "replicas", "shards", "parts", "shards of replicas", "another stage"],
)
@pytest.mark.parametrize("way", ["scatter", "loader"])
def test_tensor_that_the_workers_hold_together_is_served_the_way_it_is_wanted(
    workers: list[PlanSummary], way: str
) -> None:
    assert choose_ways(workers, SPECS, [], way) == {"w": Choice(way)}


@pytest.mark.parametrize(
    ("workers", "reason"),
    [
        ([_worker()], "copies none of it to where it could be patched"),
        ([_worker(UPPER)], "copies 12 of its 24 elements"),
        ([_worker(UPPER), _worker(UPPER)], "copies 12 of its 24 elements"),
        ([_worker(WHOLE), _worker(problem="it is converted")], "it is converted"),
    ],
    ids=["missing", "half", "the same half twice", "a problem elsewhere"],
)
def test_tensor_without_a_whole_place_is_refused_with_the_reason(workers: list[PlanSummary], reason: str) -> None:
    with pytest.raises(TensorRefused, match=reason) as caught:
        refuse_tensors(choose_ways(workers, SPECS, ["other*"], "scatter"))
    assert "w:" in str(caught.value)


def test_tensor_declared_skippable_is_skipped_with_the_reason() -> None:
    choices = choose_ways([_worker(UPPER)], SPECS, ["w*"], "scatter")
    assert choices == {"w": Choice("skip", "the engine copies 12 of its 24 elements")}
    refuse_tensors(choices)


def test_tensor_of_a_layer_that_is_reloaded_is_reloaded_unless_it_has_a_problem() -> None:
    summary = PlanSummary({}, {}, {"w": "mlp (Fp8)"})
    assert choose_ways([_worker(), summary], SPECS, [], "scatter") == {"w": Choice("reload", "mlp (Fp8)")}
    choices = choose_ways([_worker(problem="it differs"), summary], SPECS, [], "scatter")
    assert choices == {"w": Choice("refused", "it differs")}


def test_tensor_that_has_its_place_is_served_even_if_it_may_be_skipped() -> None:
    assert choose_ways([_worker(WHOLE)], SPECS, ["*"], "scatter") == {"w": Choice("scatter")}


def test_many_refused_tensors_are_counted_and_some_named() -> None:
    specs = specs_of(**{f"w{number}": (2,) for number in range(9)})
    with pytest.raises(TensorRefused, match=r"9 tensors of the checkpoint.*w4: .*and 4 more"):
        refuse_tensors(choose_ways([_worker()], specs, [], "scatter"))


def test_empty_tensor_needs_no_place() -> None:
    assert choose_ways([_worker()], {"e": TensorSpec("e", (0, 4), "BF16")}, [], "scatter") == {"e": Choice("scatter")}


BIG = specs_of(q=(300, 40), k=(5, 40), e=(0, 40))


def fused(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Two tensors in one parameter."""
    first = {"q": 0, "k": 300, "e": 305}[name]
    toy.qk.data[first : first + tensor.shape[0]].copy_(tensor)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    tensors = {spec.name: to_torch(random_bits("BF16", spec.numel, spec.name), spec) for spec in BIG.values()}
    return Checkpoint(write_checkpoint(tmp_path / "base", tensors))


def loaded(checkpoint: Checkpoint, dtype: torch.dtype = torch.bfloat16) -> tuple[Toy, LoadPlan]:
    toy = Toy(fused, dtype, qk=(305, 40))
    toy.load_weights((name, to_torch(checkpoint.bits(name), spec)) for name, spec in BIG.items())
    return toy, record_load_plan(toy, BIG)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_live_weights_that_are_the_checkpoints_pass(checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    toy, plan = loaded(checkpoint, dtype)
    before = toy.bits()
    compared = check_live_bits(plan, checkpoint)
    assert 200 + 4000 <= compared <= 200 + 4096  # all of the small one, samples of the other
    assert toy.bits() == before


@pytest.mark.parametrize(("row", "name"), [(0, "q"), (299, "q"), (300, "k"), (304, "k")])
def test_live_weights_that_are_others_are_found_and_named(row: int, name: str, checkpoint: Checkpoint) -> None:
    toy, plan = loaded(checkpoint)
    toy.qk.data.view(torch.int16)[row] ^= 1
    with pytest.raises(BaseMismatch, match="not those of the checkpoint") as caught:
        check_live_bits(plan, checkpoint)
    assert caught.value.tensor == name


def test_tensors_without_an_exact_place_are_not_compared(checkpoint: Checkpoint) -> None:
    toy, plan = loaded(checkpoint)
    toy.qk.data.zero_()
    plan = LoadPlan(plan.places, plan.storages, {"q": "some", "k": "reason"}, plan.fingerprint)
    assert check_live_bits(plan, checkpoint) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float64])
def test_memory_that_keeps_what_is_written_passes_and_is_as_before(dtype: torch.dtype) -> None:
    code = {torch.uint8: "U8"}.get(dtype, "BF16")
    toy = Toy(fused, dtype, qk=(305, 40))
    plan = record_load_plan(toy, {name: TensorSpec(name, spec.shape, code) for name, spec in BIG.items()})
    before = toy.bits()
    check_memory(plan)
    assert toy.bits() == before


def test_memory_that_forgets_is_refused_and_named(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    _, plan = loaded(checkpoint)
    monkeypatch.setattr(fitness, "scatter", lambda flat, index, values: False)
    with pytest.raises(ApplyError, match="do not keep what is written") as caught:
        check_memory(plan)
    assert caught.value.tensor == "q"


def test_unread_tensor_has_that_way_unless_the_user_named_it_or_it_has_a_place() -> None:
    assert choose_ways([_worker()], SPECS, [], "scatter", UNREAD) == UNREAD
    assert choose_ways([_worker()], SPECS, ["w"], "scatter", UNREAD)["w"].way == "skip"
    assert choose_ways([_worker(WHOLE)], SPECS, [], "scatter", UNREAD) == {"w": Choice("scatter")}
    refuse_tensors(UNREAD)


def test_refusal_prints_the_patterns_to_give() -> None:
    names = ["mtp.a", "mtp.b", "model.layers.0.q"]
    choices = {name: Choice("refused" if "mtp" in name else "scatter", "no place") for name in names}
    with pytest.raises(TensorRefused) as caught:
        refuse_tensors(choices)
    assert 'init_info: {"skip": ["mtp.*"]}' in str(caught.value.hint)
