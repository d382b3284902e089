"""Merge: one update that equals the versions applied one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.strategies import bits_for, patches_for, specs
from tests.support.tensors import apply_by_hand, patch_of, random_bits, random_patch, same_patch
from vllm_delta_snapshot.stage.merge import merge
from vllm_delta_snapshot.types import TensorPatch, TensorSpec

SPEC = TensorSpec("w", (100,), "BF16")
FAR = TensorSpec("far", (3_000_000_000,), "BF16")


@given(st.data())
def test_merged_patches_equal_the_versions_applied_one_by_one(data: st.DataObject):
    table = [
        TensorSpec(f"{i}.{s.name}", s.shape, s.dtype) for i, s in enumerate(data.draw(st.lists(specs, max_size=2)))
    ]
    start = {spec.name: data.draw(bits_for(spec, spec.numel)) for spec in table}
    versions: list[list[TensorPatch]] = []
    for _ in range(data.draw(st.integers(0, 3))):
        touched = [spec for spec in table if data.draw(st.booleans())]
        versions.append([data.draw(patches_for(spec)) for spec in touched])
    one_by_one, at_once = dict(start), dict(start)
    for patches in versions:
        for patch in patches:
            one_by_one[patch.spec.name] = apply_by_hand(one_by_one[patch.spec.name], patch)
    for patch in merge(versions):
        at_once[patch.spec.name] = apply_by_hand(at_once[patch.spec.name], patch)
    assert {n: b.tolist() for n, b in at_once.items()} == {n: b.tolist() for n, b in one_by_one.items()}


@given(st.data())
def test_merged_patches_are_valid(data: st.DataObject):
    spec = data.draw(specs)
    for patch in merge([[data.draw(patches_for(spec))] for _ in range(3)]):
        assert np.all(np.diff(patch.positions) > 0)
        assert patch.positions.shape == patch.values.shape
        assert patch.values.dtype == spec.element.bits


def test_merge_of_nothing_is_nothing():
    assert merge([]) == []


def test_merge_of_empty_versions_is_nothing():
    assert merge([[], []]) == []


def test_merge_of_one_version_keeps_its_arrays():
    patch = random_patch(SPEC, 10)
    [merged] = merge([[patch]])
    assert merged is patch


def test_merge_where_two_touch_an_element_takes_the_later():
    [merged] = merge([[patch_of(SPEC, {1: 10, 2: 20})], [patch_of(SPEC, {2: 21, 3: 30})]])
    assert same_patch(merged, patch_of(SPEC, {1: 10, 2: 21, 3: 30}))


def test_merge_where_an_element_goes_back_still_writes_it():
    [merged] = merge([[patch_of(SPEC, {5: 1})], [patch_of(SPEC, {5: 0})]])
    assert same_patch(merged, patch_of(SPEC, {5: 0}))


def test_merge_keeps_tensors_in_order_of_first_appearance():
    b, a = TensorSpec("b", (4,), "F32"), TensorSpec("a", (4,), "F32")
    merged = merge([[patch_of(b, {0: 1})], [patch_of(a, {0: 2}), patch_of(b, {1: 3})]])
    assert [patch.spec.name for patch in merged] == ["b", "a"]


def test_merge_of_many_versions_takes_the_latest_of_each():
    versions = [[patch_of(SPEC, dict.fromkeys(range(i, 100, i + 1), i))] for i in range(60)]
    expected = np.zeros(100, np.uint16)
    for [patch] in versions:
        expected = apply_by_hand(expected, patch)
    [merged] = merge(versions)
    assert apply_by_hand(np.zeros(100, np.uint16), merged).tolist() == expected.tolist()


def test_merge_of_int64_positions_past_2_to_31_is_exact():
    versions = [random_patch(FAR, 500, i) for i in range(3)]
    near = versions[0].positions[:100]
    versions.append(TensorPatch(FAR, near, random_bits("BF16", 100, "again")))
    expected: dict[int, int] = {}
    for patch in versions:
        expected |= dict(zip(patch.positions.tolist(), patch.values.tolist(), strict=True))
    [merged] = merge([[patch] for patch in versions])
    assert merged.positions.dtype == np.int64
    assert same_patch(merged, patch_of(FAR, expected))


@pytest.mark.parametrize("order", [(np.int32, np.int64), (np.int64, np.int32)])
def test_merge_of_both_widths_of_positions_is_exact(order: tuple[type, type]):
    patches = [
        TensorPatch(SPEC, np.array([i, 50], dtype=kind), np.array([i + 1, i + 2], dtype=np.uint16))
        for i, kind in enumerate(order)
    ]
    [merged] = merge([[patch] for patch in patches])
    assert (merged.positions.tolist(), merged.values.tolist()) == ([0, 1, 50], [1, 2, 3])


def test_merge_leaves_its_arguments_alone():
    first, second = random_patch(SPEC, 30, 1), random_patch(SPEC, 30, 2)
    before = [p.positions.tolist() + p.values.tolist() for p in (first, second)]
    merge([[first], [second]])
    assert [p.positions.tolist() + p.values.tolist() for p in (first, second)] == before
