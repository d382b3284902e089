"""Asynchronous publishing: the step goes on after the diff; what comes out is what it was at the call, bit for bit."""

import threading
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.checkpoints import tiny_tensors, write_checkpoint
from tests.support.faults import When
from tests.support.gates import PATIENCE_S, GatedStore
from tests.support.runs import State, TinyTrainer, assert_same_state, replay
from tests.support.stub_server import EngineStub, answering
from tests.support.waiting import eventually
from trainer_hooks import DeltaPublisher, Publication
from trainer_hooks.publication.kept import KeptChanges
from vllm_delta_snapshot.drive import DeltaSync
from vllm_delta_snapshot.errors import NotPublished, SourceError, StoreUnavailable, VersionConflict
from vllm_delta_snapshot.format.choose import POLICIES, choose
from vllm_delta_snapshot.runs.acks import Acknowledger
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store.posix import PosixStore


@dataclass
class Setup:
    """A trainer that publishes behind its steps, into a store with a gate.

    Attributes:
        expected: the states that became versions, or will.
    """

    tmp_path: Path
    base: Path
    store: GatedStore
    monkeypatch: pytest.MonkeyPatch
    options: dict[str, Any]
    trainer: TinyTrainer = field(default_factory=TinyTrainer)
    steps: int = 0

    def __post_init__(self) -> None:
        self.publisher = self.opened(self.trainer, **self.options)
        self.expected: list[State] = [self.trainer.state()]

    def opened(self, source: object, **options: Any) -> DeltaPublisher:
        """Open a publisher on the same store."""
        self.monkeypatch.setattr("trainer_hooks.publisher.open_store", lambda uri, *, single_writer: self.store)
        return DeltaPublisher(source, sync_dir=self.store.uri, base=self.base, **{"max_file_bytes": 40} | options)

    def step(self) -> None:
        """Change the weights in place."""
        self.steps += 1
        self.trainer.step(self.steps)

    def publish(self) -> Publication:
        """Publish what the weights are now."""
        publication = self.publisher.publish(step=self.steps)
        self.expected.append(self.trainer.state())
        return publication

    def held(self) -> Publication:
        """Make a step and publish it; return while its first upload waits at the gate."""
        self.store.shut()
        self.step()
        publication = self.publish()
        assert self.store.is_reached.wait(PATIENCE_S)
        return publication

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.tmp_path / "run"

    @property
    def versions(self) -> list[int]:
        """The versions that exist."""
        return RunFolder(PosixStore(self.run)).versions()

    def check(self) -> None:
        """Check that the versions are the expected states, and no others."""
        scratch = self.tmp_path / f"scratch-{len(list(self.tmp_path.iterdir()))}"
        for found, expected in zip(replay(self.run, self.base, scratch), self.expected, strict=True):
            assert_same_state(found, expected)


@pytest.fixture
def make(ram_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Setup]]:
    base = write_checkpoint(ram_path / "base", tiny_tensors())
    made: list[Setup] = []

    def make_setup(**options: Any) -> Setup:
        made.append(Setup(ram_path, base, GatedStore(PosixStore(ram_path / "run")), monkeypatch, options))
        return made[-1]

    yield make_setup
    for setup in made:
        setup.store.open()
        setup.publisher.close(drain=False)


@pytest.fixture
def setup(make: Callable[..., Setup]) -> Setup:
    return make()


def test_publish_returns_while_its_upload_is_still_held(setup: Setup):
    publication = setup.held()
    assert (publication.version, publication.done(), publication.is_skipped) == (1, False, False)
    assert (setup.publisher.version, setup.versions) == (0, [])
    with pytest.raises(NotPublished, match="version 1 did not end within 0 s"):
        publication.wait(0)
    setup.store.open()
    report = publication.wait()
    assert report is publication.report
    assert (report.version, publication.done(), setup.publisher.version, setup.versions) == (1, True, 1, [1])
    assert 0 <= report.diff_s <= report.blocked_s <= report.total_s
    setup.check()


def test_weights_that_change_before_anything_is_encoded_do_not_reach_the_version(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
):
    may_encode = threading.Event()

    def held(*args: Any) -> Any:
        assert may_encode.wait(PATIENCE_S)
        return choose(*args)

    monkeypatch.setattr("trainer_hooks.publication.whole_writing.choose", held)
    setup.step()
    publication = setup.publish()
    for tensor in setup.trainer.weights.values():
        tensor.view(torch.uint8).fill_(0xFF) if tensor.dim() else tensor.fill_(-1)
    may_encode.set()
    publication.wait()
    setup.check()
    setup.publish().wait()
    setup.check()


@pytest.mark.parametrize("encoding", POLICIES)
@pytest.mark.parametrize("is_kept_encoded", [False, True])
def test_every_version_is_what_the_weights_were_at_the_call(
    make: Callable[..., Setup], monkeypatch: pytest.MonkeyPatch, encoding: str, is_kept_encoded: bool
):
    if is_kept_encoded:
        monkeypatch.setattr("trainer_hooks.publication.whole_writing.KeptChanges", partial(KeptChanges, 0))
    setup = make(encoding=encoding)
    with setup.publisher:
        for _ in range(4):
            setup.step()
            setup.publish()
    setup.check()


def test_many_steps_without_waiting_are_all_exact(make: Callable[..., Setup]):
    setup = make(buffer_bytes=1, threads=3)
    for _ in range(8):
        setup.step()
        setup.publish()
    setup.publisher.close()
    setup.check()


def test_publication_waits_for_the_one_before(setup: Setup, monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []
    setup.store.create = lambda key, data: order.append(key) or GatedStore.create(setup.store, key, data)
    setup.publisher._source = type(setup.publisher._source)(lambda: order.append("diff") or setup.trainer())
    setup.held()
    setup.step()
    second = threading.Thread(target=setup.publish)
    second.start()
    second.join(0.05)
    assert second.is_alive()
    assert order == ["diff"]
    setup.store.open()
    second.join(PATIENCE_S)
    setup.publisher.drain()
    assert order == ["diff", "versions/00000001.json", "diff", "versions/00000002.json"]
    setup.check()


def test_call_that_is_skipped_travels_with_the_next_and_uses_no_number(make: Callable[..., Setup]):
    setup = make(when_busy="merge")
    first = setup.held()
    for _ in range(2):
        setup.step()
        skipped = setup.publisher.publish()
        assert (skipped.is_skipped, skipped.done()) == (True, True)
        with pytest.raises(NotPublished, match="was skipped"):
            _ = skipped.version
        with pytest.raises(NotPublished, match="was skipped"):
            skipped.wait()
    setup.store.open()
    first.wait()
    setup.step()
    assert setup.publish().wait().version == 2
    setup.check()


def test_sync_is_never_skipped_and_asks_servers_after_the_commit(make: Callable[..., Setup]):
    setup = make(when_busy="merge")
    with answering(EngineStub()) as server:
        setup.held()
        setup.store.open()
        setup.step()
        report = setup.publisher.sync(DeltaSync([server.url]))
        setup.expected.append(setup.trainer.state())
        assert (report.version, setup.versions) == (2, [1, 2])
        assert server.label == f"{setup.publisher.run_id}@2"
    setup.check()


def test_wait_applied_waits_for_the_commit_first(setup: Setup):
    acknowledger = Acknowledger(PosixStore(setup.run), setup.publisher.run_id, "a")
    acknowledger.write(1, pause_s=0.5)
    setup.held()
    with pytest.raises(NotPublished):
        setup.publisher.wait_applied(["a"], timeout_s=0.0)
    setup.store.open()
    assert setup.publisher.wait_applied(["a"], timeout_s=PATIENCE_S)["a"].version == 1


def test_failure_is_told_by_the_next_call_and_nothing_is_lost(setup: Setup):
    first = setup.held()
    setup.store.fail("put")
    setup.store.open()
    eventually(first.done)
    setup.step()
    with pytest.raises(StoreUnavailable, match="injected"):
        setup.publisher.publish()
    assert setup.versions == []
    setup.expected[1:] = []
    assert setup.publish().wait().version == 1
    setup.check()
    with pytest.raises(StoreUnavailable, match="injected"):
        first.wait()


def test_failure_that_wait_told_is_not_told_again(setup: Setup):
    setup.store.fail("put")
    setup.step()
    with pytest.raises(StoreUnavailable, match="injected"):
        setup.publisher.publish().wait()
    setup.publisher.drain()
    setup.step()
    assert setup.publish().wait().version == 1
    setup.check()
    setup.publisher.close()


def test_commit_whose_answer_is_lost_for_good_is_found_by_the_next_call(setup: Setup):
    setup.step()
    setup.publish().wait()
    setup.store.fail("create", When.AFTER, down=True)
    setup.step()
    publication = setup.publish()
    eventually(publication.done)
    assert (setup.publisher.version, setup.versions) == (1, [1, 2])
    setup.store.heal()
    setup.step()
    assert setup.publish().wait().version == 3
    setup.check()
    with pytest.raises(StoreUnavailable):
        publication.wait()


def test_second_trainer_learns_of_its_conflict_at_the_next_call_and_stays_in_it(setup: Setup):
    other = TinyTrainer()
    second = setup.opened(other)
    setup.step()
    setup.publish().wait()
    other.step(2)
    lost = second.publish()
    for _ in range(2):
        with pytest.raises(VersionConflict, match="another trainer"):
            second.publish()
    with pytest.raises(VersionConflict):
        lost.wait()
    setup.check()


class BrokenHalfWay:
    """A source that fails before its last tensor."""

    def __init__(self, trainer: TinyTrainer, error: BaseException) -> None:
        self.trainer, self.error = trainer, error

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        *most, _ = self.trainer.weights.items()
        yield from most
        raise self.error


@pytest.mark.parametrize("buffer_bytes", [None, 1], ids=["before any is written", "while they are written"])
@pytest.mark.parametrize("kind", [SourceError, KeyboardInterrupt, RuntimeError])
def test_diff_that_fails_publishes_nothing_and_is_told_once(
    make: Callable[..., Setup], kind: type[BaseException], buffer_bytes: int | None
):
    setup = make(buffer_bytes=buffer_bytes, threads=1)
    good = setup.publisher._source
    setup.step()
    setup.publisher._source = type(good)(BrokenHalfWay(setup.trainer, kind("half-way")))
    with pytest.raises(kind, match="half-way"):
        setup.publisher.publish()
    setup.publisher._source = good
    assert setup.publish().wait().version == 1
    setup.check()


def test_writer_that_fails_while_the_diff_goes_on_does_not_hold_it_up(make: Callable[..., Setup]):
    setup = make(buffer_bytes=1, threads=1)
    setup.store.fail("put")
    setup.step()
    setup.step()
    failed = setup.publisher.publish()
    with pytest.raises(StoreUnavailable):
        failed.wait()
    setup.publish().wait()
    setup.check()


def test_close_waits_for_what_is_under_way_and_ends_publishing(setup: Setup):
    setup.held()
    closing = threading.Thread(target=setup.publisher.close)
    closing.start()
    setup.store.open()
    closing.join(PATIENCE_S)
    assert setup.versions == [1]
    setup.publisher.close()
    for _ in range(2):
        with pytest.raises(NotPublished, match="closed"):
            setup.publisher.publish()
    setup.check()


def test_close_of_an_idle_publisher_does_nothing(setup: Setup):
    setup.publisher.close()
    setup.publisher.close(drain=False)
    assert setup.versions == []


def test_close_without_draining_abandons_what_is_under_way(setup: Setup):
    publication = setup.held()
    setup.publisher.close(drain=False)
    setup.store.open()
    with pytest.raises(NotPublished, match="abandoned"):
        publication.wait(PATIENCE_S)
    assert setup.versions == []
    setup.expected[1:] = []
    setup.publisher = setup.opened(setup.trainer)
    assert setup.publish().wait().version == 1
    setup.check()


def test_close_gives_up_after_its_time(make: Callable[..., Setup]):
    setup = make(drain_timeout_s=0.01)
    publication = setup.held()
    with pytest.raises(NotPublished, match=r"did not end within 0\.01 s"):
        setup.publisher.close()
    setup.store.open()
    with pytest.raises(NotPublished, match="abandoned"):
        publication.wait(PATIENCE_S)
    assert setup.versions == []


def test_close_tells_a_failure_that_nobody_was_told(setup: Setup):
    setup.store.fail("put")
    setup.step()
    setup.publish()
    with pytest.raises(StoreUnavailable, match="injected"):
        setup.publisher.close()
    setup.publisher.close()


def test_close_finds_that_a_commit_without_an_answer_was_one(setup: Setup):
    setup.step()
    setup.publish().wait()
    setup.store.fail("create", When.AFTER, down=True)
    setup.step()
    publication = setup.publish()
    eventually(publication.done)
    setup.store.heal()
    setup.publisher.close()
    assert setup.publisher.version == 2
    setup.check()


def test_block_that_ends_well_publishes_what_its_last_call_skipped(make: Callable[..., Setup]):
    setup = make(when_busy="merge")
    with setup.publisher:
        setup.held()
        setup.step()
        assert setup.publisher.publish(step=2).is_skipped
        setup.store.open()
    setup.expected.append(setup.trainer.state())
    setup.check()
    folder = RunFolder(PosixStore(setup.run))
    assert folder.read_metadata(folder.read_version(2)).step == 2


@pytest.mark.parametrize("is_told", [False, True])
def test_block_that_ends_well_tries_again_what_failed_last(setup: Setup, is_told: bool):
    with setup.publisher:
        setup.store.fail("put")
        setup.step()
        publication = setup.publish()
        if is_told:
            with pytest.raises(StoreUnavailable):
                publication.wait()
    setup.check()


def test_block_that_ends_well_publishes_nothing_twice(setup: Setup):
    with setup.publisher:
        setup.step()
        setup.publish()
    setup.check()
    with setup.publisher:
        pass
    setup.check()


def test_block_that_ends_well_raises_what_keeps_failing(setup: Setup):
    setup.store.fail("put", down=True)
    setup.step()
    setup.publish()
    with pytest.raises(StoreUnavailable, match="injected"):
        setup.publisher.__exit__(None, None, None)
    assert setup.versions == []


def test_block_that_ends_by_an_error_finishes_what_is_under_way_and_starts_nothing(make: Callable[..., Setup]):
    setup = make(when_busy="merge")

    def train() -> None:
        with setup.publisher:
            setup.held()
            setup.trainer.poke("model.norm.weight", np.array([0]), np.array([7], np.uint32))
            assert setup.publisher.publish().is_skipped
            setup.store.open()
            _ = 1 // 0

    with pytest.raises(ZeroDivisionError):
        train()
    setup.check()


def test_block_that_ends_by_an_error_raises_that_error_whatever_else_failed(
    setup: Setup, caplog: pytest.LogCaptureFixture
):
    setup.store.fail("put", down=True)

    def train() -> None:
        with setup.publisher:
            setup.step()
            setup.publish()
            _ = 1 // 0

    with pytest.raises(ZeroDivisionError):
        train()
    assert "the last publication failed too: injected failure" in caplog.text


def test_failure_is_logged_when_it_happens(setup: Setup, caplog: pytest.LogCaptureFixture):
    setup.store.fail("put")
    setup.step()
    with pytest.raises(StoreUnavailable):
        setup.publish().wait()
    assert "publication of version 1 failed; the next one carries its changes: injected failure" in caplog.text


def test_unknown_policy_is_refused(setup: Setup):
    with pytest.raises(ValueError, match="when_busy"):
        setup.opened(setup.trainer, when_busy="skip")


def test_state_is_that_of_the_newest_committed_version(setup: Setup):
    setup.held()
    state = setup.publisher.state_dict()
    assert (state["version"], state["state_digest"]) == (0, setup.publisher.state_digest)
    setup.store.open()
    setup.publisher.drain()
    assert setup.publisher.state_dict()["version"] == 1


def peaks(
    ram_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, *, is_failing: bool = False, **options: Any
) -> tuple[int, int]:
    """Publish that all of 4 MiB changes, 16 MiB of differences; return peak and rest of memory, while the handle lives.

    Args:
        is_failing: whether the publication fails.
    """
    weights = {f"w{number:02}": torch.zeros(1 << 16, dtype=torch.bfloat16) for number in range(32)}
    base = write_checkpoint(ram_path / "large", weights)
    store = GatedStore(PosixStore(ram_path / name))
    monkeypatch.setattr("trainer_hooks.publisher.open_store", lambda uri, *, single_writer: store)
    publisher = DeltaPublisher(weights, sync_dir=store.uri, base=base, max_file_bytes=1 << 18, threads=2, **options)
    for tensor in weights.values():
        tensor.fill_(1)
    if is_failing:
        store.fail("put")
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        publication = publisher.publish()
        eventually(publication.done)
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert publisher.version == 1 - is_failing
    publisher.close(drain=False)
    return peak - before, after - before


@pytest.mark.slow
def test_memory_is_that_of_blocking_publication_and_the_buffer_and_is_given_back(
    ram_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("trainer_hooks.publication.whole_writing.KeptChanges", partial(KeptChanges, 0))
    for module in ("diff", "differ"):
        monkeypatch.setattr(f"trainer_hooks.compare.{module}.PIECE_ELEMENTS", 1 << 16)
    buffer_bytes = 1 << 20
    blocking, _ = peaks(ram_path, monkeypatch, "blocking", asynchronous=False)
    bounded, rest = peaks(ram_path, monkeypatch, "bounded", buffer_bytes=buffer_bytes)
    whole, _ = peaks(ram_path, monkeypatch, "whole", buffer_bytes=1 << 30)
    _, rest_of_failure = peaks(ram_path, monkeypatch, "failing", is_failing=True)
    assert bounded < blocking + 2 * buffer_bytes
    assert whole > blocking + 4 * buffer_bytes  # or this would prove nothing
    assert max(rest, rest_of_failure) < 1 << 18
