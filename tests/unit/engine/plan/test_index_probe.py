"""The index probe against loaders that rearrange before they copy, and against loaders that compute."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.tensors import rng_of
from tests.support.toys import Load, Toy, full_patch, specs_of, tensor_of, write_through
from vllm_delta_snapshot.engine.plan.index_probe import _codes, _positions, probe_index
from vllm_delta_snapshot.engine.plan.load_plan import LoadPlan, record_load_plan, with_probed_places
from vllm_delta_snapshot.engine.plan.recorder import LiveStorages
from vllm_delta_snapshot.host.places import Segment, Table
from vllm_delta_snapshot.types import TensorSpec

PERMUTATION = torch.from_numpy(rng_of("rows").permutation(24))


def turned(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Transpose, as convolutions stored as linears do."""
    toy.w.data.copy_(tensor.t().contiguous().view(toy.w.shape))


def interleaved(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Even rows first, then odd ones."""
    toy.w.data.view(24, 10).copy_(torch.cat([tensor[::2], tensor[1::2]]))


def swapped(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Gate and up the other way around, in one tensor."""
    gate, up = tensor.chunk(2)
    toy.w.data.view(24, 10).copy_(torch.cat([up, gate]))


def one_by_one(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Copy clones of chunks to different ends."""
    for place, part in enumerate(tensor.clone().chunk(4)):
        toy.w.data.view(24, 10)[18 - 6 * place : 24 - 6 * place].copy_(part)


def mixed_heads(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """From halves to pairs, as rotary embeddings of another convention want."""
    toy.w.data.view(24, 10).copy_(tensor.view(3, 2, 4, 10).transpose(1, 2).reshape(24, 10))


def flipped(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Last row first."""
    toy.w.data.view(24, 10).copy_(tensor.flip(0))


def shuffled(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Rows in an order that nobody can guess."""
    toy.w.data.view(24, 10).copy_(tensor[PERMUTATION])


def second_rank(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """The second half of the transpose, as a tensor-parallel rank keeps it."""
    toy.w.data.view(-1)[:120].view(5, 24).copy_(tensor.t().contiguous().narrow(0, 5, 5))


def padded(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Keep half, and fill the rest."""
    rows = toy.w.data.view(24, 10)
    rows[12:].zero_()
    rows[:12, :8].copy_(tensor[::2, 1:9].clone())
    rows[:12, 8:].fill_(1.0)
    rows[20:].fill_(1.0)


def twice(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Two copies in two parameters, as tied weights are."""
    toy.w.data.view(24, 10).copy_(tensor.clone())
    toy.tied.data.copy_(tensor.clone())


def repeated(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """All of it twice in one copy, as replicated heads are."""
    toy.two.data.copy_(tensor.repeat(2, 1))


def raw(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Through bytes of the same width."""
    toy.w.data.view(24, 10).copy_(tensor.clone() if tensor.is_floating_point() else tensor.view(torch.uint32).clone())


REARRANGING = [
    turned, interleaved, swapped, one_by_one, mixed_heads, flipped, shuffled, second_rank, padded, twice, repeated, raw
]  # fmt: skip
SPEC = specs_of(w=(24, 10))["w"]


def toy_of(load: Load, dtype: torch.dtype = torch.bfloat16) -> Toy:
    return Toy(load, dtype, w=(10, 24), tied=(24, 10), two=(48, 10))


def probed(toy: Toy, spec: TensorSpec = SPEC) -> LoadPlan:
    return with_probed_places(toy, record_load_plan(toy, {spec.name: spec}), [spec])


@pytest.mark.parametrize("load", REARRANGING)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_writing_through_probed_places_equals_loading(load: Load, dtype: torch.dtype) -> None:
    planned, loaded = toy_of(load, dtype), toy_of(load, dtype)
    plan = probed(planned)
    assert plan.problems == {}
    assert plan.is_exact("w")
    # The base first, by the loader; then other values to be patched in.
    for seed in range(2):
        patch = full_patch(SPEC, seed)
        loaded.load_weights([("w", tensor_of(patch))])
        if seed == 0:
            planned.load_weights([("w", tensor_of(patch))])
        write_through(plan, [patch])
        assert planned.bits() == loaded.bits()


@pytest.mark.parametrize("load", REARRANGING)
def test_probing_changes_no_weight(load: Load) -> None:
    toy = toy_of(load)
    before = toy.bits()
    probed(toy)
    assert toy.bits() == before


@pytest.mark.parametrize(
    ("load", "kinds"),
    [
        (turned, [Segment]),
        (swapped, [Segment] * 2),
        (interleaved, [Segment] * 2),
        (one_by_one, [Segment] * 4),
        (second_rank, [Segment]),
        (flipped, [Table]),
        (shuffled, [Table]),
    ],
)
def test_regular_rearrangements_are_few_segments_and_others_a_table(load: Load, kinds: list[type]) -> None:
    assert [type(piece) for piece in probed(toy_of(load)).places.pieces["w"]] == kinds


def test_part_that_a_rank_keeps_is_all_that_it_has() -> None:
    [piece] = probed(toy_of(second_rank)).places.pieces["w"]
    assert piece.size == 120
    whole = probed(toy_of(turned)).places.pieces["w"][0]
    assert piece.box != whole.box


def test_tensor_that_the_loader_leaves_out_has_no_pieces_and_no_problem() -> None:
    plan = probed(toy_of(lambda toy, name, tensor: None))
    assert plan.places.pieces == {}
    assert plan.problems == {}


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (7,), (2, 3, 4, 5), (3, 1, 2)])
def test_tensors_of_any_rank_can_be_probed(shape: tuple[int, ...]) -> None:
    def load(toy: Toy, name: str, tensor: torch.Tensor) -> None:
        toy.w.data.copy_(tensor.permute(list(reversed(range(tensor.ndim)))).clone())

    spec = specs_of(w=shape)["w"]
    planned, loaded = (Toy(load, w=tuple(reversed(shape))) for _ in range(2))
    patch = full_patch(spec)
    write_through(probed(planned, spec), [patch])
    loaded.load_weights([("w", tensor_of(patch))])
    assert planned.bits() == loaded.bits()


def test_many_irregular_parts_become_one_table() -> None:
    rows = torch.from_numpy(rng_of("many").permutation(500))

    def load(toy: Toy, name: str, tensor: torch.Tensor) -> None:
        toy.w.data.copy_(tensor[rows])

    spec = specs_of(w=(500, 3))["w"]
    planned, loaded = (Toy(load, w=(500, 3)) for _ in range(2))
    plan = probed(planned, spec)
    [table] = plan.places.pieces["w"]
    assert isinstance(table, Table)
    assert np.all(np.diff(table.source) > 0)
    write_through(plan, [full_patch(spec)])
    loaded.load_weights([("w", tensor_of(full_patch(spec)))])
    assert planned.bits() == loaded.bits()


def _rows(toy: Toy) -> torch.Tensor:
    return toy.w.data.view(24, 10)


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (lambda w: w + 1, "computes on the values"),
        (lambda w: w - 1, "computes on the values"),
        (lambda w: w * 2, "computes on the values"),
        (lambda w: w * -1, "computes on the values"),
        (lambda w: -w, "computes on the values"),
        (lambda w: w.abs(), "computes on the values"),
        (lambda w: w.clamp(-1000, 1000), "computes on the values"),
        (lambda w: w.float().to(w.dtype), "computes on the values"),
        (lambda w: torch.where(w > 0, w, 0 * w), "computes on the values"),
        (lambda w: w.cumsum(0, dtype=w.dtype), "computes on the values"),
        (lambda w: w / 2, "converts it to torch.float32"),
        (lambda w: w.to(torch.bfloat16), "converts it to torch.bfloat16"),
        (lambda w: w.clamp(min=1e-6), "converts it to torch.float32"),
        (lambda w: w.to(torch.int64), "converts it to torch.int64"),
        (lambda w: w.sum(0, keepdim=True).expand(24, 10), "converts it to torch.int64"),
        (lambda w: torch.zeros(24, 10), "converts it to torch.float32"),
        (lambda w: w.mean(0, keepdim=True), "cannot be probed"),
        (lambda w: w[:, :1], "spreads"),
        (lambda w: w[:1].expand(24, 10), "repeats elements"),
        (lambda w: w[:12].repeat_interleave(2, dim=0), "repeats elements"),
        (lambda w: torch.cat([w[:1], w[:-1]]), "repeats elements"),
        (lambda w: torch.cat([w[:20], w[10:14]]), "repeats elements"),
    ],
)
def test_loader_that_computes_or_repeats_is_refused_with_the_reason(compute, reason: str) -> None:
    def load(toy: Toy, name: str, tensor: torch.Tensor) -> None:
        _rows(toy).copy_(compute(tensor))

    toy = toy_of(load)
    before = toy.bits()
    found = probe_index(toy, SPEC, LiveStorages(toy, {}))
    assert isinstance(found, str)
    assert reason in found
    assert toy.bits() == before


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        (lambda rows: rows.mul_(2), "writes by aten.mul_"),
        (lambda rows: rows.add_(1), "writes by aten.add_"),
        (lambda rows: rows.copy_(rows + 1), "converts it to torch.bfloat16"),
        (lambda rows: rows[3:5].zero_(), "overwrites"),
        (lambda rows: rows.fill_(1.0), "overwrites"),
        (lambda rows: rows.t()[2].fill_(0.0), "overwrites"),
        (lambda rows: rows.fill_(torch.tensor(0.0)), "writes by aten.fill_"),
    ],
)
def test_loader_that_changes_what_it_has_copied_is_refused(after, reason: str) -> None:
    def load(toy: Toy, name: str, tensor: torch.Tensor) -> None:
        _rows(toy).copy_(tensor.clone())
        after(_rows(toy))

    toy = toy_of(load)
    found = probe_index(toy, SPEC, LiveStorages(toy, {}))
    assert isinstance(found, str)
    assert reason in found


def test_loader_that_fails_is_refused_with_its_error() -> None:
    def load(toy: Toy, name: str, tensor: torch.Tensor) -> None:
        if tensor.dtype != torch.bfloat16:
            raise TypeError(tensor.dtype)

    toy = toy_of(load)
    found = probe_index(toy, SPEC, LiveStorages(toy, {}))
    assert found == "its loader cannot be probed (TypeError: torch.int32)"


def test_tensor_that_goes_into_a_layer_of_another_form_is_refused_with_the_reason() -> None:
    toy = toy_of(turned)
    live = LiveStorages(toy, {toy.w.untyped_storage().data_ptr(): "layers.0 (packed)"})
    assert probe_index(toy, SPEC, live) == "layers.0 (packed)"


def test_refused_tensor_is_a_problem_of_the_plan() -> None:
    def load(toy: Toy, name: str, tensor: torch.Tensor) -> None:
        _rows(toy).copy_(tensor + 1)

    plan = probed(toy_of(load))
    assert "computes" in plan.problems["w"]
    assert not plan.is_exact("w")


@pytest.mark.parametrize("bits", [32, 64])
def test_codes_name_their_elements_and_changed_ones_name_none(bits: int) -> None:
    codes = _codes(100_000, bits)
    assert codes.dtype.itemsize * 8 == bits
    assert _positions(codes, bits).tolist() == list(range(100_000))
    for changed in (codes + 1, codes * 2, -codes, codes // 2, codes ^ 1, ~codes, np.zeros_like(codes)):
        positions = _positions(changed, bits)
        assert ((positions < 0) | (positions >= codes.size)).mean() > 0.99
