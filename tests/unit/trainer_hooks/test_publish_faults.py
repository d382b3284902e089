"""Publishing into a store that fails: nothing is lost, nothing is half visible, whatever fails when."""

import errno
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.checkpoints import snapshot_of, tiny_tensors, write_checkpoint
from tests.support.faults import FaultyStore, When
from tests.support.mounts import tmpfs
from tests.support.runs import State, TinyTrainer, assert_same_state, make_run, replay
from trainer_hooks import DeltaPublisher
from trainer_hooks.publication.kept import KeptChanges
from vllm_delta_snapshot.errors import (
    ExclusiveCreateUnsupported,
    StoreError,
    StoreUnavailable,
    VersionConflict,
)
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import Store
from vllm_delta_snapshot.store.posix import PosixStore
from vllm_delta_snapshot.types import Change

Opener = Callable[[object, Store], DeltaPublisher]


@pytest.fixture
def base(ram_path: Path) -> Path:
    return write_checkpoint(ram_path / "base", tiny_tensors())


BEHIND = "difference, behind"


@pytest.fixture(params=["difference", "auto, kept encoded"])
def opened(request: pytest.FixtureRequest, base: Path, monkeypatch: pytest.MonkeyPatch) -> Opener:
    """Return a function that opens a publisher on a given store."""
    encoding, _, rest = request.param.partition(", ")
    if rest == "kept encoded":
        monkeypatch.setattr("trainer_hooks.publication.whole_writing.KeptChanges", partial(KeptChanges, 0))

    def open_publisher(source: object, store: Store) -> DeltaPublisher:
        monkeypatch.setattr("trainer_hooks.publisher.open_store", lambda uri, *, single_writer: store)
        return DeltaPublisher(
            source,
            sync_dir=store.uri,
            base=base,
            max_file_bytes=40,
            encoding=encoding,
            asynchronous=request.param == BEHIND,
        )

    return open_publisher


def train(opened: Opener, store: FaultyStore) -> tuple[TinyTrainer, list[State], int]:
    """Train two steps, and publish after each as well as the store lets us; then once more in good health.

    What fails behind a step is told by the next call, which publishes nothing then, or by draining at the end.
    """
    trainer, publisher, failures = TinyTrainer(), None, 0
    history = [trainer.state()]
    for step in (1, 2):
        trainer.step(step)
        history.append(trainer.state())
        try:
            publisher = publisher or opened(trainer, store)
            publisher.publish()
        except StoreUnavailable:
            failures += 1
    try:
        if publisher:
            publisher.drain()
    except StoreUnavailable:
        failures += 1
    store.heal()
    trainer.step(3)
    history.append(trainer.state())
    publisher = publisher or opened(trainer, store)
    publisher.publish().wait()
    return trainer, history, failures


def check_chain(sync_dir: Path, base: Path, scratch: Path, history: list[State]) -> None:
    """Check that every version is a state the trainer had, in order, and the last one its last."""
    folder = RunFolder(PosixStore(sync_dir))
    assert folder.versions() == list(range(1, len(folder.versions()) + 1))
    place = 0
    states = replay(sync_dir, base, scratch)
    for state in states:
        while any(state[name].tolist() != history[place][name].tolist() for name in state):
            place += 1
            assert place < len(history), "a version is no state that the trainer had"
    assert_same_state(states[-1], history[-1])


def faults(opened: Opener, base: Path, tmp_path: Path, when: When, *, down: bool) -> list[str]:
    """Fail at every operation in turn; return what went wrong."""
    counting = FaultyStore(PosixStore(tmp_path / "counting"))
    train(opened, counting)
    wrong = []
    for at, verb in enumerate(counting.log):
        if when is When.TORN and verb != "put":
            continue  # the same as BEFORE
        sync_dir = tmp_path / f"run-{at}"
        store = FaultyStore(PosixStore(sync_dir), at, when=when, down=down)
        try:
            _, history, _ = train(opened, store)
            check_chain(sync_dir, base, tmp_path / f"scratch-{at}", history)
        except Exception as error:  # noqa: BLE001
            wrong.append(f"{verb} ({at}): {error!r}")
    assert len(counting.log) > 15
    return wrong


@pytest.mark.parametrize("opened", ["difference", BEHIND], indirect=True)
@pytest.mark.parametrize("when", list(When))
def test_store_that_fails_once_at_any_operation_loses_nothing(opened: Opener, base: Path, ram_path: Path, when: When):
    assert faults(opened, base, ram_path, when, down=False) == []


@pytest.mark.parametrize("opened", ["auto, kept encoded", BEHIND], indirect=True)
@pytest.mark.parametrize("when", list(When))
def test_store_that_goes_down_at_any_operation_and_comes_back_loses_nothing(
    opened: Opener, base: Path, ram_path: Path, when: When
):
    assert faults(opened, base, ram_path, when, down=True) == []


def operations_of_publish(opened: Opener, tmp_path: Path) -> tuple[int, list[str]]:
    """Return the number of operations before the first `publish`, and those of it up to the commit, after one step."""
    store, trainer = FaultyStore(PosixStore(tmp_path / "probe")), TinyTrainer()
    publisher = opened(trainer, store)
    before = len(store.log)
    trainer.step(1)
    publisher.publish()
    operations = store.log[before:]  # what is looked at after the commit costs no version
    return before, operations[: operations.index("create") + 1]


def test_publish_writes_payload_then_metadata_then_commits(opened: Opener, tmp_path: Path):
    keys: list[str] = []

    class Recording(FaultyStore):
        def put(self, key: str, chunks) -> int:
            keys.append(f"put {key}")
            return super().put(key, chunks)

        def create(self, key: str, data: bytes) -> None:
            keys.append(f"create {key}")
            super().create(key, data)

    trainer = TinyTrainer()
    publisher = opened(trainer, Recording(PosixStore(tmp_path / "run")))
    keys.clear()
    trainer.step(1)
    folder = publisher.publish().report.folder
    payload = [f"put {folder}/{path.name}" for path in sorted((tmp_path / "run" / folder).glob("*.safetensors"))]
    assert len(payload) > 1
    assert keys == [*payload, f"put {folder}/metadata.json", "create versions/00000001.json"]


def test_failed_publication_is_not_visible(opened: Opener, tmp_path: Path):
    before, operations = operations_of_publish(opened, tmp_path)
    for offset in range(operations.index("create") + 1):
        store = FaultyStore(PosixStore(tmp_path / f"run-{offset}"), before + offset)
        trainer = TinyTrainer()
        publisher = opened(trainer, store)
        trainer.step(1)
        with pytest.raises(StoreUnavailable):
            publisher.publish()
        assert RunFolder(PosixStore(tmp_path / f"run-{offset}")).versions() == []
        assert (publisher.version, publisher.state_digest) == (0, RunFolder(store).read_run().base.state_digest)


def test_look_at_the_run_that_fails_once_after_the_commit_is_repeated(opened: Opener, tmp_path: Path):
    before, operations = operations_of_publish(opened, tmp_path)
    trainer = TinyTrainer()
    store = FaultyStore(PosixStore(tmp_path / "run"), before + len(operations))
    publisher = opened(trainer, store)
    trainer.step(1)
    assert publisher.publish().version == 1
    assert store.log[before + len(operations)] == "read_range"
    assert RunFolder(PosixStore(tmp_path / "run")).versions() == [1]


def test_lost_reply_of_the_commit_is_a_success(opened: Opener, base: Path, tmp_path: Path):
    before, operations = operations_of_publish(opened, tmp_path)
    store = FaultyStore(PosixStore(tmp_path / "run"), before + operations.index("create"), when=When.AFTER)
    trainer = TinyTrainer()
    publisher = opened(trainer, store)
    trainer.step(1)
    assert publisher.publish().version == 1
    trainer.step(2)
    assert publisher.publish().version == 2
    assert_same_state(replay(tmp_path / "run", base, tmp_path)[-1], trainer.state())


def test_interrupted_publication_is_carried_by_the_next(opened: Opener, base: Path, tmp_path: Path):
    def interrupt() -> None:
        raise KeyboardInterrupt

    before, operations = operations_of_publish(opened, tmp_path)
    for offset in range(len(operations)):
        sync_dir = tmp_path / f"run-{offset}"
        trainer = TinyTrainer()
        publisher = opened(trainer, FaultyStore(PosixStore(sync_dir), before + offset, fail=interrupt))
        trainer.step(1)
        with pytest.raises(KeyboardInterrupt):
            publisher.publish()
        publisher.publish()
        assert_same_state(replay(sync_dir, base, tmp_path / f"scratch-{offset}")[-1], trainer.state())


def test_publication_interrupted_right_after_its_commit_is_carried_on(opened: Opener, base: Path, tmp_path: Path):
    def interrupt() -> None:
        raise KeyboardInterrupt

    before, operations = operations_of_publish(opened, tmp_path)
    at = before + operations.index("create")
    trainer = TinyTrainer()
    publisher = opened(trainer, FaultyStore(PosixStore(tmp_path / "run"), at, when=When.AFTER, fail=interrupt))
    trainer.step(1)
    with pytest.raises(KeyboardInterrupt):
        publisher.publish()
    publisher.publish()
    assert_same_state(replay(tmp_path / "run", base, tmp_path)[-1], trainer.state())


@pytest.mark.parametrize("interruptions", [1, 2])
@pytest.mark.parametrize("moved", range(3))
def test_publication_interrupted_while_the_baseline_moves_is_carried_on(
    opened: Opener, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: int, interruptions: int
):
    trainer = TinyTrainer()
    publisher = opened(trainer, PosixStore(tmp_path / "run"))
    trainer.step(1)
    real, left = KeptChanges.changes, [interruptions]

    def interrupted(kept: KeptChanges) -> Iterator[Change]:
        changes = list(real(kept))
        yield from changes[:moved]
        if left[0]:
            left[0] -= 1
            raise KeyboardInterrupt
        yield from changes[moved:]

    monkeypatch.setattr(KeptChanges, "changes", interrupted)
    for _ in range(interruptions):
        with pytest.raises(KeyboardInterrupt):
            publisher.publish()
    trainer.step(2)
    publisher.publish()
    trainer.step(3)
    publisher.publish()
    assert_same_state(replay(tmp_path / "run", base, tmp_path)[-1], trainer.state())
    assert (
        publisher.state_digest == RunFolder(PosixStore(tmp_path / "run")).read_version(publisher.version).state_digest
    )


def test_second_trainer_on_the_same_version_conflicts_and_touches_nothing(opened: Opener, base: Path, tmp_path: Path):
    store = PosixStore(tmp_path / "run")
    first, second = TinyTrainer("first"), TinyTrainer("second")
    first.weights, second.weights = tiny_tensors(), tiny_tensors()
    one, two = opened(first, store), opened(second, store)
    first.step(1)
    second.step(1)
    one.publish()
    before = snapshot_of(tmp_path / "run")
    with pytest.raises(VersionConflict, match="version 1 was committed by another trainer") as caught:
        two.publish()
    assert caught.value.file == f"{tmp_path}/run/versions/00000001.json"
    assert caught.value.hint
    after = snapshot_of(tmp_path / "run")
    assert {name: after[name] for name in before} == before
    assert_same_state(replay(tmp_path / "run", base, tmp_path)[-1], first.state())


def test_trainer_that_conflicted_stays_in_conflict_until_it_restarts(opened: Opener, base: Path, tmp_path: Path):
    store = PosixStore(tmp_path / "run")
    first, second = TinyTrainer(), TinyTrainer()
    one, two = opened(first, store), opened(second, store)
    first.step(1)
    one.publish()
    second.step(2)
    for _ in range(2):
        with pytest.raises(VersionConflict):
            two.publish()
    assert opened(second, store).publish().version == 2
    assert_same_state(replay(tmp_path / "run", base, tmp_path)[-1], second.state())


def test_trainer_that_is_overtaken_right_before_its_commit_conflicts(opened: Opener, base: Path, tmp_path: Path):
    store = PosixStore(tmp_path / "run")
    first, second = TinyTrainer(), TinyTrainer()
    one = opened(first, store)
    first.step(2)
    _, operations = operations_of_publish(opened, tmp_path)
    # It opens an existing run, which takes fewer operations than making one.
    counting = FaultyStore(store)
    opened(second, counting)
    at = len(counting.log) + operations.index("create")
    two = opened(second, FaultyStore(store, at, fail=one.publish))
    second.step(1)
    with pytest.raises(VersionConflict):
        two.publish()
    assert_same_state(replay(tmp_path / "run", base, tmp_path)[-1], first.state())


def test_trainer_that_is_overtaken_while_it_makes_the_run_joins_it(opened: Opener, tmp_path: Path):
    store = PosixStore(tmp_path / "run")
    counting = FaultyStore(PosixStore(tmp_path / "counting"))
    opened(TinyTrainer(), counting)
    made: list[DeltaPublisher] = []
    at = counting.log.index("create")
    second = opened(TinyTrainer(), FaultyStore(store, at, fail=lambda: made.append(opened(TinyTrainer(), store))))
    assert second.run_id == made[0].run_id


def test_store_without_hard_links_is_refused_before_a_run_is_made(
    opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "link", _no_links)
    with pytest.raises(ExclusiveCreateUnsupported, match="single_writer=True"):
        opened(TinyTrainer(), PosixStore(tmp_path / "run"))
    assert snapshot_of(tmp_path / "run") == {}


def test_store_without_hard_links_is_accepted_for_a_single_writer(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "link", _no_links)
    trainer = TinyTrainer()
    publisher = DeltaPublisher(
        trainer, sync_dir=str(tmp_path / "run"), base=base, single_writer=True, asynchronous=False
    )
    trainer.step(1)
    publisher.publish()
    assert_same_state(replay(tmp_path / "run", base, tmp_path)[-1], trainer.state())


def _no_links(*paths: object) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def test_full_disk_fails_the_publication_and_the_next_one_carries_it(base: Path, tmp_path: Path):
    with tmpfs(tmp_path / "small", "200k") as folder:
        trainer = TinyTrainer()
        publisher = DeltaPublisher(trainer, sync_dir=str(folder / "run"), base=base, asynchronous=False)
        trainer.step(1)
        publisher.publish()
        filler = folder / "filler"
        with pytest.raises(OSError, match="No space"):
            filler.write_bytes(bytes(1 << 20))
        trainer.step(2)
        for _ in range(2):
            with pytest.raises(StoreError, match="Free space"):
                publisher.publish()
        assert RunFolder(PosixStore(folder / "run")).versions() == [1]
        filler.unlink()
        publisher.publish()
        assert_same_state(replay(folder / "run", base, tmp_path)[-1], trainer.state())


def test_run_folder_is_complete_without_the_folders_of_failed_publications(tmp_path: Path):
    run = make_run(tmp_path, 2)
    (run.sync_dir / "deltas" / "00000003-deadbeef").mkdir()
    (run.sync_dir / "deltas" / "00000003-deadbeef" / "delta.safetensors").write_bytes(b"half")
    assert run.folder.versions() == [1, 2]
    run.trainer.step(3)
    assert run.publisher.publish().version == 3
    assert_same_state(replay(run.sync_dir, run.base, tmp_path)[-1], run.trainer.state())
