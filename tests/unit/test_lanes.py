"""Lanes at the live weights: what is written, what was there, and the proof of it, also where types differ."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tests.support.changes import as_difference
from tests.support.tensors import (
    TORCH_CODES,
    apply_by_hand,
    bits_of,
    random_bits,
    random_patch,
    rng_of,
    special_bits,
    to_torch,
)
from tests.support.toys import Toy, full_patch, live_lanes, specs_of, tensor_of
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.engine.lanes import LiveLane, digest_runs, ready_lanes, seem_old, undo_lanes, write_lanes
from vllm_delta_snapshot.engine.load_plan import LoadPlan, record_load_plan
from vllm_delta_snapshot.errors import ApplyError, BaseMismatch
from vllm_delta_snapshot.format.digest import patch_digest
from vllm_delta_snapshot.stage.mapping import map_update
from vllm_delta_snapshot.types import Change, TensorDifference, TensorPatch, TensorSpec, position_dtype

EXACT = [("BF16", torch.float32), ("F16", torch.float32), ("BF16", torch.float64), ("F32", torch.float64)]
LOSSY = [("BF16", torch.float16), ("F32", torch.bfloat16), ("F16", torch.bfloat16), ("F64", torch.float32)]


def load(toy: Toy, name: str, tensor: torch.Tensor) -> None:
    """Two tensors in one parameter, one of them turned."""
    rows = {"a": toy.w.data[:4], "b": toy.w.data[4:].t()}[name]
    rows.copy_(tensor)


def finite_bits(spec: TensorSpec, *seed: object) -> Bits:
    """Any bits but those of NaN, whose way through other types is up to the machine."""
    bits = random_bits(spec.dtype, spec.numel, spec.name, *seed)
    values = to_torch(bits, spec).reshape(-1).to(torch.float64).numpy()
    return np.where(np.isnan(values), np.zeros_like(bits), bits)


def special_values(spec: TensorSpec) -> Bits:
    """NaNs of all kinds, infinities, zeros, subnormals."""
    return rng_of(spec).choice(special_bits(spec.dtype), spec.numel)


class Engine:
    """A model that has loaded a checkpoint of two tensors, and its plan."""

    def __init__(self, code: str = "BF16", dtype: torch.dtype = torch.bfloat16, *, with_nan: bool = False) -> None:
        self.specs = {s.name: dataclasses.replace(s, dtype=code) for s in specs_of(a=(4, 6), b=(6, 5)).values()}
        self.toy = Toy(load, dtype, w=(9, 6))
        self.plan: LoadPlan = record_load_plan(self.toy, self.specs)
        make = special_values if with_nan else finite_bits
        self.old = {spec.name: make(spec) for spec in self.specs.values()}
        self.load({name: to_torch(bits, self.specs[name]) for name, bits in self.old.items()})

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Load by the model's own loader."""
        self.toy.load_weights(tensors.items())

    def patches(self) -> list[TensorPatch]:
        """An update of almost all elements."""
        drawn = [random_patch(spec, spec.numel - 2) for spec in self.specs.values()]
        return [TensorPatch(p.spec, p.positions, finite_bits(p.spec, "new")[p.positions]) for p in drawn]

    def changes(self, kind: str) -> list[Change]:
        """The same update, in another form."""
        if kind == "patches":
            return list(self.patches())
        made: list[Change] = []
        for patch in self.patches():
            difference = as_difference(patch, self.old[patch.spec.name])
            if kind == "mixed":
                mask = rng_of(patch.spec.name).random(patch.changed) < 0.5
                difference = TensorDifference(
                    patch.spec, patch.positions, np.where(mask, patch.values, difference.values), mask
                )
            made.append(difference)
        return made[:1] + list(self.patches())[1:] if kind == "side by side" else made

    def old_digest(self, change: Change) -> int:
        """What the trainer says of the values that a change replaces."""
        return patch_digest(change.spec, change.positions, self.old[change.spec.name][change.positions])

    def new_digest(self, change: Change) -> int:
        """What the trainer says of the values that a change brings."""
        new = apply_by_hand(self.old[change.spec.name], change)
        return patch_digest(change.spec, change.positions, new[change.positions])


KINDS = ["patches", "differences", "mixed", "side by side"]
kinds = pytest.mark.parametrize("kind", KINDS)


def digests_of(engine: Engine, lanes: list[LiveLane], *, is_new: bool = False) -> dict[str, int | None]:
    return {name: d for lane in lanes for name, _, d in digest_runs(engine.plan, lane, is_new=is_new)}


SAME = [("BF16", torch.bfloat16), *EXACT]
UPDATES = [(kind, *types) for kind in KINDS for types in SAME] + [("patches", *types) for types in LOSSY]


@pytest.mark.parametrize(("kind", "code", "dtype"), UPDATES)
def test_written_values_equal_the_loaders(kind: str, code: str, dtype: torch.dtype) -> None:
    engine, loaded = Engine(code, dtype), Engine(code, dtype)
    patches = engine.patches()
    assert all(write_lanes(live_lanes(engine.plan, engine.changes(kind))))
    bits = {name: old.copy() for name, old in engine.old.items()}
    for patch in patches:
        bits[patch.spec.name][patch.positions] = patch.values
    loaded.load({name: to_torch(b, engine.specs[name]) for name, b in bits.items()})
    assert engine.toy.bits() == loaded.toy.bits()


@kinds
@pytest.mark.parametrize(("code", "dtype"), SAME)
def test_both_ends_are_proven_where_types_lose_nothing(kind: str, code: str, dtype: torch.dtype) -> None:
    engine = Engine(code, dtype)
    changes = engine.changes(kind)
    lanes = live_lanes(engine.plan, changes)
    assert digests_of(engine, lanes) == {change.spec.name: engine.old_digest(change) for change in changes}
    new = {change.spec.name: engine.new_digest(change) for change in changes}
    assert digests_of(engine, lanes, is_new=True) == new
    assert all(write_lanes(lanes))
    assert digests_of(engine, live_lanes(engine.plan, engine.patches())) == new


@pytest.mark.parametrize(("code", "dtype"), LOSSY)
def test_old_values_are_unknown_where_types_lose_something(code: str, dtype: torch.dtype) -> None:
    engine = Engine(code, dtype)
    lanes = live_lanes(engine.plan, engine.patches())
    assert digests_of(engine, lanes) == digests_of(engine, lanes, is_new=True) == {"a": None, "b": None}


@pytest.mark.parametrize("kind", ["differences", "mixed", "side by side"])
@pytest.mark.parametrize(("code", "dtype"), LOSSY)
def test_differences_are_refused_where_types_lose_something(kind: str, code: str, dtype: torch.dtype) -> None:
    engine = Engine(code, dtype)
    before = engine.toy.bits()
    with pytest.raises(ApplyError, match="differences cannot be added") as caught:
        live_lanes(engine.plan, engine.changes(kind))
    assert (caught.value.tensor, caught.value.expected, caught.value.found) == ("a", code, dtype)
    assert engine.toy.bits() == before


@pytest.mark.parametrize(("code", "dtype"), SAME)
def test_old_values_that_are_not_numbers_are_no_drift(code: str, dtype: torch.dtype) -> None:
    engine = Engine(code, dtype, with_nan=True)
    patches = engine.patches()
    found = digests_of(engine, live_lanes(engine.plan, patches))
    for patch in patches:
        assert found[patch.spec.name] in (engine.old_digest(patch), None)


def test_old_digest_is_of_the_pieces_that_a_patch_touches_with_their_boxes() -> None:
    engine = Engine()
    [patch] = [p for p in engine.patches() if p.spec.name == "b"]
    [lane] = live_lanes(engine.plan, [patch])
    [(name, box, digest)] = digest_runs(engine.plan, lane)
    assert (name, digest) == ("b", engine.old_digest(patch))
    assert box == engine.plan.places.pieces["b"][0].box


@kinds
@pytest.mark.parametrize(("code", "dtype"), SAME)
def test_drift_changes_the_digest_or_is_found_at_once(kind: str, code: str, dtype: torch.dtype) -> None:
    engine = Engine(code, dtype)
    changes = engine.changes(kind)
    place = int(live_lanes(engine.plan, changes)[0].index[0])
    engine.plan.storages[0].flat[place] ^= 1
    if dtype is not torch.bfloat16:
        with pytest.raises(BaseMismatch, match="not ones that the checkpoint's type has"):
            live_lanes(engine.plan, changes)
        return
    lanes = live_lanes(engine.plan, changes)
    before, after = digests_of(engine, lanes)["a"], digests_of(engine, lanes, is_new=True)["a"]
    assert before is not None
    assert after is not None
    assert before != engine.old_digest(changes[0])
    assert (after - before) % 2**64 != (engine.new_digest(changes[0]) - engine.old_digest(changes[0])) % 2**64


@pytest.mark.parametrize(("kind", "code", "dtype"), UPDATES)
def test_undone_values_are_the_old_bits(kind: str, code: str, dtype: torch.dtype) -> None:
    # Where types differ, differences cannot be added to what is not a number.
    engine = Engine(code, dtype, with_nan=kind == "patches" or dtype is torch.bfloat16)
    before = engine.toy.bits()
    lanes = live_lanes(engine.plan, engine.changes(kind))
    assert seem_old(lanes)
    assert all(lane.holds_old() and not lane.holds_new() for lane in lanes)
    assert all(write_lanes(lanes))
    assert not any(seem_old([lane]) for lane in lanes)
    assert all(lane.holds_new() and not lane.holds_old() for lane in lanes)
    assert undo_lanes(lanes)
    assert all(lane.holds_old() for lane in lanes)
    assert engine.toy.bits() == before


@kinds
def test_ready_lane_writes_nothing(kind: str) -> None:
    engine = Engine()
    before = engine.toy.bits()
    changes = engine.changes(kind)
    arrays = [change.values.tolist() for change in changes]
    live_lanes(engine.plan, changes)
    assert engine.toy.bits() == before
    assert [change.values.tolist() for change in changes] == arrays


def test_differences_are_added_to_any_bits_at_all() -> None:
    engine = Engine(with_nan=True)
    expected = {patch.spec.name: apply_by_hand(engine.old[patch.spec.name], patch) for patch in engine.patches()}
    lanes = live_lanes(engine.plan, engine.changes("differences"))
    assert all(write_lanes(lanes))
    loaded = Engine()
    loaded.load({name: to_torch(bits, engine.specs[name]) for name, bits in expected.items()})
    assert engine.toy.bits() == loaded.toy.bits()


def test_nan_that_another_type_does_not_keep_is_no_ground_to_add_to() -> None:
    engine = Engine("BF16", torch.float64, with_nan=True)
    with pytest.raises(ApplyError, match="differences cannot be added"):
        live_lanes(engine.plan, engine.changes("differences"))


def test_seem_old_looks_at_spots_all_over_a_large_lane() -> None:
    spec = specs_of(w=(5000,))["w"]

    def copy(toy: Toy, name: str, tensor: torch.Tensor) -> None:
        toy.w.data.copy_(tensor)

    toy = Toy(copy, w=(5000,))
    [lane] = live_lanes(record_load_plan(toy, {"w": spec}), [full_patch(spec)])
    assert seem_old([lane])
    toy.w.data[2000:3000] += 1
    assert not seem_old([lane])


@pytest.mark.parametrize("code", ["BOOL", "I8", "U16", "F8_E5M2", "I64", "C64"])
def test_types_that_are_the_same_on_both_sides_are_written_bit_for_bit(code: str) -> None:
    spec = TensorSpec("w", (7, 3), code)

    def copy(toy: Toy, name: str, tensor: torch.Tensor) -> None:
        toy.w.data.copy_(tensor)

    toy = Toy(copy, w=(1,))
    toy.w.data = torch.zeros_like(tensor_of(full_patch(spec)))
    patch = full_patch(spec)
    plan = record_load_plan(toy, {"w": spec})
    [lane] = live_lanes(plan, [patch])
    zeros = TensorPatch(spec, patch.positions, np.zeros_like(patch.values))
    [(_, _, digest)] = digest_runs(plan, lane)
    assert digest == patch_digest(spec, zeros.positions, zeros.values)
    assert write_lanes([lane]) == [True]
    assert bits_of(toy.w).tolist() == patch.values.tolist()


@pytest.mark.parametrize("code", TORCH_CODES)
def test_differences_of_every_type_are_added_bit_for_bit(code: str) -> None:
    spec = TensorSpec("w", special_bits(code).shape, code)

    def copy(toy: Toy, name: str, tensor: torch.Tensor) -> None:
        toy.w.data.copy_(tensor)

    old, new = special_bits(code), random_bits(code, spec.numel)
    toy = Toy(copy, w=(1,))
    toy.w.data = to_torch(old, spec)
    patch = TensorPatch(spec, np.arange(spec.numel, dtype=np.int32), new)
    plan = record_load_plan(toy, {"w": spec})
    [lane] = live_lanes(plan, [as_difference(patch, old)])
    assert write_lanes([lane]) == [True]
    assert bits_of(toy.w).tolist() == new.tolist()
    assert undo_lanes([lane])
    assert bits_of(toy.w).tolist() == old.tolist()


@pytest.mark.parametrize("index", [[-1, 3], [0, 54], [2**40, 5]])
def test_lane_that_does_not_fit_the_storage_is_refused(index: list[int]) -> None:
    engine = Engine()
    spec = engine.specs["a"]
    patch = TensorPatch(spec, np.arange(2, dtype=position_dtype(2)), np.array([1, 2], np.uint16))
    [lane] = map_update([patch], engine.plan.places)
    with pytest.raises(ApplyError, match="does not fit the live weights") as caught:
        ready_lanes(engine.plan, [dataclasses.replace(lane, index=np.array(index))])
    assert caught.value.tensor == "a"
