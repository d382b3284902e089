"""Ordered map: results in order whatever takes how long, only a few items under way, and nothing left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm_delta_snapshot.util.ordered import JOIN, Join, ordered_map, thread_pool


@pytest.fixture(params=[1, 2, 5], ids="threads: {}".format)
def pool(request: pytest.FixtureRequest) -> Iterator[ThreadPoolExecutor | None]:
    with thread_pool(request.param) as pool:
        yield pool


def test_results_come_in_the_order_of_the_items(pool: ThreadPoolExecutor | None) -> None:
    assert list(ordered_map(lambda item: item * item, range(50), pool)) == [item * item for item in range(50)]


def test_nothing_gives_nothing(pool: ThreadPoolExecutor | None) -> None:
    assert list(ordered_map(pytest.fail, [], pool)) == []


def test_result_that_is_late_holds_the_others_back() -> None:
    first_may_end = threading.Event()

    def work(item: int) -> int:
        if item == 0:
            assert first_may_end.wait(20)
        elif item == 3:
            first_may_end.set()
        return item

    with ThreadPoolExecutor(2) as pool:
        assert list(ordered_map(work, range(6), pool)) == list(range(6))


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_items_are_taken_only_so_far_ahead(ahead: int) -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in range(20):
            taken.append(item)
            yield item

    with ThreadPoolExecutor(2) as pool:
        for done, _ in enumerate(ordered_map(str, items(), pool, ahead=ahead)):
            assert len(taken) <= done + ahead


def test_no_item_is_taken_before_it_is_asked_for_without_threads() -> None:
    items = iter(range(10))
    assert next(ordered_map(str, items, None)) == "0"
    assert next(items) == 1


def failing(item: int) -> int:
    if item >= 3:
        raise ValueError(item)
    return item


def test_first_failure_is_raised_after_the_results_before_it(pool: ThreadPoolExecutor | None) -> None:
    results = ordered_map(failing, range(10), pool)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="3"):
        next(results)


def test_failure_of_the_items_is_raised_and_what_is_under_way_is_waited_for() -> None:
    running, done = threading.Event(), []

    def items() -> Iterator[int]:
        yield 1
        running.wait(20)
        raise ValueError("no more")

    def work(item: int) -> None:
        running.set()
        done.append(item)

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(ValueError, match="no more"):
            list(ordered_map(work, items(), pool))
        assert done == [1]


def test_consumer_that_stops_early_leaves_nothing_running() -> None:
    busy = threading.Semaphore(0)
    done: list[int] = []

    def work(item: int) -> int:
        busy.acquire()
        done.append(item)
        return item

    with ThreadPoolExecutor(2) as pool:
        results = ordered_map(work, range(100), pool, ahead=3)
        busy.release(3)
        assert next(results) == 0
        results.close()
        assert len(done) <= 4
        assert pool.submit(len, "free").result(20) == 4


@pytest.mark.parametrize("threads", [-1, 0, 1])
def test_single_thread_is_the_callers(threads: int) -> None:
    with thread_pool(threads) as pool:
        assert pool is None
    assert next(ordered_map(lambda _: threading.current_thread(), [1], None)) is threading.current_thread()


def test_nothing_is_taken_over_a_join_before_all_before_it_is_done(pool: ThreadPoolExecutor | None) -> None:
    done: list[int] = []
    late = threading.Event()

    def work(item: int) -> int:
        if item % 3 == 0:
            late.wait(0.01)  # the last to end
        done.append(item)
        return item

    def items() -> Iterator[int | Join]:
        for item in range(9):
            yield item
            if item % 3 == 2:
                yield JOIN
                assert sorted(done) == list(range(item + 1))
        yield JOIN
        yield JOIN

    assert list(ordered_map(work, items(), pool)) == list(range(9))


def test_nothing_is_taken_over_a_join_after_a_failure(pool: ThreadPoolExecutor | None) -> None:
    taken: list[int] = []

    def items() -> Iterator[int | Join]:
        for item in range(3):
            taken.append(item)
            yield item
            yield JOIN

    with pytest.raises(ZeroDivisionError):
        list(ordered_map(lambda item: 1 // (1 - item), items(), pool))
    assert taken == [0, 1]
