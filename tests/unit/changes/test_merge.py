"""Merge: one update that equals the versions applied one by one, whatever they say and however they are merged."""

import gc
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.changes import changes_for, difference_of, differences_for
from tests.support.strategies import bits_for, patches_for, specs
from tests.support.tensors import apply_by_hand, patch_of, random_bits, random_patch, rng_of, same_patch
from vllm_delta_snapshot.changes import merge as merge_module
from vllm_delta_snapshot.changes.merge import fold, merge, merge_by_scratch, merge_by_sort
from vllm_delta_snapshot.types import Change, TensorDifference, TensorPatch, TensorSpec, position_dtype

SPEC = TensorSpec("w", (100,), "BF16")
FAR = TensorSpec("far", (3_000_000_000,), "BF16")
LARGE = TensorSpec("large", (3 * 2**17 + 5,), "U8")


def facts(change: Change) -> tuple[object, ...]:
    """Everything that a change says."""
    absolute = change.absolute if isinstance(change, TensorDifference) else None
    return (
        type(change),
        change.spec,
        change.positions.tolist(),
        change.values.dtype,
        change.values.tolist(),
        None if absolute is None else absolute.tolist(),
    )


def check_valid(change: Change) -> None:
    assert np.all(np.diff(change.positions) > 0)
    assert change.positions.shape == change.values.shape
    assert change.positions.dtype == position_dtype(change.spec.numel)
    assert change.values.dtype == change.spec.element.bits


@pytest.fixture(params=[1 << 17, 7, 1], ids="windows of {}".format)
def _window(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_module, "_WINDOW", request.param)


@given(st.data())
def test_merged_changes_equal_the_versions_applied_one_by_one(data: st.DataObject):
    table = [
        TensorSpec(f"{i}.{s.name}", s.shape, s.dtype) for i, s in enumerate(data.draw(st.lists(specs, max_size=2)))
    ]
    start = {spec.name: data.draw(bits_for(spec, spec.numel)) for spec in table}
    versions: list[list[Change]] = []
    for _ in range(data.draw(st.integers(0, 4))):
        touched = [spec for spec in table if data.draw(st.booleans())]
        versions.append([data.draw(changes_for(spec)) for spec in touched])
    one_by_one, at_once = dict(start), dict(start)
    for changes in versions:
        for change in changes:
            one_by_one[change.spec.name] = apply_by_hand(one_by_one[change.spec.name], change)
    for change in merge(versions):
        at_once[change.spec.name] = apply_by_hand(at_once[change.spec.name], change)
    assert {n: b.tolist() for n, b in at_once.items()} == {n: b.tolist() for n, b in one_by_one.items()}


@pytest.mark.usefixtures("_window")
@settings(max_examples=20)
@given(st.data())
def test_changes_merged_in_windows_of_any_size_equal_the_versions_one_by_one(data: st.DataObject):
    spec = data.draw(specs)
    changes = data.draw(st.lists(changes_for(spec), min_size=2, max_size=4))
    start = expected = data.draw(bits_for(spec, spec.numel))
    for change in changes:
        expected = apply_by_hand(expected, change)
    merged = merge_by_scratch(changes)
    check_valid(merged)
    assert apply_by_hand(start, merged).tolist() == expected.tolist()


ALIKE: dict[str, Callable[[TensorSpec], st.SearchStrategy[Change]]] = {
    "patches": patches_for,
    "differences": lambda spec: differences_for(spec, may_be_mixed=False),
}


@pytest.mark.usefixtures("_window")
@pytest.mark.parametrize("draw_one", ALIKE.values(), ids=ALIKE)
@settings(max_examples=20)
@given(st.data())
def test_both_ways_to_merge_give_the_same(draw_one: Callable, data: st.DataObject):
    spec = data.draw(specs)
    changes = data.draw(st.lists(draw_one(spec), min_size=2, max_size=4))
    by_sort, by_scratch = merge_by_sort(changes), merge_by_scratch(changes)
    check_valid(by_sort)
    assert facts(by_sort) == facts(by_scratch)


@given(st.data())
def test_merged_changes_are_valid_and_say_nothing_that_changes_nothing(data: st.DataObject):
    spec = data.draw(specs)
    for change in merge([[data.draw(changes_for(spec))] for _ in range(3)]):
        check_valid(change)
        if isinstance(change, TensorDifference):
            is_move = change.values != 0
            assert bool(np.all(is_move if change.absolute is None else is_move | change.absolute))


def large_changes(kind: str) -> list[Change]:
    """Changes at both sides of every border between windows, and all over."""
    borders = [p for border in range(0, LARGE.numel, 2**17) for p in (border - 1, border) if p >= 0]
    changes: list[Change] = []
    for number in range(4):
        rng = rng_of(kind, number)
        drawn = rng.choice(LARGE.numel, 20_000 if number % 2 else 50, replace=False)
        positions = np.union1d(drawn, [*borders, LARGE.numel - 1]).astype(np.int32)
        values = rng.integers(0, 256, positions.size, dtype=np.uint8)
        is_patch = kind == "patches" or (kind == "mixed" and number in (1, 3))
        made = TensorPatch if is_patch else TensorDifference
        changes.append(made(LARGE, positions, values))
    return changes


@pytest.mark.parametrize("kind", ["patches", "differences", "mixed"])
def test_tensors_of_several_windows_are_merged_exactly(kind: str):
    changes = large_changes(kind)
    start = expected = random_bits("U8", LARGE.numel)
    for change in changes:
        expected = apply_by_hand(expected, change)
    found = [merge_by_scratch(changes), *merge([[change] for change in changes])]
    if kind != "mixed":
        found.append(merge_by_sort(changes))
    for merged in found:
        check_valid(merged)
        assert np.array_equal(apply_by_hand(start, merged), expected)
        assert facts(merged) == facts(found[0])


def test_windows_that_nothing_touches_are_passed_over():
    spec = TensorSpec("w", (10 * 2**17,), "U8")
    merged = merge_by_scratch([patch_of(spec, {3: 1}), patch_of(spec, {9 * 2**17 + 3: 2})])
    assert same_patch(merged, patch_of(spec, {3: 1, 9 * 2**17 + 3: 2}))


def one(*versions: Change) -> Change:
    """Merge the changes of one tensor."""
    [merged] = merge([[version] for version in versions])
    return merged


def test_difference_after_an_absolute_value_adds_to_it_and_stays_absolute():
    merged = one(patch_of(SPEC, {1: 10, 2: 20}), difference_of(SPEC, {1: 5, 2: -21}))
    assert same_patch(merged, patch_of(SPEC, {1: 15, 2: 0xFFFF}))


def test_absolute_value_after_a_difference_replaces_it():
    merged = one(difference_of(SPEC, {1: 5, 2: 6}), patch_of(SPEC, {1: 10, 2: 0}))
    assert same_patch(merged, patch_of(SPEC, {1: 10, 2: 0}))


def test_absolute_values_among_differences_are_marked():
    merged = one(difference_of(SPEC, {1: 5, 3: 6}), patch_of(SPEC, {1: 10, 2: 0}), difference_of(SPEC, {3: 1, 4: -1}))
    assert facts(merged) == facts(difference_of(SPEC, {1: 10, 2: 0, 3: 7, 4: -1}, absolute=(1, 2)))


def test_marked_values_that_are_merged_again_stay_absolute():
    first = difference_of(SPEC, {1: 10, 2: 3}, absolute=(1,))
    second = difference_of(SPEC, {1: 1, 2: 9, 3: 2}, absolute=(2,))
    assert facts(one(first, second)) == facts(difference_of(SPEC, {1: 11, 2: 9, 3: 2}, absolute=(1, 2)))


@pytest.mark.parametrize("way", [merge_by_sort, merge_by_scratch])
def test_differences_that_add_up_to_nothing_are_dropped(way: Callable[[list[Change]], Change]):
    merged = way([difference_of(SPEC, {1: 5, 2: 6}), difference_of(SPEC, {1: -5, 2: 1})])
    assert facts(merged) == facts(difference_of(SPEC, {2: 7}))


@pytest.mark.parametrize("way", [merge_by_sort, merge_by_scratch])
def test_differences_that_all_add_up_to_nothing_leave_an_empty_one(way: Callable[[list[Change]], Change]):
    merged = way([difference_of(SPEC, {1: 5}), difference_of(SPEC, {1: -5})])
    assert facts(merged) == facts(difference_of(SPEC, {}))


@pytest.mark.parametrize("code", ["U8", "BF16", "F32", "I64"])
def test_sums_of_differences_wrap_around(code: str):
    spec = TensorSpec("w", (100,), code)
    half = 1 << (8 * spec.element.itemsize - 1)
    changes: list[Change] = [difference_of(spec, {7: half}), difference_of(spec, {7: half - 1})]
    for way in (merge_by_sort, merge_by_scratch):
        assert way(changes).values.tolist() == [2 * half - 1]
        assert way([*changes, difference_of(spec, {7: 1})]).changed == 0


@pytest.mark.parametrize("empty", [patch_of(SPEC, {}), difference_of(SPEC, {})], ids=["patch", "difference"])
def test_empty_changes_are_merged(empty: Change):
    assert one(empty, empty).changed == 0
    assert facts(one(difference_of(SPEC, {3: 1}), empty))[2:] == facts(difference_of(SPEC, {3: 1}))[2:]


@pytest.mark.parametrize("shape", [(0,), (0, 3), ()], ids=str)
def test_empty_tensors_and_scalars_are_merged_in_both_ways(shape: tuple[int, ...]):
    spec = TensorSpec("w", shape, "F32")
    moves = {0: 1} if spec.numel else {}
    changes: list[Change] = [difference_of(spec, moves), difference_of(spec, moves)]
    assert facts(merge_by_sort(changes)) == facts(merge_by_scratch(changes))
    assert merge_by_sort(changes).values.tolist() == [2] * spec.numel


def test_merge_of_nothing_is_nothing():
    assert list(merge([])) == []


def test_merge_of_empty_versions_is_nothing():
    assert list(merge([[], []])) == []


@pytest.mark.parametrize("change", [random_patch(SPEC, 10), difference_of(SPEC, {1: 0})], ids=["patch", "difference"])
def test_merge_of_one_version_keeps_its_arrays(change: Change):
    assert one(change) is change


def test_merge_where_two_touch_an_element_takes_the_later():
    merged = one(patch_of(SPEC, {1: 10, 2: 20}), patch_of(SPEC, {2: 21, 3: 30}))
    assert same_patch(merged, patch_of(SPEC, {1: 10, 2: 21, 3: 30}))


def test_merge_where_an_element_goes_back_still_writes_it():
    assert same_patch(one(patch_of(SPEC, {5: 1}), patch_of(SPEC, {5: 0})), patch_of(SPEC, {5: 0}))


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


@pytest.mark.parametrize("kinds", ["pppp", "dddd", "pdpd"], ids=["patches", "differences", "mixed"])
def test_merge_of_int64_positions_past_2_to_31_is_exact(kinds: str):
    patches = [random_patch(FAR, 500, i) for i in range(3)]
    near = patches[0].positions[:100]
    patches.append(TensorPatch(FAR, near, random_bits("BF16", 100, "again")))
    changes: list[Change] = []
    expected: dict[int, tuple[int, bool]] = {}
    for kind, patch in zip(kinds, patches, strict=True):
        changes.append(patch if kind == "p" else TensorDifference(FAR, patch.positions, patch.values))
        for position, value in zip(patch.positions.tolist(), patch.values.tolist(), strict=True):
            known, is_absolute = expected.get(position, (0, False))
            expected[position] = (value, True) if kind == "p" else ((known + value) % 2**16, is_absolute)
    merged = one(*changes)
    assert merged.positions.dtype == np.int64
    is_absolute = np.ones(merged.changed, np.bool_)
    if isinstance(merged, TensorDifference):
        is_absolute = ~is_absolute if merged.absolute is None else merged.absolute
    found = zip(merged.positions.tolist(), merged.values.tolist(), is_absolute.tolist(), strict=True)
    assert [*found] == [(p, *expected[p]) for p in sorted(expected) if expected[p] != (0, False)]


@pytest.mark.parametrize("order", [(np.int32, np.int64), (np.int64, np.int32)])
def test_merge_of_both_widths_of_positions_is_exact(order: tuple[type, type]):
    patches = [
        TensorPatch(SPEC, np.array([i, 50], dtype=kind), np.array([i + 1, i + 2], dtype=np.uint16))
        for i, kind in enumerate(order)
    ]
    merged = one(*patches)
    assert (merged.positions.tolist(), merged.values.tolist()) == ([0, 1, 50], [1, 2, 3])


def test_merge_leaves_its_arguments_alone():
    first, second = random_patch(SPEC, 30, 1), random_patch(SPEC, 30, 2)
    third = TensorDifference(SPEC, first.positions, first.values, first.values > 30_000)
    before = [facts(change) for change in (first, second, third)]
    for versions in ([[first], [second]], [[first], [third]], [[third], [third]]):
        list(merge(versions))
    assert [facts(change) for change in (first, second, third)] == before


def test_only_as_much_as_one_tensor_is_merged_at_a_time(monkeypatch: pytest.MonkeyPatch):
    names = [TensorSpec(name, (4,), "F32") for name in "abc"]
    started: list[str] = []

    def noted(changes: list[Change]) -> Change:
        started.append(changes[0].spec.name)
        return merge_by_scratch(changes)

    monkeypatch.setattr(merge_module, "merge_by_scratch", noted)
    merged = merge([[patch_of(spec, {0: 1}) for spec in names]] * 2)
    next(merged)
    assert started == ["a"]


@given(st.data())
def test_versions_folded_on_the_way_come_to_the_same(data: st.DataObject):
    table = [
        TensorSpec(f"{i}.{s.name}", s.shape, s.dtype) for i, s in enumerate(data.draw(st.lists(specs, max_size=2)))
    ]
    versions: list[list[Change]] = []
    for _ in range(data.draw(st.integers(0, 5))):
        touched = [spec for spec in table if data.draw(st.booleans())]
        versions.append([data.draw(changes_for(spec)) for spec in touched])
    folded = fold(iter(versions), most=data.draw(st.integers(0, 20)))
    assert [facts(change) for change in merge(folded)] == [facts(change) for change in merge(versions)]


def test_fold_takes_versions_one_by_one_and_holds_few_changes():
    alive: list[weakref.ref[TensorPatch]] = []

    def versions() -> Iterator[list[Change]]:
        for number in range(10):
            gc.collect()
            assert sum(ref() is not None for ref in alive) <= 3
            patch = patch_of(SPEC, dict.fromkeys(range(10), number))
            alive.append(weakref.ref(patch.values))
            yield [patch]

    (merged,) = merge(fold(versions(), most=20))
    assert merged.values.tolist() == [9] * 10


def test_fold_of_nothing_is_nothing():
    assert fold([]) == []
