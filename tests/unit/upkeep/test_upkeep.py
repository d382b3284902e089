"""Upkeep: anchors, merged deltas and pruning when they are due, by a process beside the trainer."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.support.checkpoints import write_checkpoint
from tests.support.runs import TinyRun, TinyTrainer, copy_of, make_run
from trainer_hooks import DeltaPublisher, UpkeepPolicy
from vllm_delta_snapshot.audit.verify_run import verify_run
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.runs.chain import Shortcuts
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store.posix import PosixStore
from vllm_delta_snapshot.upkeep import due_anchor, due_merges, upkeep


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_run(tmp_path_factory.mktemp("run"), versions=7)


@pytest.fixture
def run(pristine: TinyRun, tmp_path: Path) -> TinyRun:
    return copy_of(pristine, tmp_path / "run")


def test_upkeep_does_what_is_due_and_then_nothing(run: TinyRun) -> None:
    policy = UpkeepPolicy(anchor_every=3, merge_every=2, keep_versions=1)
    report = upkeep(run.folder, Checkpoint(run.base), policy)
    assert report.anchor is not None
    assert report.pruned is not None
    assert [(one.base_version, one.version) for one in report.merged] == [(0, 2), (2, 4), (4, 6)]
    assert (report.anchor.version, report.pruned.up_to) == (6, 6)
    again = upkeep(run.folder, Checkpoint(run.base), policy)
    assert (again.anchor, again.merged, again.pruned) == (None, [], None)
    assert verify_run(run.folder).is_ok


def test_nothing_is_due_by_default(run: TinyRun) -> None:
    report = upkeep(run.folder, None, UpkeepPolicy())
    assert (report.anchor, report.merged, report.pruned) == (None, [], None)


@pytest.mark.parametrize(("anchors", "policy", "due"), [
    ((), UpkeepPolicy(anchor_every=3), 6),
    ((3,), UpkeepPolicy(anchor_every=3), 6),
    ((6,), UpkeepPolicy(anchor_every=3), None),
    ((), UpkeepPolicy(anchor_every=8), None),
    ((), UpkeepPolicy(anchor_after_ratio=1e-6), 7),
    ((7,), UpkeepPolicy(anchor_after_ratio=1e-6), None),
    ((), UpkeepPolicy(anchor_after_ratio=1e6), None),
])  # fmt: skip
def test_anchor_is_due_by_cadence_and_by_size(
    run: TinyRun, anchors: tuple[int, ...], policy: UpkeepPolicy, due: int | None
) -> None:
    assert due_anchor(run.folder, 7, Shortcuts(anchors=anchors), policy) == due


@pytest.mark.parametrize(("newest", "shortcuts", "due"), [
    (7, Shortcuts(), [(0, 2), (2, 4), (4, 6)]),
    (7, Shortcuts(merged=((2, 4),)), [(0, 2), (4, 6)]),
    (8, Shortcuts(anchors=(6,)), [(6, 8)]),
    (8, Shortcuts(anchors=(5,)), [(4, 6), (6, 8)]),
    (8, Shortcuts(anchors=(5,), pruned=5), [(6, 8)]),
    (1, Shortcuts(), []),
])  # fmt: skip
def test_merged_deltas_are_due_from_multiple_to_multiple(
    newest: int, shortcuts: Shortcuts, due: list[tuple[int, int]]
) -> None:
    assert list(due_merges(newest, shortcuts, UpkeepPolicy(merge_every=2))) == due


def test_publisher_has_it_done_beside_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = TinyTrainer()
    base = write_checkpoint(tmp_path / "base", trainer.weights)
    policy = UpkeepPolicy(anchor_every=2, merge_every=2, keep_versions=1)
    folder = RunFolder(PosixStore(tmp_path / "run"))
    with (
        caplog.at_level(logging.WARNING),
        DeltaPublisher(trainer, sync_dir=str(tmp_path / "run"), base=base, upkeep=policy) as publisher,
    ):
        for number in range(1, 5):
            trainer.step(number)
            publisher.publish().wait()
            if number == 2:
                assert publisher._upkeep is not None
                publisher._upkeep.close(timeout_s=60)
                assert folder.shortcuts().anchors == (2,)
    assert folder.shortcuts().anchors == (2, 4)
    assert folder.pruned() == 3
    assert verify_run(folder).is_ok
    assert caplog.records == []


def test_upkeep_that_fails_is_told_of_and_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = TinyTrainer()
    base = write_checkpoint(tmp_path / "base", trainer.weights)
    sync_dir = tmp_path / "run"
    publisher = DeltaPublisher(trainer, sync_dir=str(sync_dir), base=base, upkeep=UpkeepPolicy(anchor_every=1))
    moved = base.rename(tmp_path / "moved")
    trainer.step(1)
    publisher.publish().wait()
    with caplog.at_level(logging.WARNING):
        publisher.close()
    assert "upkeep" in caplog.text
    assert "no such checkpoint folder" in caplog.text
    assert moved.exists()
    assert RunFolder(PosixStore(sync_dir)).versions() == [1]
