"""Digests of an engine's workers: slices add up, replicas agree, drift anywhere is found."""

from __future__ import annotations

import pytest

from vllm_delta_snapshot.engine.lanes import RunDigest
from vllm_delta_snapshot.engine.verify import sum_over_workers, verify_old
from vllm_delta_snapshot.errors import BaseMismatch
from vllm_delta_snapshot.stage.places import Box

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


def _hex(digest: int) -> str:
    return f"{digest:016x}"


def test_old_values_that_are_the_published_ones_are_proven() -> None:
    workers = [[("w", UPPER, 5), ("v", WHOLE, 1)], [("w", LOWER, TOP)]]
    old = {"w": _hex(4), "v": _hex(1)}
    assert verify_old(workers, old, {"w": 2, "v": 1}) == 2


def test_values_of_unknown_digest_and_empty_patches_are_not_proven_and_no_error() -> None:
    workers: list[list[RunDigest]] = [[("w", UPPER, None)], [("w", LOWER, 3)]]
    assert verify_old(workers, {"w": _hex(9), "e": _hex(0)}, {"w": 2, "e": 0}) == 0


def test_update_that_says_nothing_of_old_values_proves_nothing() -> None:
    assert verify_old([[("w", WHOLE, 5)]], {}, {"w": 1}) == 0


@pytest.mark.parametrize(
    "workers",
    [
        [[("w", UPPER, 5)], [("w", LOWER, 8)]],
        [[("w", UPPER, 5)]],
        [[("w", UPPER, 5)], []],
        [[], []],
    ],
    ids=["drift", "half is missing", "the other half", "all of it"],
)
def test_drift_and_missing_parts_are_found_and_named(workers: list[list[RunDigest]]) -> None:
    with pytest.raises(BaseMismatch, match="not the ones this delta was made against") as caught:
        verify_old(workers, {"w": _hex(12)}, {"w": 2})
    assert caught.value.tensor == "w"
    assert caught.value.expected == "digest 000000000000000c"
