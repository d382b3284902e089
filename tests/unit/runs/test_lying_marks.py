"""Marks, anchors and merged records that lie: never believed, named with what to do, nothing deleted by them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.checkpoints import snapshot_of
from tests.support.cli import Outcome
from tests.support.runs import TinyRun, copy_of, make_run
from vllm_delta_snapshot.audit.verify_run import verify_run
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import CorruptFile, DeltaSnapshotError, RunMismatch, StoreError
from vllm_delta_snapshot.runs.acks import Acknowledger
from vllm_delta_snapshot.runs.materialize import materialize
from vllm_delta_snapshot.runs.pruned_marks import PrunedMarks
from vllm_delta_snapshot.upkeep import UpkeepPolicy, upkeep
from vllm_delta_snapshot.upkeep.anchor import write_anchor
from vllm_delta_snapshot.upkeep.compact import compact
from vllm_delta_snapshot.upkeep.retention import RetentionPolicy, plan_pruning

OTHER = "f" * 8 + "-ffff-4fff-bfff-" + "f" * 12
NEWEST = 5
EARLY = RetentionPolicy(keep_versions=1)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A run with an anchor of version 3 and a merged delta from 0 to 4."""
    run = make_run(tmp_path_factory.mktemp("pristine"), NEWEST)
    write_anchor(run.folder, Checkpoint(run.base), 3)
    compact(run.folder, 0, 4)
    return run


@pytest.fixture
def run(pristine: TinyRun, tmp_path: Path) -> TinyRun:
    return copy_of(pristine, tmp_path / "run")


def edit(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def mark(run: TinyRun, number: int, **fields: object) -> Path:
    path = run.sync_dir / "pruned" / f"{number:08d}.json"
    path.parent.mkdir(exist_ok=True)
    known = {"format": "delta_snapshot_pruned", "format_version": 1, "created_at": "2026-01-01T00:00:00Z"}
    path.write_text(json.dumps(known | {"run_id": run.folder.read_run().run_id, "version": number} | fields))
    return path


def assert_newest_is_had(run: TinyRun, out: Path) -> None:
    materialize(run.folder, Checkpoint(run.base), NEWEST, out)
    assert Checkpoint(out).state_digest == run.record(NEWEST).state_digest


MARKS = {
    "beyond the newest version": (99_999_999, {}, None),
    "one beyond the newest version": (6, {}, None),
    "of another run": (4, {"run_id": OTHER}, None),
    "of another version": (4, {"version": 2}, None),
    "empty": (4, {}, b""),
    "garbage": (4, {}, b"{]"),
    "huge": (4, {}, b" " * (1 << 20)),
}


@pytest.mark.parametrize("lie", MARKS)
def test_mark_that_lies_is_named_and_neither_hides_nor_deletes_anything(run: TinyRun, lie: str, tmp_path: Path) -> None:
    number, fields, data = MARKS[lie]
    path = mark(run, number, **fields)
    if data is not None:
        path.write_bytes(data)
    before = snapshot_of(run.sync_dir)
    assert run.folder.pruned() == 0
    assert_newest_is_had(run, tmp_path / "out")
    for verb in (("inspect",), ("log",), ("verify",), ("verify", "--deep", "--base", run.base)):
        outcome = Outcome(verb[0], run.sync_dir, *verb[1:])
        assert outcome.code == 1, verb
        assert str(path) in outcome.stdout + outcome.stderr, verb
        assert "Delete that file" in outcome.stdout + outcome.stderr, verb
    with pytest.raises((CorruptFile, RunMismatch, DeltaSnapshotError)) as caught:
        plan_pruning(run.folder, EARLY)
    assert str(caught.value.file) == str(path)
    assert snapshot_of(run.sync_dir) == before


def test_lying_mark_above_a_good_one_leaves_the_good_one(run: TinyRun) -> None:
    mark(run, 3)
    mark(run, 99_999_999)
    assert run.folder.pruned() == 3


def test_good_mark_is_read_once(run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    mark(run, 3)
    store = run.folder.store
    marks = PrunedMarks(store, lambda: run.publisher.run_id, lambda: NEWEST)
    assert marks.find() == (3, None)
    monkeypatch.setattr(store, "read", None)
    assert marks.find() == (3, None)


def test_delta_that_is_gone_under_a_lying_mark_names_the_mark(run: TinyRun) -> None:
    path = mark(run, 4, run_id=OTHER)
    shutil.rmtree(run.sync_dir / run.record(2).folder)
    with pytest.raises(CorruptFile) as caught:
        run.folder.read_metadata(run.record(2))
    assert str(path) in str(caught.value.hint)


MERGED = ["digest", "run", "numbers", "empty"]


@pytest.mark.parametrize("lie", MERGED)
def test_merged_record_that_lies_is_left_aside_and_named(run: TinyRun, lie: str, tmp_path: Path) -> None:
    path = run.sync_dir / "merged" / "00000000-00000004.json"
    if lie == "digest":
        edit(path, state_digest="0" * 16)
    elif lie == "run":
        edit(path, run_id=OTHER)
    elif lie == "numbers":
        shutil.copy(path, run.sync_dir / "merged" / "00000000-00000005.json")
        path = run.sync_dir / "merged" / "00000000-00000005.json"
    else:
        path.write_bytes(b"")
    before = snapshot_of(run.sync_dir)
    assert_newest_is_had(run, tmp_path / "out")
    problems = verify_run(run.folder).problems
    assert [str(problem.error.file) for problem in problems] == [str(path)]
    assert problems[0].error.hint
    assert snapshot_of(run.sync_dir) == before


def test_merged_record_that_lies_is_the_error_where_it_is_the_only_way(run: TinyRun, tmp_path: Path) -> None:
    mark(run, 4)
    shutil.rmtree(run.sync_dir / "anchors")
    path = run.sync_dir / "merged" / "00000000-00000004.json"
    edit(path, state_digest="0" * 16)
    with pytest.raises(DeltaSnapshotError, match="merged delta from version 0 to 4") as caught:
        materialize(run.folder, Checkpoint(run.base), NEWEST, tmp_path / "out")
    assert str(path).endswith(str(caught.value.file))
    assert caught.value.hint


@pytest.mark.parametrize("lie", ["digest", "run", "numbers", "empty"])
def test_anchor_record_that_lies_is_left_aside_kept_and_named(run: TinyRun, lie: str, tmp_path: Path) -> None:
    path = run.sync_dir / "anchors" / "00000003.json"
    if lie == "digest":
        edit(path, state_digest="0" * 16)
    elif lie == "run":
        edit(path, run_id=OTHER)
    elif lie == "numbers":
        path = Path(shutil.copy(path, run.sync_dir / "anchors" / "00000005.json"))
    else:
        path.write_bytes(b"")
    before = snapshot_of(run.sync_dir)
    assert_newest_is_had(run, tmp_path / "out")
    assert str(path) in {str(problem.error.file) for problem in verify_run(run.folder).problems} or lie == "digest"
    assert not verify_run(run.folder).is_ok
    plan = plan_pruning(run.folder, EARLY)
    if lie != "digest":
        number = int(path.stem)
        assert number not in plan.anchors
        assert any(f"--drop-anchor {number} --yes" in reason for reason in plan.held_by)
    assert snapshot_of(run.sync_dir) == before


def test_anchor_beyond_the_newest_version_does_not_keep_others_from_being_due(run: TinyRun) -> None:
    (run.sync_dir / "anchors" / "99999999.json").write_bytes(b"")
    report = upkeep(run.folder, Checkpoint(run.base), UpkeepPolicy(anchor_every=5))
    assert report.anchor is not None
    assert report.anchor.version == 5


def test_stray_anchor_does_not_make_a_stray_version_the_newest(run: TinyRun) -> None:
    for folder in ("anchors", "versions"):
        (run.sync_dir / folder / "99999999.json").write_bytes(b"")
    newest, stray = run.folder.newest_and_stray()
    assert newest == NEWEST
    assert "99999999" in str(stray)


def test_acknowledgement_of_the_last_number_is_named_by_the_next_writer(run: TinyRun) -> None:
    path = run.sync_dir / "acks" / "a" / "99999999.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    with pytest.raises(StoreError) as caught:
        Acknowledger(run.folder.store, run.publisher.run_id, "a").write(3, pause_s=0.0)
    assert (str(caught.value.file), "Delete that file" in str(caught.value.hint)) == (str(path), True)
    assert [found.name for found in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("data", [b"", b"{]", b" " * (1 << 20)], ids=["empty", "garbage", "huge"])
def test_acknowledgement_that_cannot_be_read_is_named(run: TinyRun, data: bytes) -> None:
    path = run.sync_dir / "acks" / "a" / "00000001.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    with pytest.raises(DeltaSnapshotError) as caught:
        plan_pruning(run.folder, EARLY)
    assert (str(caught.value.file), "Delete that file" in str(caught.value.hint)) == (str(path), True)
