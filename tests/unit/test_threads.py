"""Work in parts: everything once, in order, on as many threads as torch uses, on all cores of the process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch

from vllm_delta_snapshot.engine.threads import run_each, run_in_parts


@pytest.fixture(params=[1, 2, 16])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Let torch use this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("size", [0, 1, 9, 10, 19, 20, 21, 1000])
def test_parts_are_consecutive_and_cover_everything(size: int, threads: int) -> None:
    parts = run_in_parts(lambda first, last: (first, last), size, least=10)
    assert [first for first, _ in parts] == [0, *(last for _, last in parts[:-1])]
    assert parts[-1][1] == size
    assert len(parts) <= max(1, min(threads, size // 10))
    assert all(last - first >= 10 for first, last in parts) or len(parts) == 1


def test_one_part_runs_in_the_thread_that_asked() -> None:
    assert run_in_parts(lambda first, last: threading.get_ident(), 5, least=10) == [threading.get_ident()]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_parts_run_on_all_cores_even_from_a_pinned_thread() -> None:
    cores = os.sched_getaffinity(0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        os.sched_setaffinity(0, {min(cores)})
        found = run_in_parts(lambda first, last: os.sched_getaffinity(0), 100, least=10)
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(before)
    assert found == [cores, cores]


@pytest.mark.usefixtures("threads")
def test_error_of_a_part_is_raised() -> None:
    def fail(first: int, last: int) -> None:
        raise ValueError(last)

    with pytest.raises(ValueError, match=r"\d+"):
        run_in_parts(fail, 100, least=10)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("count", [0, 1, 2, 3, 17])
def test_each_item_is_worked_once_and_results_are_in_order(count: int) -> None:
    assert run_each(lambda item: item * item, range(count)) == [item * item for item in range(count)]
