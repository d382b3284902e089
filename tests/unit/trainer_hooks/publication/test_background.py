"""The thread behind the step, and what is handed to it: bounded, and nothing is lost or told twice."""

import gc
import threading
import weakref

import numpy as np
import pytest

from trainer_hooks.compare.diff import TensorDiff
from trainer_hooks.publication.background import Feed, Task
from vllm_delta_snapshot.errors import NotPublished
from vllm_delta_snapshot.types import TensorSpec

PATIENCE_S = 30.0


def diff_of(count: int, name: str = "w") -> TensorDiff:
    """A difference of 8 bytes a change."""
    spec = TensorSpec(name, (1000,), "BF16")
    values = np.zeros(count, np.uint16)
    return TensorDiff(spec, np.arange(count, dtype=np.int32), values, values, 0, 0)


def started(work) -> Task:
    task = Task(work, name="the work", exit_timeout_s=1.0)
    task.start()
    return task


def test_result_is_what_the_work_returned():
    task = started(lambda task: task.name.upper())
    assert task.result() == "THE WORK"
    assert task.result(0) == "THE WORK"
    assert task.join(0)
    assert task.is_told


def test_error_is_raised_by_result_and_told_once():
    def work(task: Task) -> None:
        raise ValueError("no")

    task = started(work)
    assert task.join(PATIENCE_S)
    assert not task.is_told
    with pytest.raises(ValueError, match="no"):
        task.result()
    assert task.is_told
    assert task.hush() is None


def test_error_that_was_hushed_is_told():
    def work(task: Task) -> None:
        raise ValueError("no")

    task = started(work)
    task.join(PATIENCE_S)
    assert str(task.hush()) == "no"
    assert (task.is_told, task.hush()) == (True, None)


def test_work_that_does_not_end_in_time_is_not_published_yet():
    let_go = threading.Event()
    task = started(lambda task: let_go.wait(PATIENCE_S))
    with pytest.raises(NotPublished, match="the work did not end within 0 s"):
        task.result(0)
    assert not task.join(0)
    let_go.set()
    assert task.result(PATIENCE_S) is True


def test_abandoned_work_stops_at_its_next_check():
    let_go = threading.Event()

    def work(task: Task) -> None:
        task.check()
        let_go.wait(PATIENCE_S)
        task.check()

    task = started(work)
    task.abandon()
    let_go.set()
    with pytest.raises(NotPublished, match="the work was abandoned before its commit"):
        task.result(PATIENCE_S)


def test_failed_work_keeps_its_error_and_nothing_else():
    class Large:
        pass

    refs: list[weakref.ref] = []

    def deeper() -> None:
        large = Large()
        refs.append(weakref.ref(large))
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from error

    task = started(lambda task: deeper())
    task.join(PATIENCE_S)
    gc.collect()
    assert refs[0]() is None
    with pytest.raises(ValueError, match="second"):
        task.result()


def test_feed_yields_in_order_what_was_put():
    feed = Feed(1 << 20)
    for number in range(5):
        assert feed.put(diff_of(1, str(number)))
    feed.close()
    assert [diff.spec.name for diff in feed.read()] == list("01234")


def test_feed_of_an_empty_diff_is_empty():
    feed = Feed(100)
    feed.close()
    assert list(feed.read()) == []


def test_feed_is_read_only_when_it_is_whole_unless_it_is_full():
    feed, read = Feed(8 * 10), []
    reader = threading.Thread(target=lambda: read.extend(diff.spec.name for diff in feed.read()))
    feed.put(diff_of(5, "a"))
    reader.start()
    feed.put(diff_of(5, "b"))
    assert read == []
    feed.put(diff_of(1, "c"))  # for which there is room only once one was read
    feed.close()
    reader.join(PATIENCE_S)
    assert read == ["a", "b", "c"]


@pytest.mark.parametrize("budget", [1, 8, 8 * 7, 8 * 1000])
def test_feed_never_holds_more_than_its_budget_or_a_single_difference(budget: int):
    feed, most, living = Feed(budget), 0, 0
    lock = threading.Lock()

    def read() -> None:
        nonlocal living
        for diff in feed.read():
            with lock:
                living -= 8 * diff.positions.size

    reader = threading.Thread(target=read)
    reader.start()
    sizes = [1, 7, 3, 50, 2, 2, 9] * 20
    for size in sizes:
        feed.put(diff_of(size))
        with lock:
            living += 8 * size
            most = max(most, feed._bytes)
    feed.close()
    reader.join(PATIENCE_S)
    assert living == 0
    assert most <= max(budget, 8 * max(sizes))


def test_feed_whose_reader_left_takes_nothing_and_holds_up_nobody():
    feed = Feed(8)
    assert feed.put(diff_of(1))
    blocked: list[bool] = []
    writer = threading.Thread(target=lambda: blocked.append(feed.put(diff_of(1))))
    writer.start()
    feed.leave()
    writer.join(PATIENCE_S)
    assert blocked == [False]
    assert not feed.put(diff_of(1))


def test_feed_that_was_given_up_is_not_published():
    feed = Feed(1 << 20)
    feed.put(diff_of(1))
    feed.give_up()
    with pytest.raises(NotPublished, match="the diff failed"):
        next(feed.read())


def test_feed_does_not_keep_what_was_read():
    feed = Feed(1 << 20)
    feed.put(diff_of(1))
    feed.put(diff_of(2))
    feed.close()
    reading = feed.read()
    first = weakref.ref(next(reading).positions)
    next(reading)
    assert first() is None
