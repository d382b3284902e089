"""Work on items: each once, in order, on as many threads as torch uses, on all cores of the process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch

from vllm_delta_snapshot.engine.threads import run_each


@pytest.fixture(params=[1, 2, 16])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Let torch use this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_one_item_is_worked_in_the_thread_that_asked() -> None:
    assert run_each(lambda _: threading.get_ident(), [1]) == [threading.get_ident()]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_items_are_worked_on_all_cores_even_from_a_pinned_thread() -> None:
    cores = os.sched_getaffinity(0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        os.sched_setaffinity(0, {min(cores)})
        found = run_each(lambda _: os.sched_getaffinity(0), [1, 2])
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(before)
    assert found == [cores, cores]


@pytest.mark.usefixtures("threads")
def test_error_of_an_item_is_raised() -> None:
    def fail(item: int) -> None:
        raise ValueError(item)

    with pytest.raises(ValueError, match=r"\d+"):
        run_each(fail, [1, 2, 3])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("count", [0, 1, 2, 3, 17])
def test_each_item_is_worked_once_and_results_are_in_order(count: int) -> None:
    assert run_each(lambda item: item * item, range(count)) == [item * item for item in range(count)]
