"""The load plan against small models whose loaders do what real ones do, and what they must not."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.tensors import bits_of
from tests.support.toys import Load, Pairs, Toy, full_patch, live_lanes, specs_of, tensor_of, write_through
from vllm_delta_snapshot.engine.plan.load_plan import LoadPlan, record_load_plan, with_probed_places
from vllm_delta_snapshot.errors import ApplyError
from vllm_delta_snapshot.host.mapping import map_update
from vllm_delta_snapshot.types import TensorPatch, TensorSpec

SPECS = specs_of(q=(4, 6), k=(2, 6), e=(0, 6))
ROWS = {"q": slice(0, 4), "k": slice(4, 6), "e": slice(6, 6)}


def fused(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Copy into a slice of the fused weight, as merged linears do."""
    toy.qk.data[ROWS[name]].copy_(tensor)


def assigned(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Write by item assignment, which is a copy too."""
    toy.qk.data[ROWS[name]] = tensor


def second_half(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Keep the last three columns, as a tensor-parallel rank does."""
    toy.qk.data[ROWS[name], 3:].copy_(tensor.narrow(1, 3, 3))


def transposed(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Store the transpose."""
    toy.qk.data[:, ROWS[name]].copy_(tensor.t())


def interleaved(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Every second row of two."""
    rows = toy.qk.data[name == "k" :: 2]
    rows[: min(3, tensor.shape[0])].copy_(tensor[:3])


PLAIN = [fused, assigned, second_half, transposed, interleaved]


@pytest.mark.parametrize("load", PLAIN)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_writing_through_the_plan_equals_loading(load: Load, dtype: torch.dtype) -> None:
    planned, loaded = Toy(load, dtype), Toy(load, dtype)
    plan = record_load_plan(planned, SPECS)
    assert plan.problems == {}
    for spec in SPECS.values():
        write_through(plan, [full_patch(spec)])
        loaded.load_weights([(spec.name, tensor_of(full_patch(spec)))])
    assert planned.bits() == loaded.bits()


@pytest.mark.parametrize("load", PLAIN)
def test_recording_changes_no_weight(load: Load) -> None:
    toy = Toy(load)
    before = toy.bits()
    record_load_plan(toy, SPECS)
    assert toy.bits() == before


def filled(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Write one value everywhere."""
    toy.qk.data[ROWS[name]].fill_(1.0)


def added(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Compute in place."""
    toy.qk.data[ROWS[name]].add_(tensor)


def indexed(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Write by an index tensor."""
    toy.qk.data.index_copy_(0, torch.arange(6)[ROWS[name]], tensor)


def put_out(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Write by an output argument."""
    torch.mul(tensor, 2, out=toy.qk.data[ROWS[name]])


def scaled(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Load other values than the checkpoint's."""
    toy.qk.data[ROWS[name]].copy_(tensor * 2)


def repeated(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Spread one row over several."""
    if tensor.numel():
        toy.qk.data[ROWS[name]].copy_(tensor[:1].expand(tensor.shape[0], 6))


def broadcast(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Let copy_ spread one row."""
    if tensor.numel():
        toy.qk.data[ROWS[name]].copy_(tensor[:1])


def scaled_after(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Copy, then compute in place."""
    fused(toy, name, tensor)
    toy.qk.data[ROWS[name]].mul_(2)


def replaced_after(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Copy, then put something computed from it there."""
    fused(toy, name, tensor)
    rows = toy.qk.data[ROWS[name]]
    rows.copy_(-torch.exp(rows.float()))


def zeroed_after(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Copy, then clear a row, as a padding index wants."""
    fused(toy, name, tensor)
    toy.qk.data[1].zero_()


COMPUTING = [
    filled, added, indexed, put_out, scaled, repeated, broadcast, scaled_after, replaced_after, zeroed_after
]  # fmt: skip


@pytest.mark.parametrize("load", COMPUTING)
def test_tensor_of_a_loader_that_does_not_just_copy_has_no_exact_place(load: Load) -> None:
    toy = Toy(load)
    before = toy.bits()
    plan = record_load_plan(toy, SPECS)
    assert not plan.is_exact("q")
    assert toy.bits() == before


@pytest.mark.parametrize("load", COMPUTING)
def test_tensor_without_an_exact_place_has_no_place_at_all(load: Load) -> None:
    # Else an update would write it where the user was told that it is left out.
    plan = record_load_plan(Toy(load), SPECS)
    assert map_update([full_patch(SPECS["q"])], plan.places) == []


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (added, "its loader writes by aten.add_.Tensor, not by a copy"),
        (repeated, "its loader repeats elements"),
        (broadcast, "its loader spreads [1, 6] over [4, 6]"),
        (scaled_after, "its loader writes by aten.mul_.Tensor, not by a copy"),
        (replaced_after, "its loader computes on the weight after copying it"),
        (zeroed_after, "its loader writes by aten.zero_.default, not by a copy"),
    ],
)
def test_problem_says_what_the_loader_does(load: Load, reason: str) -> None:
    assert record_load_plan(Toy(load), SPECS).problems["q"] == reason


def test_computing_on_one_weight_is_no_problem_of_another() -> None:
    def load(toy: Toy, name: str, tensor: torch.Tensor) -> None:
        (scaled_after if name == "q" else fused)(toy, name, tensor)

    plan = record_load_plan(Toy(load), SPECS)
    assert list(plan.problems) == ["q"]
    assert plan.is_exact("k")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.int16])
def test_type_that_no_value_converts_to_exactly_is_a_problem(dtype: torch.dtype) -> None:
    problems = record_load_plan(Toy(fused, dtype), SPECS).problems
    assert problems["q"] == f"it is torch.bfloat16 in the checkpoint but {dtype} in the engine"


@pytest.mark.parametrize("code", ["F8_E4M3", "I32", "BOOL"])
def test_type_that_converts_to_no_value_exactly_is_a_problem(code: str) -> None:
    specs = {"q": TensorSpec("q", (4, 6), code)}
    assert "in the engine" in record_load_plan(Toy(fused), specs).problems["q"]


def test_layer_whose_form_is_another_is_a_problem_with_its_reason() -> None:
    toy = Toy(fused)
    plan = record_load_plan(toy, SPECS, reasons={toy.qk.untyped_storage().data_ptr(): "layers.0 (Fp8Method)"})
    assert plan.problems == {"q": "layers.0 (Fp8Method)", "k": "layers.0 (Fp8Method)"}


def test_loader_that_rebinds_parameters_is_refused_and_undone() -> None:
    def rebind(toy: Toy, name: str, tensor: torch.Tensor) -> None:
        toy.qk.data = torch.zeros(6, 6, dtype=torch.bfloat16)

    toy = Toy(rebind)
    before = toy.bits()
    with pytest.raises(ApplyError, match="replaces parameters"):
        record_load_plan(toy, SPECS)
    assert toy.bits() == before


def test_loader_that_fails_is_refused() -> None:
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

    def sliced(toy: Toy, name: str, tensor: torch.Tensor) -> None:
        toy.part.data.copy_(tensor[:, 2**31 - 4 :])

    toy = Toy(sliced, part=(3, 4))
    toy.part.data.zero_()
    plan = record_load_plan(toy, {spec.name: spec})
    positions = np.array([2**31 - 1, 2 * 2**31 + 2**31 - 2], dtype=np.int64)
    write_through(plan, [TensorPatch(spec, positions, np.array([0x3F80, 0x8000], dtype=np.uint16))])
    assert bits_of(toy.part).reshape(3, 4).tolist() == [[0, 0, 0, 0x3F80], [0, 0, 0, 0], [0, 0, 0x8000, 0]]


def test_buffers_have_places_too_and_only_written_storages_are_numbered() -> None:
    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.zeros(3), requires_grad=False)
            self.register_buffer("steps", torch.zeros(4, dtype=torch.int64))

        def load_weights(self, pairs: Pairs) -> None:
            for _, tensor in pairs:
                self.steps.copy_(tensor)

    spec = TensorSpec("steps", (4,), "I64")
    model = Buffered()
    plan = record_load_plan(model, {"steps": spec})
    assert len(plan.storages) == 1
    write_through(plan, [full_patch(spec)])
    assert bits_of(model.steps).tolist() == full_patch(spec).values.tolist()


def test_plan_is_current_until_a_parameter_is_created_anew() -> None:
    toy = Toy(fused)
    plan = record_load_plan(toy, SPECS)
    assert plan.is_current(toy)
    write_through(plan, [full_patch(SPECS["q"])])
    assert plan.is_current(toy)
    toy.qk = nn.Parameter(toy.qk.detach().clone(), requires_grad=False)
    assert not plan.is_current(toy)


def test_summary_names_boxes_of_exact_tensors_alone() -> None:
    def load(toy: Toy, name: str, tensor: torch.Tensor) -> None:
        (scaled_after if name == "q" else second_half)(toy, name, tensor)

    summary = record_load_plan(Toy(load), SPECS).summary()
    assert {name: sum(size for _, size in boxes) for name, boxes in summary.boxes.items()} == {"k": 6}
    assert list(summary.problems) == ["q"]


def test_two_workers_with_the_same_layout_have_the_same_places() -> None:
    one, other = (record_load_plan(Toy(fused), SPECS) for _ in range(2))
    assert one.places.id == other.places.id
    assert one.places.id != record_load_plan(Toy(transposed), SPECS).places.id


def test_empty_plan_maps_nothing() -> None:
    assert live_lanes(LoadPlan(), [full_patch(SPECS["q"])]) == []


def ignored(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Look at the form alone, as loaders do that filter by name and shape."""
    if name != "k":
        return fused(toy, name, tensor)
    assert tensor.t().narrow(0, 1, 3)[:, 1:].view(3, 1).shape == (3, 1)
    return None


def read_by_torch(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Compute from it, into what is no parameter."""
    if name == "k":
        toy.__dict__["scale"] = float(tensor.abs().max())
    else:
        fused(toy, name, tensor)


def read_by_numpy(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Compute from it behind torch's back."""
    if name == "k":
        toy.__dict__["sum"] = int(tensor.view(torch.int16).numpy().sum())
    else:
        fused(toy, name, tensor)


def put_aside(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Wait for another one, as for a weight's scale."""
    if name == "k":
        toy.__dict__["pending"] = tensor[1:]
    else:
        fused(toy, name, tensor)


def sent_nowhere(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Give it to a parameter without memory, as layers are while they are reloaded: nothing of it is read."""
    fused(toy, name, tensor.to("meta") if name == "k" else tensor)


def written_nowhere(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """The same in another way."""
    if name == "k":
        torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").copy_(tensor)
    else:
        fused(toy, name, tensor)


def zeroed(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Load zeros where another rank adds the bias."""
    if name == "k":
        tensor.zero_()
    fused(toy, name, tensor)


@pytest.mark.parametrize(
    ("load", "unread"),
    [
        (ignored, {"k"}),
        (read_by_torch, set()),
        (read_by_numpy, set()),
        (put_aside, set()),
        (sent_nowhere, set()),
        (written_nowhere, set()),
        (zeroed, set()),
        (fused, set()),
    ],
)
def test_only_what_nobody_reads_or_puts_aside_is_unread(load: Load, unread: set[str]) -> None:
    """In any way: the memory of the stand-ins tells."""
    specs = specs_of(q=(4, 6), k=(2, 6))
    for _ in range(2):
        assert record_load_plan(Toy(load), specs).unread == unread


def test_unread_tensor_that_only_a_cycle_of_garbage_holds_is_unread() -> None:
    def dropped(toy: Toy, name: str, tensor: torch.Tensor) -> None:
        if name == "k":
            cycle = [tensor]
            cycle.append(cycle)
        else:
            fused(toy, name, tensor)

    gc.disable()
    try:
        assert record_load_plan(Toy(dropped), specs_of(q=(4, 6), k=(2, 6))).unread == {"k"}
    finally:
        gc.enable()


def test_what_is_unread_stays_so_in_plans_made_of_a_plan() -> None:
    plan = record_load_plan(Toy(ignored), specs_of(q=(4, 6), k=(2, 6)))
    assert plan.without(["q"]).unread == plan.summary().unread == {"k"}
    assert with_probed_places(Toy(ignored), plan, []).unread == {"k"}
