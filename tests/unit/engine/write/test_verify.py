"""Digests of an engine's workers: slices add up, replicas agree, drift anywhere is found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.changes import differences_for
from tests.support.strategies import bits_for, specs
from tests.support.tensors import apply_by_hand
from vllm_delta_snapshot.engine.write.lanes import RunDigest
from vllm_delta_snapshot.engine.write.verify import sum_over_workers, verify_moves, verify_old
from vllm_delta_snapshot.errors import BaseMismatch
from vllm_delta_snapshot.format.digest import add_digests, format_digest, patch_digest
from vllm_delta_snapshot.host.places import Box

UPPER: Box = ("segment", 0, ((1, 12),))
LOWER: Box = ("segment", 12, ((1, 12),))
WHOLE: Box = ("segment", 0, ((1, 24),))
TOP = 2**64 - 1


@pytest.mark.parametrize(
    ("workers", "totals"),
    [
        ([], {}),
        ([[]], {}),
        ([[("w", WHOLE, 5)]], {"w": 5}),
        ([[("w", UPPER, 5)], [("w", LOWER, 7)]], {"w": 12}),
        ([[("w", UPPER, TOP)], [("w", LOWER, 3)]], {"w": 2}),
        ([[("w", UPPER, 5), ("w", LOWER, 7)]], {"w": 12}),
        ([[("w", WHOLE, 5)], [("w", WHOLE, 5)]], {"w": 5}),
        ([[("w", UPPER, 5)], [("w", LOWER, 7)], [("w", UPPER, 5)], [("w", LOWER, 7)]], {"w": 12}),
        ([[("w", WHOLE, 5), ("w", WHOLE, 5)]], {"w": 5}),
        ([[("v", WHOLE, 5)], [("w", WHOLE, 7)]], {"v": 5, "w": 7}),
        ([[("w", WHOLE, 5)], []], {"w": 5}),
        ([[("w", UPPER, None)], [("w", LOWER, 7)]], {"w": None}),
        ([[("w", UPPER, 5)], [("w", LOWER, None)]], {"w": None}),
        ([[("w", WHOLE, None), ("v", WHOLE, 0)]], {"w": None, "v": 0}),
    ],
)
def test_digests_of_distinct_slices_add_up_once(workers: list[list[RunDigest]], totals: dict) -> None:
    assert sum_over_workers(workers) == totals


@pytest.mark.parametrize(
    ("workers", "first", "second"),
    [
        ([[("w", WHOLE, 5)], [("w", WHOLE, 6)]], 0, 1),
        ([[("w", UPPER, 5)], [("w", LOWER, 7)], [("w", UPPER, 5)], [("w", LOWER, 8)]], 1, 3),
        ([[("v", WHOLE, 1)], [("w", WHOLE, 5), ("w", WHOLE, 6)]], 1, 1),
        ([[("w", WHOLE, 5)], [("w", WHOLE, None)]], 0, 1),
    ],
)
def test_replicas_that_differ_are_named(workers: list[list[RunDigest]], first: int, second: int) -> None:
    with pytest.raises(BaseMismatch, match="should be equal differ") as caught:
        sum_over_workers(workers)
    assert caught.value.tensor == "w"
    assert caught.value.expected == f"the values of worker {first}"
    assert caught.value.found == f"others on worker {second}"


@pytest.mark.parametrize(
    ("workers", "totals", "unequal"),
    [
        ([[("w", WHOLE, 5)], [("w", WHOLE, 5)]], {"w": 5}, {}),
        ([[("w", WHOLE, 5)], [("w", WHOLE, 6)]], {"w": 5}, {"w": (0, 1)}),
        ([[("w", WHOLE, 5), ("w", WHOLE, 6)]], {"w": 5}, {"w": (0, 0)}),
        ([[("w", UPPER, 5)], [("w", LOWER, 7)], [("w", UPPER, 5)], [("w", LOWER, 8)]], {"w": 12}, {"w": (1, 3)}),
        ([[("v", WHOLE, 1), ("w", WHOLE, 5)], [("v", WHOLE, 1), ("w", WHOLE, 6)]], {"v": 1, "w": 5}, {"w": (0, 1)}),
        ([[("v", WHOLE, 1), ("w", UPPER, 5)], [("v", WHOLE, 2), ("w", LOWER, 6)]], {"v": 1, "w": 11}, {"v": (0, 1)}),
        ([[("w", WHOLE, 5)], [("w", WHOLE, None)]], {"w": 5}, {"w": (0, 1)}),
        (
            [[("v", WHOLE, 1), ("w", WHOLE, 2)], [("v", WHOLE, 3), ("w", WHOLE, 4)]],
            {"v": 1, "w": 2},
            {"v": (0, 1), "w": (0, 1)},
        ),
    ],
)
def test_replicas_that_differ_are_collected_where_somebody_takes_their_names(
    workers: list[list[RunDigest]], totals: dict, unequal: dict[str, tuple[int, int]]
) -> None:
    found: dict[str, str] = {"other": "kept"}
    assert sum_over_workers(workers, found) == totals
    assert found.pop("other") == "kept"
    assert found == {
        name: f"worker {second} has other values than worker {first}" for name, (first, second) in unequal.items()
    }


def _hex(digest: int) -> str:
    return f"{digest:016x}"


def test_old_values_that_are_the_published_ones_are_proven() -> None:
    assert verify_old({"w": 4, "v": 1}, {"w": _hex(4), "v": _hex(1)}) == {"w", "v"}


def test_old_values_of_unknown_digest_are_not_proven_and_no_error() -> None:
    assert verify_old({"w": None, "v": 5}, {"w": _hex(9), "v": None}) == set()


def test_empty_change_is_proven_by_no_worker_touching_anything() -> None:
    assert verify_old({}, {"e": _hex(0)}) == verify_moves({}, {}, {"e": _hex(0)}) == {"e"}


def test_update_that_says_nothing_of_digests_proves_nothing() -> None:
    assert verify_old({"w": 5}, {}) == verify_moves({"w": 5}, {"w": 6}, {}) == set()


@pytest.mark.parametrize("found", [{"w": 13}, {"w": 5}, {}], ids=["drift", "half is missing", "all of it"])
def test_drift_and_missing_parts_are_found_and_named(found: dict[str, int | None]) -> None:
    with pytest.raises(BaseMismatch, match="not the ones this delta was made against") as caught:
        verify_old(found, {"w": _hex(12)})
    assert caught.value.tensor == "w"
    assert caught.value.expected == "digest 000000000000000c"


def test_moves_that_lead_to_the_published_values_are_proven() -> None:
    before, after = {"w": 4, "v": TOP, "x": None, "y": 1}, {"w": 1, "v": 1, "x": 2, "y": None}
    assert verify_moves(before, after, {"w": _hex(TOP - 2), "v": _hex(2), "x": _hex(0), "y": _hex(0)}) == {"w", "v"}


@pytest.mark.parametrize(
    ("before", "after"),
    [({"w": 4}, {"w": 8}), ({"w": 5}, {"w": 7}), ({"w": 4}, {}), ({}, {"w": 7}), ({}, {})],
    ids=["other new values", "other old values", "new ones missing", "old ones missing", "all missing"],
)
def test_moves_to_or_from_other_values_are_found_and_named(before: dict, after: dict) -> None:
    with pytest.raises(BaseMismatch, match="does not lead from the live weights to the published ones") as caught:
        verify_moves(before, after, {"w": _hex(3)})
    assert caught.value.tensor == "w"
    assert caught.value.expected == "a digest moved by 0000000000000003"


@settings(max_examples=20)
@given(st.data())
def test_any_single_wrong_old_value_is_found_by_how_the_digest_moves(data: st.DataObject) -> None:
    spec = data.draw(specs.filter(lambda spec: spec.numel > 0))
    published = data.draw(bits_for(spec, spec.numel))
    change = data.draw(differences_for(spec).filter(lambda change: change.changed > 0))
    np.putmask(change.values, change.values == 0, 1)

    def ends(bits: np.ndarray) -> list[dict[str, int | None]]:
        states = (bits, apply_by_hand(bits, change))
        return [{"w": patch_digest(spec, change.positions, b[change.positions])} for b in states]

    before, after = ends(published)
    moves = {"w": format_digest(add_digests(after["w"] or 0, -(before["w"] or 0)))}
    assert verify_moves(before, after, moves) == {"w"}
    live = published.copy()
    at = change.positions[data.draw(st.integers(0, change.changed - 1))]
    top = (1 << 8 * spec.element.itemsize) - 1
    live[at] ^= live.dtype.type(data.draw(st.integers(1, top)))
    with pytest.raises(BaseMismatch):
        verify_moves(*ends(live), moves)
