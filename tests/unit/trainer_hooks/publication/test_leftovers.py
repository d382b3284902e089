"""Folders of failed publications: gone at once where that is proven, else with the next commit; no running writer's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.checkpoints import write_checkpoint
from tests.support.runs import TinyTrainer
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.audit.verify_run import verify_run
from vllm_delta_snapshot.errors import StoreError, StoreUnavailable, VersionConflict
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store.posix import PosixStore
from vllm_delta_snapshot.upkeep.failed_folder import removed_if_failed, superseded_folders


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "base", TinyTrainer().weights)


def publisher_of(trainer: TinyTrainer, sync_dir: Path, base: Path) -> DeltaPublisher:
    return DeltaPublisher(trainer, sync_dir=str(sync_dir), base=base, threads=1, asynchronous=False)


def deltas(sync_dir: Path) -> list[str]:
    return sorted(os.listdir(sync_dir / "deltas")) if (sync_dir / "deltas").exists() else []


def left_by_a_crash(sync_dir: Path, version: int, name: str = "0123abcd") -> str:
    folder = sync_dir / "deltas" / f"{version:08d}-{name}"
    folder.mkdir(parents=True)
    (folder / "delta.safetensors").write_bytes(b"half")
    return folder.name


def failing_create(error: StoreError, monkeypatch: pytest.MonkeyPatch) -> None:
    def create(self: PosixStore, key: str, data: bytes) -> None:
        raise error

    monkeypatch.setattr(PosixStore, "create", create)


def test_publication_that_fails_while_it_is_written_leaves_no_folder(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, trainer = tmp_path / "sync", TinyTrainer()
    publisher = publisher_of(trainer, sync, base)
    trainer.step(1)
    put = PosixStore.put

    def full(self: PosixStore, key: str, chunks: object) -> int:
        if key.endswith("metadata.json"):
            raise StoreError("no room", file=key)
        return put(self, key, chunks)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(PosixStore, "put", full)
        with pytest.raises(StoreError, match="no room"):
            publisher.publish()
    assert deltas(sync) == []
    publisher.publish()
    assert len(deltas(sync)) == 1


@pytest.mark.parametrize("error", [StoreError("refused"), StoreUnavailable("gone")])
def test_folder_of_a_commit_that_failed_goes_with_the_next_commit(
    tmp_path: Path, base: Path, error: StoreError, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, trainer = tmp_path / "sync", TinyTrainer()
    publisher = publisher_of(trainer, sync, base)
    publisher.publish()
    trainer.step(1)
    with monkeypatch.context() as patched:
        failing_create(error, patched)
        with pytest.raises(StoreError):
            publisher.publish()
    [_, failed] = deltas(sync)  # nobody knows yet whether a record will name it
    publisher.publish()
    assert failed not in deltas(sync)
    assert len(deltas(sync)) == 2
    assert verify_run(RunFolder(PosixStore(sync))).is_ok


def test_commit_that_another_won_leaves_no_folder_of_the_loser(tmp_path: Path, base: Path) -> None:
    sync, one, two = tmp_path / "sync", TinyTrainer(), TinyTrainer()
    first, second = publisher_of(one, sync, base), publisher_of(two, sync, base)
    one.step(1)
    first.publish()
    two.step(2)
    with pytest.raises(VersionConflict):
        second.publish()
    assert len(deltas(sync)) == 1
    assert verify_run(RunFolder(PosixStore(sync))).is_ok


def test_next_life_removes_what_a_killed_one_left_and_nothing_that_may_still_be_written(
    tmp_path: Path, base: Path
) -> None:
    sync, trainer = tmp_path / "sync", TinyTrainer()
    publisher_of(trainer, sync, base).publish()
    old, next_one, later = (left_by_a_crash(sync, version) for version in (1, 2, 3))
    publisher = publisher_of(trainer, sync, base)
    assert {old, next_one, later} <= set(deltas(sync))
    trainer.step(1)
    publisher.publish()
    assert old not in deltas(sync)
    assert next_one not in deltas(sync)  # the version has a record, and that names another
    assert later in deltas(sync)  # has none: somebody may be writing it
    assert verify_run(RunFolder(PosixStore(sync))).is_ok


def test_folder_that_a_record_names_is_never_among_the_superseded(tmp_path: Path, base: Path) -> None:
    sync, trainer = tmp_path / "sync", TinyTrainer()
    publisher = publisher_of(trainer, sync, base)
    for step in range(3):
        trainer.step(step)
        publisher.publish()
    named = deltas(sync)
    other = left_by_a_crash(sync, 2)
    assert superseded_folders(RunFolder(PosixStore(sync))) == [f"deltas/{other}"]
    assert sorted([*named, other]) == deltas(sync)


def test_folders_of_a_version_stay_where_the_one_that_its_record_names_is_not_there(tmp_path: Path, base: Path) -> None:
    sync, trainer = tmp_path / "sync", TinyTrainer()
    publisher = publisher_of(trainer, sync, base)
    trainer.step(1)
    publisher.publish()
    [named] = deltas(sync)
    left_by_a_crash(sync, 1)
    (sync / "deltas" / named).rename(sync / "deltas" / "00000001-89abcdef")  # perhaps one of them is it
    assert superseded_folders(RunFolder(PosixStore(sync))) == []


def test_store_that_lets_nobody_delete_is_asked_once_and_holds_nothing_up(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, trainer = tmp_path / "sync", TinyTrainer()
    publisher = publisher_of(trainer, sync, base)
    left_by_a_crash(sync, 1)
    asked: list[str] = []

    def delete(self: PosixStore, key: str) -> None:
        asked.append(key)
        raise StoreError("refused", file=key)

    monkeypatch.setattr(PosixStore, "delete", delete)
    for step in range(3):
        trainer.step(step)
        publisher.publish()
    assert len(asked) == 1
    assert publisher.version == 3


@pytest.mark.parametrize("error", [StoreUnavailable("gone"), FileExistsError])
def test_what_may_be_another_s_or_cannot_be_reached_is_left(tmp_path: Path, error: object) -> None:
    from vllm_delta_snapshot.errors import ObjectExists

    raised = ObjectExists("taken") if error is FileExistsError else error
    store = PosixStore(tmp_path)
    store.put("deltas/00000001-0123abcd/x", [memoryview(b"1")])
    with pytest.raises(StoreError), removed_if_failed(store, "deltas/00000001-0123abcd"):
        raise raised  # type: ignore[misc]
    assert store.list("deltas/00000001-0123abcd") == ["x"]
    with pytest.raises(KeyboardInterrupt), removed_if_failed(store, "deltas/00000001-0123abcd"):
        raise KeyboardInterrupt
    assert store.list("deltas") == []
