"""A publisher is used in one process, by one call at a time; whoever else tries is told at once, and harms nothing."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.support.checkpoints import snapshot_of, tiny_tensors, write_checkpoint
from tests.support.forked_publishers import USES
from tests.support.gates import PATIENCE_S, GatedStore
from tests.support.runs import TinyTrainer, assert_same_state, replay
from trainer_hooks import DeltaPublisher, Publication, PublishReport, ShardedPublisher
from trainer_hooks.publication.use import Use
from vllm_delta_snapshot.errors import NotPublished
from vllm_delta_snapshot.store.posix import PosixStore
from vllm_delta_snapshot.util.scratch import scratch_folder

ROOT = Path(__file__).parents[4]
KINDS = {"DeltaPublisher": DeltaPublisher, "ShardedPublisher": ShardedPublisher}
ENDS = ("close", "leaves the block", "fails in the block")
OPENERS = {"DeltaPublisher": "trainer_hooks.publisher", "ShardedPublisher": "trainer_hooks.sharded_publisher"}


class Setup:
    """A publisher of one kind, whose store has a gate, and whose source has one too."""

    def __init__(self, kind: str, ram_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trainer = TinyTrainer()
        self.base = write_checkpoint(ram_path / "base", tiny_tensors())
        self.store = GatedStore(PosixStore(ram_path / "run"))
        self.scratch = ram_path / "scratch"
        monkeypatch.setattr(f"{OPENERS[kind]}.open_store", lambda uri, *, single_writer: self.store)
        self.may_read = threading.Event()
        self.may_read.set()
        self.is_reading = threading.Event()
        self.inside: Callable[[], object] = lambda: None
        self.publisher: Any = KINDS[kind](self.source, sync_dir=self.store.uri, base=self.base)

    def source(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.trainer.weights.items()
        self.is_reading.set()
        self.inside()
        assert self.may_read.wait(PATIENCE_S)

    def check(self, *expected: Any) -> None:
        states = replay(Path(self.store.uri), self.base, self.scratch)
        for found, state in zip(states[1:], expected, strict=True):
            assert_same_state(found, state)


@pytest.fixture(params=KINDS)
def setup(request: pytest.FixtureRequest, ram_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    setup = Setup(request.param, ram_path, monkeypatch)
    yield setup
    setup.store.open()
    setup.may_read.set()
    setup.publisher.close()


CALLS: dict[str, Callable[[Any], object]] = {
    "publish": lambda publisher: publisher.publish(),
    "sync": lambda publisher: publisher.sync(None),
    "audit": lambda publisher: publisher.audit(),
    "drain": lambda publisher: publisher.drain(),
    "close": lambda publisher: publisher.close(),
}


@pytest.mark.parametrize("call", CALLS)
def test_second_thread_is_refused_at_once_and_the_first_one_is_exact(setup: Setup, call: str):
    setup.trainer.step(1)
    setup.is_reading.clear()
    setup.may_read.clear()
    first = threading.Thread(target=setup.publisher.publish, name="the trainer's")
    first.start()
    assert setup.is_reading.wait(PATIENCE_S)
    with pytest.raises(
        NotPublished, match=rf"{call}\(\) was called while publish\(\) is under way.*the trainer's"
    ) as caught:
        CALLS[call](setup.publisher)
    assert "Call one after the other" in str(caught.value)
    setup.may_read.set()
    first.join(PATIENCE_S)
    setup.publisher.drain()
    state = setup.trainer.state()
    setup.trainer.step(2)
    assert setup.publisher.publish().wait().version == 2
    setup.check(state, setup.trainer.state())


@pytest.mark.parametrize("call", CALLS)
def test_call_from_within_a_call_is_refused(setup: Setup, call: str):
    told: list[str] = []

    def inside() -> None:
        try:
            CALLS[call](setup.publisher)
        except NotPublished as error:
            told.append(str(error))

    setup.trainer.step(1)
    setup.inside = inside
    setup.publisher.publish().wait()
    assert "in the same thread" in told[0]
    setup.check(setup.trainer.state())


def test_calls_one_after_the_other_may_come_from_any_threads(setup: Setup):
    states = []
    for step in range(1, 7):
        setup.trainer.step(step)
        caller = threading.Thread(target=lambda: setup.publisher.publish())
        caller.start()
        caller.join(PATIENCE_S)
        states.append(setup.trainer.state())
    setup.publisher.close()
    setup.check(*states)


def test_two_threads_that_publish_as_they_like_make_only_states_that_were(setup: Setup):
    refused = 0
    lock = threading.Lock()

    def publish() -> None:
        nonlocal refused
        for _ in range(20):
            try:
                setup.publisher.publish()
            except NotPublished:
                with lock:
                    refused += 1

    threads = [threading.Thread(target=publish) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    setup.trainer.step(1)
    last = setup.publisher.publish().wait()
    assert last.version == 60 - refused + 1
    setup.publisher.close()
    assert_same_state(replay(Path(setup.store.uri), setup.base, setup.scratch)[-1], setup.trainer.state())


def test_then_may_call_again_and_nobody_else_may(ram_path: Path, monkeypatch: pytest.MonkeyPatch):
    setup = Setup("ShardedPublisher", ram_path, monkeypatch)
    setup.trainer.step(1)
    publication = setup.publisher.publish()

    def work() -> int:
        other: list[BaseException] = []

        def elsewhere() -> None:
            try:
                setup.publisher.drain()
            except NotPublished as error:
                other.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(PATIENCE_S)
        assert "drain() was called while then() is under way" in str(other[0])
        setup.publisher.drain()
        return int(setup.publisher.version)

    assert setup.publisher.then(publication, work) == 1
    with pytest.raises(NotPublished, match="under way"), setup.publisher._use.taken("then"):
        setup.publisher.drain()


@pytest.mark.parametrize("spread", [copy.copy, copy.deepcopy, pickle.dumps])
def test_publisher_cannot_be_copied_or_pickled(setup: Setup, spread: Callable[[object], object]):
    with pytest.raises(NotPublished, match="a publisher cannot be copied or pickled") as caught:
        spread(setup.publisher)
    assert "a publisher of its own" in str(caught.value)
    publication = setup.publisher.publish()
    with pytest.raises(NotPublished, match="the handle of a publication cannot be copied"):
        spread(publication)


def test_handle_of_what_has_ended_can_be_pickled():
    report = PublishReport("r", 3, 1, 2, 1, 10, 20, "deltas/x", 0.1, 0.2, 0.2)
    assert pickle.loads(pickle.dumps(Publication(3, report))).wait() == report


class Publishing(Dataset[int]):
    """A dataset that knows the publisher, as trainers' own do, and whose workers use it."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        self.setup.publisher.publish()
        return index


def test_workers_of_a_data_loader_are_told_whose_the_publisher_is(setup: Setup):
    setup.store.shut()
    setup.trainer.step(1)
    publication = setup.publisher.publish()
    assert setup.store.is_reached.wait(PATIENCE_S)
    loader = DataLoader(Publishing(setup), num_workers=1, multiprocessing_context="fork")
    with pytest.raises(NotPublished, match="forked off after the publisher was made"):
        next(iter(loader))
    setup.store.open()
    assert publication.wait().version == 1
    setup.check(setup.trainer.state())


def _publish_in_child(setup: Setup, out: Any) -> None:
    try:
        setup.publisher.publish()
    except NotPublished as error:
        out.put(str(error))


def test_forked_worker_of_multiprocessing_is_told_whose_the_publisher_is(setup: Setup):
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    child = context.Process(target=_publish_in_child, args=(setup, out))
    child.start()
    said = out.get(timeout=PATIENCE_S)
    child.join(PATIENCE_S)
    assert f"publish() was called in process {child.pid}" in said
    assert f"expected process {os.getpid()}" in said
    assert "make a new one here" in said
    assert child.exitcode == 0


@pytest.mark.slow
def test_child_of_a_fork_is_refused_and_its_end_leaves_the_parent_alone(ram_path: Path):
    # In a process of their own: children end by the interpreter's own exit.
    base = write_checkpoint(ram_path / "base", tiny_tensors())
    command = [sys.executable, "-m", "tests.support.forked_publishers", str(base), str(ram_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(done.stdout)
    assert "Traceback" not in done.stderr
    assert found["children"] == dict.fromkeys(USES, 0)
    for use, said in found["said"].items():
        assert said == ("nothing" if use in ENDS else "NotPublished"), use
    assert found["versions"] == [1, 2]
    assert found["scratch stays"]
    trainer = TinyTrainer()
    trainer.step(1)
    first = trainer.state()
    trainer.step(2)
    states = replay(ram_path / "run", base, ram_path / "out")
    assert_same_state(states[1], first)
    assert_same_state(states[2], trainer.state())


def test_guard_is_free_again_after_whatever_happened():
    use = Use()
    for kind in (ValueError, KeyboardInterrupt, SystemExit):
        with pytest.raises(kind), use.taken("publish"):
            raise kind
    with use.taken("publish"), pytest.raises(NotPublished), use.taken("close"):
        pass
    with use.taken("then"):
        with pytest.raises(KeyError):
            use.lend(lambda: {}["none"])
        with pytest.raises(NotPublished), use.taken("close"):
            pass


def test_scratch_folder_is_gone_afterwards_and_its_parent_is_as_before(tmp_path: Path):
    before = snapshot_of(tmp_path)

    def fail() -> None:
        with scratch_folder("x-", tmp_path) as folder:
            (folder / "file").write_bytes(b"1")
            assert folder.name.startswith("x-")
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert snapshot_of(tmp_path) == before
