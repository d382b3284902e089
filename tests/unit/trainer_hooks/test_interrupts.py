"""Ctrl-C at any moment, by real signals: what is under way goes on or is given up, and the next call knows which."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import tiny_tensors, write_checkpoint
from tests.support.faults import FaultyStore, When
from tests.support.gates import PATIENCE_S, GatedStore
from tests.support.runs import TinyTrainer, assert_same_state, replay
from tests.support.waiting import eventually
from trainer_hooks import DeltaPublisher
from trainer_hooks.publication.background import Feed, Task
from trainer_hooks.ranks import Ranks
from vllm_delta_snapshot.errors import NotPublished, RankFailed
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store.posix import PosixStore

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _interrupts_are_raised() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def base(ram_path: Path) -> Path:
    return write_checkpoint(ram_path / "base", tiny_tensors())


@pytest.fixture
def store(ram_path: Path) -> Iterator[GatedStore]:
    store = GatedStore(PosixStore(ram_path / "run"))
    yield store
    store.open()


Opener = Callable[..., DeltaPublisher]


@pytest.fixture
def opened(base: Path, store: GatedStore, monkeypatch: pytest.MonkeyPatch) -> Opener:
    def open_publisher(source: object, **options: Any) -> DeltaPublisher:
        used = options.pop("store", store)
        monkeypatch.setattr("trainer_hooks.publisher.open_store", lambda uri, *, single_writer: used)
        return DeltaPublisher(source, sync_dir=used.uri, base=base, **{"max_file_bytes": 40} | options)

    return open_publisher


def interrupt_in(function: str) -> threading.Thread:
    """Interrupt this thread once it is inside a function of that name."""
    watched = threading.get_ident()

    def is_there() -> bool:
        frame = sys._current_frames().get(watched)
        while frame is not None:
            if frame.f_code.co_qualname == function:
                return True
            frame = frame.f_back
        return False

    def watch() -> None:
        eventually(is_there)
        os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=watch)
    watcher.start()
    return watcher


def held(trainer: TinyTrainer, publisher: DeltaPublisher, store: GatedStore) -> Any:
    """Publish a step; return while its first upload waits."""
    store.shut()
    trainer.step(1)
    publication = publisher.publish(step=1)
    assert store.is_reached.wait(PATIENCE_S)
    return publication


WAITS: dict[str, Callable[[DeltaPublisher, Any], object]] = {
    "wait": lambda publisher, publication: publication.wait(),
    "wait a while": lambda publisher, publication: publication.wait(PATIENCE_S),
    "drain": lambda publisher, publication: publisher.drain(),
    "publish": lambda publisher, publication: publisher.publish(step=2),
    "audit": lambda publisher, publication: publisher.audit(),
    "sync": lambda publisher, publication: publisher.sync(None),
    "wait_applied": lambda publisher, publication: publisher.wait_applied(["a"]),
}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("times", [1, 3])
def test_what_is_waited_for_goes_on_and_is_told_as_running(
    opened: Opener, store: GatedStore, base: Path, ram_path: Path, wait: str, times: int
):
    trainer = TinyTrainer()
    publisher = opened(trainer)
    publication = held(trainer, publisher, store)
    first = trainer.state()
    for _ in range(times):
        watcher = interrupt_in("Task.join")
        with pytest.raises(KeyboardInterrupt):
            WAITS[wait](publisher, publication)
        watcher.join()
        assert not publication.done()
        assert publisher._turns.is_busy
        with pytest.raises(NotPublished, match="did not end within 0 s"):
            publication.wait(0)
    store.open()
    assert publication.wait().version == 1
    trainer.step(2)
    assert publisher.publish().wait().version == 2
    publisher.close()
    states = replay(ram_path / "run", base, ram_path / "scratch")
    assert_same_state(states[1], first)
    assert_same_state(states[2], trainer.state())


class Interrupting:
    """A source during whose reading an interrupt comes, once."""

    def __init__(self, trainer: TinyTrainer, before: int) -> None:
        self.trainer, self.before = trainer, before

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for place, pair in enumerate(self.trainer.weights.items()):
            if place == self.before:
                self.before = -1
                os.kill(os.getpid(), signal.SIGINT)
            yield pair


@pytest.mark.parametrize("options", [{}, {"buffer_bytes": 1}, {"asynchronous": False}, {"threads": 1}], ids=str)
@pytest.mark.parametrize("before", [0, 3])
def test_comparison_that_is_interrupted_publishes_nothing_and_the_next_call_all(
    opened: Opener, base: Path, ram_path: Path, options: dict[str, Any], before: int
):
    trainer = TinyTrainer()
    publisher = opened(trainer, **options)
    good = publisher._source
    publisher._source = type(good)(Interrupting(trainer, before))
    trainer.step(1)
    with pytest.raises(KeyboardInterrupt):
        publisher.publish()
    publisher._source = good
    trainer.step(2)
    assert publisher.publish().wait().version == 1
    publisher.close()
    [_, state] = replay(ram_path / "run", base, ram_path / "scratch")
    assert_same_state(state, trainer.state())


def test_comparison_that_waits_for_room_is_interrupted(opened: Opener, store: GatedStore, base: Path, ram_path: Path):
    trainer = TinyTrainer()
    publisher = opened(trainer, buffer_bytes=1, encoding="raw", max_file_bytes=1, threads=1)
    store.shut()
    trainer.step(1)
    trainer.step(2)
    watcher = interrupt_in("Feed.put")
    with pytest.raises(KeyboardInterrupt):
        publisher.publish()
    watcher.join()
    store.open()
    trainer.step(3)
    assert publisher.publish().wait().version == 1
    [_, state] = replay(ram_path / "run", base, ram_path / "scratch")
    assert_same_state(state, trainer.state())


@pytest.mark.parametrize("when", [When.BEFORE, When.AFTER])
def test_blocking_publication_interrupted_at_any_request_is_settled_by_the_next(
    opened: Opener, base: Path, ram_path: Path, when: When
):
    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    counting = FaultyStore(PosixStore(ram_path / "counting"))
    live(opened, counting, lambda: None)
    assert len(counting.log) > 10
    for at in range(len(counting.log)):
        store = FaultyStore(PosixStore(ram_path / f"run-{at}"), at, when=when, fail=interrupt)
        history = live(opened, store, store.heal)
        place = 0
        states = replay(ram_path / f"run-{at}", base, ram_path / f"scratch-{at}")
        for state in states:
            while any(state[name].tolist() != history[place][name].tolist() for name in state):
                place += 1
        assert_same_state(states[-1], history[-1])


def live(opened: Opener, store: FaultyStore, heal: Callable[[], object]) -> list[Any]:
    trainer = TinyTrainer()
    history, publisher = [trainer.state()], None
    for step in (1, 2):
        trainer.step(step)
        history.append(trainer.state())
        try:
            publisher = publisher or opened(trainer, store=store, asynchronous=False, threads=1)
            publisher.publish()
        except KeyboardInterrupt:
            pass
    heal()
    trainer.step(3)
    history.append(trainer.state())
    publisher = publisher or opened(trainer, store=store, asynchronous=False)
    publisher.publish()
    return history


def test_close_that_is_interrupted_loses_nothing_and_waits_again(opened: Opener, store: GatedStore, ram_path: Path):
    trainer = TinyTrainer()
    publisher = opened(trainer)
    publication = held(trainer, publisher, store)
    for _ in range(2):
        watcher = interrupt_in("Task.join")
        with pytest.raises(KeyboardInterrupt):
            publisher.close()
        watcher.join()
        with pytest.raises(NotPublished, match="the publisher is closed"):
            publisher.publish()
    assert not publication.done()
    store.open()
    publisher.close()
    assert publication.done()
    assert RunFolder(PosixStore(ram_path / "run")).versions() == [1]
    publisher.close(drain=False)


def test_close_that_is_interrupted_may_be_given_up(opened: Opener, store: GatedStore, ram_path: Path):
    trainer = TinyTrainer()
    publisher = opened(trainer)
    publication = held(trainer, publisher, store)
    watcher = interrupt_in("Task.join")
    with pytest.raises(KeyboardInterrupt):
        publisher.close()
    watcher.join()
    publisher.close(drain=False)
    store.open()
    with pytest.raises(NotPublished, match="abandoned"):
        publication.wait()
    assert RunFolder(PosixStore(ram_path / "run")).versions() == []


@pytest.mark.parametrize("ends_by_error", [False, True])
def test_block_whose_end_is_interrupted_raises_the_interrupt_and_loses_nothing(
    opened: Opener, store: GatedStore, ram_path: Path, ends_by_error: bool
):
    trainer = TinyTrainer()
    publisher = opened(trainer)
    watcher = None

    def train() -> None:
        nonlocal watcher
        with publisher:
            held(trainer, publisher, store)
            watcher = interrupt_in("Task.join")
            if ends_by_error:
                raise ZeroDivisionError

    with pytest.raises(KeyboardInterrupt):
        train()
    assert watcher is not None
    watcher.join()
    store.open()
    publisher.close()
    assert RunFolder(PosixStore(ram_path / "run")).versions() == [1]


def test_error_of_a_publication_is_not_lost_with_an_interrupted_call(opened: Opener, store: GatedStore):
    trainer = TinyTrainer()
    publisher = opened(trainer)
    store.fail("put")
    trainer.step(1)
    failed = publisher.publish()
    eventually(failed.done)

    def interrupted() -> bool:
        raise KeyboardInterrupt

    found_out = publisher._find_out
    publisher._find_out = interrupted
    with pytest.raises(KeyboardInterrupt):
        publisher.publish()
    publisher._find_out = found_out
    with pytest.raises(Exception, match="injected"):
        publisher.publish()
    assert publisher.publish().wait().version == 1


def test_task_that_an_interrupt_kept_from_beginning_never_does(monkeypatch: pytest.MonkeyPatch):
    begun: list[Task] = []
    task: Task = Task(begun.append, name="the work", exit_timeout_s=1.0)
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        task.start()
    assert task.join(0)
    start(task._thread)
    task._thread.join(PATIENCE_S)
    assert begun == []


def test_waiter_that_was_interrupted_with_the_wake_up_in_its_hand_keeps_nobody_waiting():
    task: Task = Task(lambda _: 1, name="the work", exit_timeout_s=1.0)
    task.start()
    assert task.join(PATIENCE_S)
    assert task._until_end.acquire(blocking=False)  # and is never given back
    assert task.join(0)
    assert task.result() == 1


def test_waiter_looks_by_itself_now_and_then():
    may_end = threading.Event()
    task: Task = Task(lambda _: may_end.wait(PATIENCE_S), name="the work", exit_timeout_s=1.0)
    ending, waits = task._until_end, []

    class NeverWoken:
        def acquire(self, timeout: float) -> bool:
            waits.append(timeout)
            may_end.set()
            task._thread.join(PATIENCE_S)
            return False

        def release(self) -> None:
            ending.release()

    task._until_end = NeverWoken()  # type: ignore[assignment]
    task.start()
    assert task.join()
    assert max(waits) <= 1.0


def test_diff_that_was_interrupted_while_it_held_the_feed_is_given_up():
    feed = Feed(100)
    feed._lock.acquire()  # and the block that gives it back was never entered
    feed.give_up()
    ended: list[str] = []

    def read() -> None:
        try:
            list(feed.read())
        except NotPublished as error:
            ended.append(error.what)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(PATIENCE_S)
    assert ended == ["the diff failed"]


def test_rank_that_was_interrupted_in_the_middle_of_a_message_says_so_from_then_on(monkeypatch: pytest.MonkeyPatch):
    ranks = Ranks()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ranks, "_answer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ranks.round(lambda: 1, sum)
    with pytest.raises(RankFailed, match="rank 0 was interrupted"):
        ranks.round(lambda: 1, sum)


@pytest.mark.slow
def test_trainer_interrupted_again_and_again_publishes_states_that_it_had_in_order(base: Path, ram_path: Path):
    command = [sys.executable, "-m", "tests.support.interrupts", *map(str, (base, ram_path / "run", ram_path / "out"))]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    seen = json.loads(done.stdout)
    assert set(seen) <= {"interrupted", "ended", "versions"}
    assert seen["interrupted"] >= 10
    assert seen["versions"] > 3
