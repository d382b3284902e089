"""The load plan against small models whose loaders do what real ones do, and what they must not."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.tensors import bits_of, random_bits, to_torch
from vllm_delta_snapshot.engine.live import map_patch
from vllm_delta_snapshot.engine.load_plan import LoadPlan, record_load_plan
from vllm_delta_snapshot.errors import ApplyError
from vllm_delta_snapshot.types import TensorPatch, TensorSpec

SPECS = {
    spec.name: spec
    for spec in (TensorSpec("q", (4, 6), "BF16"), TensorSpec("k", (2, 6), "BF16"), TensorSpec("e", (0, 6), "BF16"))
}
Pairs = Iterable[tuple[str, torch.Tensor]]


class Toy(nn.Module):
    """A model with one fused weight, and the loader it is given."""

    def __init__(self, load: Callable[[Toy, str, torch.Tensor], None], dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.randn(6, 6).to(dtype), requires_grad=False)
        self._load = load

    def load_weights(self, pairs: Pairs) -> None:
        """Load each pair."""
        for name, tensor in pairs:
            self._load(self, name, tensor)


def _rows(name: str) -> slice:
    return {"q": slice(0, 4), "k": slice(4, 6), "e": slice(6, 6)}[name]


def fused(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Copy into a slice of the fused weight, as merged linears do."""
    toy.qk.data[_rows(name)].copy_(tensor)


def assigned(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Write by item assignment, which is a copy too."""
    toy.qk.data[_rows(name)] = tensor


def second_half(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Keep the last three columns, as a tensor-parallel rank does."""
    toy.qk.data[_rows(name), 3:].copy_(tensor.narrow(1, 3, 3))


def transposed(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Store the transpose."""
    toy.qk.data[:, _rows(name)].copy_(tensor.t())


def _full(spec: TensorSpec) -> TensorPatch:
    return TensorPatch(spec, np.arange(spec.numel, dtype=np.int32), random_bits(spec.dtype, spec.numel, spec.name))


@pytest.mark.parametrize("load", [fused, assigned, second_half, transposed])
def test_plan_maps_elements_to_where_the_loader_puts_them(load: Callable[[Toy, str, torch.Tensor], None]) -> None:
    planned, loaded = Toy(load), Toy(load)
    loaded.qk.data.copy_(planned.qk)
    plan = record_load_plan(planned, SPECS)
    for spec in SPECS.values():
        patch = _full(spec)
        map_patch(plan, patch).write_new()
        load(loaded, spec.name, to_torch(patch.values, spec))
    assert plan.problems == {}
    assert np.array_equal(bits_of(planned.qk), bits_of(loaded.qk))


@pytest.mark.parametrize("load", [fused, assigned, second_half, transposed])
def test_plan_recording_changes_no_weight(load: Callable[[Toy, str, torch.Tensor], None]) -> None:
    toy = Toy(load)
    before = bits_of(toy.qk).copy()
    record_load_plan(toy, SPECS)
    assert np.array_equal(bits_of(toy.qk), before)


def filled(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Write one value everywhere."""
    toy.qk.data[_rows(name)].fill_(1.0)


def added(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Compute in place."""
    toy.qk.data[_rows(name)].add_(tensor)


def indexed(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Write by an index tensor."""
    rows = torch.arange(6)[_rows(name)]
    toy.qk.data.index_copy_(0, rows, tensor)


def scaled(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Load other values than the checkpoint's."""
    toy.qk.data[_rows(name)].copy_(tensor * 2)


def repeated(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Spread one row over several."""
    if tensor.numel():
        toy.qk.data[_rows(name)].copy_(tensor[:1].expand(tensor.shape[0], 6))


@pytest.mark.parametrize("load", [filled, added, indexed, scaled, repeated])
def test_plan_of_a_loader_that_does_not_just_copy_has_no_exact_place(
    load: Callable[[Toy, str, torch.Tensor], None],
) -> None:
    toy = Toy(load)
    before = bits_of(toy.qk).copy()
    plan = record_load_plan(toy, SPECS)
    assert not plan.is_exact("q")
    assert np.array_equal(bits_of(toy.qk), before)


def test_plan_names_the_reason_when_the_engine_has_another_dtype() -> None:
    plan = record_load_plan(Toy(fused, torch.float32), SPECS)
    assert plan.problems["q"] == "it is torch.bfloat16 in the checkpoint but torch.float32 in the engine"


def test_plan_of_a_loader_that_rebinds_parameters_is_refused_and_undone() -> None:
    def rebind(toy: Toy, name: str, tensor: torch.Tensor) -> None:
        toy.qk.data = torch.zeros(6, 6, dtype=torch.bfloat16)

    toy = Toy(rebind)
    before = bits_of(toy.qk).copy()
    with pytest.raises(ApplyError, match="replaces parameters"):
        record_load_plan(toy, SPECS)
    assert np.array_equal(bits_of(toy.qk), before)


def test_plan_of_a_loader_that_fails_is_refused() -> None:
    def fail(toy: Toy, name: str, tensor: torch.Tensor) -> None:
        raise KeyError(name)

    with pytest.raises(ApplyError, match="KeyError: 'q'"):
        record_load_plan(Toy(fail), SPECS)


def test_plan_leaves_out_what_the_loader_skips() -> None:
    def skip(toy: Toy, name: str, tensor: torch.Tensor) -> None:
        if name == "q":
            fused(toy, name, tensor)

    plan = record_load_plan(Toy(skip), SPECS)
    assert plan.is_exact("q")
    assert not plan.is_exact("k")
    assert "k" not in plan.problems


def test_plan_reserves_addresses_and_no_memory_for_large_tensors() -> None:
    spec = TensorSpec("huge", (3, 2**31), "BF16")  # 12.9 GB, more than 2**32 elements

    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Parameter(torch.zeros(3, 4, dtype=torch.bfloat16), requires_grad=False)

        def load_weights(self, pairs: Pairs) -> None:
            for _, tensor in pairs:
                self.part.data.copy_(tensor[:, 2**31 - 4 :])

    model = Sliced()
    plan = record_load_plan(model, {spec.name: spec})
    positions = np.array([2**31 - 1, 2 * 2**31 + 2**31 - 2], dtype=np.int64)
    values = np.array([0x3F80, 0x8000], dtype=np.uint16)
    map_patch(plan, TensorPatch(spec, positions, values)).write_new()
    assert bits_of(model.part).reshape(3, 4).tolist() == [[0, 0, 0, 0x3F80], [0, 0, 0, 0], [0, 0, 0x8000, 0]]


def test_mapped_patch_digest_is_unknown_when_a_part_lies_elsewhere() -> None:
    plan = record_load_plan(Toy(second_half), SPECS)
    mapped = map_patch(plan, _full(SPECS["q"]))
    assert mapped.digest_of(mapped.gather()) is None


def test_empty_plan_maps_nothing() -> None:
    assert map_patch(LoadPlan(), _full(SPECS["q"])).places == []
