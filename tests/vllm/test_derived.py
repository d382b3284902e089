"""What layers compute from weights is found by watching it, not by its name or its place; constants are left alone."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.engines import Engine, engine
from tests.support.tiny_models import make_model
from vllm_delta_snapshot.engine.plan.derived import find_derived, find_unexplained
from vllm_delta_snapshot.engine.plan.load_plan import LoadPlan
from vllm_delta_snapshot.engine.write.fitness import Fitness
from vllm_delta_snapshot.engine.write.transaction import prepare
from vllm_delta_snapshot.engine.write.updates import Update
from vllm_delta_snapshot.errors import ApplyError, TensorRefused


class Attention(torch.nn.Module):
    """As vLLM's attention layers are: an implementation, and post-processing that comes after all other layers."""

    def __init__(self, other: torch.nn.Module, process: Any) -> None:
        super().__init__()
        self.impl = SimpleNamespace(other=other)  # slopes, positions: not computed from weights
        self.impl.slopes = torch.tensor([0.5, 0.25])
        self._process = process

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        """See there."""
        self._process(self, self.impl.other.weight.data.to(dtype))


def _nested(layer: Attention, weight: torch.Tensor) -> None:
    layer.impl.packed = [{"w": weight.t().contiguous()}]
    layer.view = weight[:2]
    layer.fresh = torch.arange(3.0)


def _in_place(layer: Attention, weight: torch.Tensor) -> None:
    if not hasattr(layer, "copy"):
        layer.register_buffer("copy", torch.empty_like(weight), persistent=False)
    layer.copy.copy_(weight * 2)


def _as_number(layer: Attention, weight: torch.Tensor) -> None:
    layer.largest = float(weight[0].float().max())
    layer.scale = torch.tensor([layer.largest, 1.0], dtype=torch.float32)


def _constant(layer: Attention, weight: torch.Tensor) -> None:
    layer.impl.slopes = torch.tensor([0.5, 0.25]) * weight.shape[0]


def _raises(layer: Attention, weight: torch.Tensor) -> None:
    if hasattr(layer, "packed"):
        raise ValueError("the weight is packed already")
    layer.packed = weight.clone()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patched:
        folder = tmp_path_factory.mktemp("derived")
        patched.setenv("DELTA_SNAPSHOT_STAGE_DIR", str(folder / "stage"))
        make_model("llama_tied", folder / "base")
        with engine(folder / "base") as started:
            yield started


@contextlib.contextmanager
def _added(live: Engine, process: Any, *, runs: int = 1) -> Iterator[tuple[Attention, torch.nn.Module]]:
    """Add such a layer to the live model."""
    source = live.model.model.layers[0].mlp.down_proj
    layer = Attention(source, process)
    for _ in range(runs):
        layer.process_weights_after_loading(torch.bfloat16)
    live.model.extra = layer
    try:
        yield layer, source
    finally:
        del live.model.extra


def _find(live: Engine, source: torch.nn.Module) -> tuple[Any, dict[str, str]]:
    placed = frozenset({source.weight.untyped_storage().data_ptr()})
    with torch.no_grad():
        return find_derived(live.model, placed, live.worker.vllm_config)


def test_derived_tensors_are_found_wherever_they_lie_and_computed_again_where_they_are(live: Engine) -> None:
    config = live.worker.vllm_config
    with _added(live, _nested) as (layer, source), torch.no_grad():
        plan, refused = _find(live, source)
        assert refused == {}
        assert plan.paths == {"extra": {"extra.impl.packed.0.w"}}
        assert plan.touched([source.weight.untyped_storage().data_ptr()]) == ["extra"]
        assert plan.touched([1]) == []
        packed, slopes = layer.impl.packed[0]["w"], layer.impl.slopes
        old, weight = packed.clone(), source.weight.data.clone()
        try:
            source.weight.data.view(torch.int16)[1, 2] ^= 1
            assert list(plan.differing(config)) == ["extra"]
            assert torch.equal(packed, old)
            plan.recompute(["extra"], config)
            assert layer.impl.packed[0]["w"] is packed
            assert layer.impl.slopes is slopes
            assert torch.equal(packed, source.weight.data.t())
            assert plan.differing(config) == {}
        finally:
            source.weight.data.copy_(weight)


def test_tensors_that_are_written_in_place_are_derived_and_constants_are_not(live: Engine) -> None:
    with _added(live, _in_place) as (_, source):
        plan, refused = _find(live, source)
        assert (refused, plan.paths) == ({}, {"extra": {"extra.copy"}})
    with _added(live, _constant) as (_, source):
        plan, refused = _find(live, source)
        assert (refused, dict(plan.paths)) == ({}, {})
    assert _find(live, source)[0].modules == {}  # the attention layers of the model itself


def test_weights_that_are_read_as_numbers_are_followed_into_tensors_and_refused_where_a_number_changes(
    live: Engine,
) -> None:
    config = live.worker.vllm_config
    with _added(live, _as_number) as (layer, source), torch.no_grad():
        plan, refused = _find(live, source)
        assert (refused, plan.paths) == ({}, {"extra": {"extra.scale"}})
        plan.recompute(["extra"], config)
        weight, scale = source.weight.data.clone(), layer.scale.clone()
        try:
            source.weight.data[0, 5] = 1000.0
            with pytest.raises(ApplyError, match="a number that a layer computes from weights has changed"):
                plan.recompute(["extra"], config)
            assert torch.equal(layer.scale, scale)
        finally:
            source.weight.data.copy_(weight)


def test_what_cannot_be_computed_again_is_refused_by_layer_and_reason(live: Engine) -> None:
    with _added(live, _raises), pytest.raises(TensorRefused, match=r"extra \(.*ValueError: the weight is packed"):
        live.init()
    count = itertools.count()

    def drifts(layer: Attention, weight: torch.Tensor) -> None:
        layer.scaled = weight * (1.5 + next(count))

    reason = r"extra \(keeps scaled, computed from weights; computing again makes other"
    with _added(live, drifts) as (layer, _):
        before = layer.scaled.clone()
        with pytest.raises(TensorRefused, match=reason):
            live.init()
        assert torch.equal(layer.scaled, before)
    live.init()


def test_engine_whose_weights_are_not_there_or_do_not_stay_is_refused_by_name(
    live: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sleep and prefetching need a GPU: what they leave behind is made here, of vLLM's own classes."""
    from vllm.config.offload import OffloadConfig
    from vllm.device_allocator.cumem import AllocationData, CuMemAllocator

    asleep = object.__new__(CuMemAllocator)
    asleep.pointer_to_data = {1: AllocationData((0, 1, 2, 3), "kv_cache"), 2: AllocationData((0, 1, 2, 3), "weights")}
    live.init()
    with monkeypatch.context() as patched:
        patched.setattr(CuMemAllocator, "instance", asleep)
        live.init()
        asleep.pointer_to_data[1].is_asleep = True  # woken by tags: weights first
        live.init()
        asleep.pointer_to_data[2].is_asleep = True
        with pytest.raises(ApplyError, match=r"the engine sleeps.*wake_up"):
            live.init()
        with pytest.raises(ApplyError, match="the engine sleeps"):
            prepare(Fitness(LoadPlan(), {}), Update(None, "", {}, {}, {}, (), tuple))
    live.init()
    with monkeypatch.context() as patched:
        patched.setattr(live.worker.vllm_config, "offload_config", OffloadConfig(prefetch={"offload_group_size": 2}))
        with pytest.raises(TensorRefused, match=r"prefetch backend.*--cpu-offload-gb"):
            live.init()
    live.init()


def test_tensor_that_nobody_explains_is_refused_unless_it_is_declared(live: Engine) -> None:
    """A plain layer keeps a copy of its weight, made by something that cannot be run again."""
    norm = live.model.model.norm
    norm.copied = [norm.weight.data.float()]
    norm.ones = torch.ones(7)
    norm.numbers = torch.arange(7)
    try:
        with pytest.raises(TensorRefused, match=r"model\.norm\.copied\.0 \(RMSNorm made it after loading"):
            live.init()
        live.init(skip=["model.norm.copied.*"])
        reached = frozenset({norm.weight.untyped_storage().data_ptr()})
        assert list(find_unexplained(live.model, reached, {}, live.worker.vllm_config)) == ["model.norm.copied.0"]
    finally:
        del norm.copied, norm.ones, norm.numbers
    live.init()
