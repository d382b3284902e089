"""Which tensors have an exact place, told from what the workers of an engine say together."""

from __future__ import annotations

import pytest

from vllm_delta_snapshot.engine.fitness import check_places
from vllm_delta_snapshot.engine.load_plan import Box, PlanSummary
from vllm_delta_snapshot.errors import TensorRefused
from vllm_delta_snapshot.types import TensorSpec

SPEC = TensorSpec("w", (4, 6), "BF16")
SPECS = {"w": SPEC}
WHOLE: Box = (0, (4, 6), (6, 1))
UPPER: Box = (0, (2, 6), (6, 1))
LOWER: Box = (12, (2, 6), (6, 1))


def _worker(*boxes: Box, problem: str | None = None) -> PlanSummary:
    return PlanSummary({"w": frozenset(boxes)} if boxes else {}, {"w": problem} if problem else {})


@pytest.mark.parametrize(
    "workers",
    [
        [_worker(WHOLE)],
        [_worker(WHOLE), _worker(WHOLE)],
        [_worker(UPPER), _worker(LOWER)],
        [_worker(UPPER), _worker(LOWER), _worker(UPPER), _worker(LOWER)],
        [_worker(), _worker(WHOLE)],
    ],
    ids=["one", "replicas", "shards", "shards of replicas", "another stage"],
)
def test_tensor_that_the_workers_hold_together_has_its_place(workers: list[PlanSummary]) -> None:
    assert check_places(workers, SPECS, []) == {}


@pytest.mark.parametrize(
    ("workers", "reason"),
    [
        ([_worker()], "the engine does not load it"),
        ([_worker(UPPER)], "copies 12 of its 24 elements"),
        ([_worker(UPPER), _worker(UPPER)], "copies 12 of its 24 elements"),
        ([_worker(WHOLE), _worker(problem="it is converted")], "it is converted"),
    ],
    ids=["missing", "half", "the same half twice", "a problem elsewhere"],
)
def test_tensor_without_a_whole_place_is_refused_with_the_reason(workers: list[PlanSummary], reason: str) -> None:
    with pytest.raises(TensorRefused, match=reason) as caught:
        check_places(workers, SPECS, ["other*"])
    assert "w:" in str(caught.value)


def test_tensor_declared_skippable_is_reported_not_refused() -> None:
    assert check_places([_worker(UPPER)], SPECS, ["w*"]) == {"w": "the engine copies 12 of its 24 elements"}


def test_empty_tensor_needs_no_place() -> None:
    assert check_places([_worker()], {"e": TensorSpec("e", (0, 4), "BF16")}, []) == {}
