"""Pruning: what may go, what never goes, in which order, and that an interrupted one goes on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.runs import TinyRun, copy_of, make_run
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.audit.verify_run import verify_run
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import StoreUnavailable, VersionConflict
from vllm_delta_snapshot.runs.acks import Acknowledgement
from vllm_delta_snapshot.runs.materialize import materialize
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store.posix import PosixStore
from vllm_delta_snapshot.upkeep.anchor import write_anchor
from vllm_delta_snapshot.upkeep.compact import compact
from vllm_delta_snapshot.upkeep.retention import RetentionPolicy, plan_pruning, prune

VERSIONS = 8
KEEP_TWO = RetentionPolicy(keep_versions=2)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A run with anchors of versions 2, 4 and 6."""
    run = make_run(tmp_path_factory.mktemp("run"), versions=VERSIONS)
    for version in (2, 4, 6):
        write_anchor(run.folder, Checkpoint(run.base), version)
    return run


@pytest.fixture
def run(pristine: TinyRun, tmp_path: Path) -> TinyRun:
    return copy_of(pristine, tmp_path / "run")


def acknowledge(run: TinyRun, sampler: str, version: int, *, age_s: float = 0.0) -> None:
    said = Acknowledgement(
        run_id=run.publisher.run_id, sampler=sampler, version=version, applied_at=time.time() - age_s, pause_s=0.1
    )
    run.folder.store.create(f"acks/{sampler}/00000001.json", said.to_json())


def deltas(run: TinyRun) -> list[int]:
    return sorted(int(path.name.partition("-")[0]) for path in (run.sync_dir / "deltas").iterdir())


def anchors(run: TinyRun) -> list[int]:
    return sorted(int(path.name.partition("-")[0]) for path in (run.sync_dir / "anchors").iterdir() if path.is_dir())


def check_newest(run: TinyRun, tmp_path: Path) -> None:
    """The newest version must be there for who has nothing but the base, and who has not even that."""
    for number, base in enumerate((Checkpoint(run.base), None)):
        made = materialize(run.folder, base, VERSIONS, tmp_path / f"made-{number}")
        assert made.state_digest == run.record(VERSIONS).state_digest


def test_plan_deletes_nothing(run: TinyRun) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.sync_dir.rglob("*")}
    plan = plan_pruning(run.folder, KEEP_TWO)
    assert (plan.up_to, plan.anchors, len(plan.folders)) == (6, (2,), 6)
    assert {path: path.stat().st_mtime_ns for path in run.sync_dir.rglob("*")} == before


def test_old_deltas_and_anchors_go_and_the_newest_version_stays_in_reach(run: TinyRun, tmp_path: Path) -> None:
    prune(run.folder, plan_pruning(run.folder, KEEP_TWO))
    assert (deltas(run), anchors(run), run.folder.pruned()) == ([7, 8], [4, 6], 6)
    assert run.folder.versions() == list(range(1, VERSIONS + 1))
    assert verify_run(run.folder).is_ok
    check_newest(run, tmp_path)
    assert plan_pruning(run.folder, KEEP_TWO).is_empty


def test_without_an_anchor_nothing_goes(tmp_path: Path) -> None:
    run = make_run(tmp_path, versions=4)
    plan = plan_pruning(run.folder, RetentionPolicy(keep_versions=1))
    assert plan.is_empty
    assert "only way" in plan.held_by[0]


def test_deltas_since_the_newest_anchor_stay(run: TinyRun, tmp_path: Path) -> None:
    plan = plan_pruning(run.folder, RetentionPolicy(keep_versions=1))
    assert plan.up_to == 6
    prune(run.folder, plan)
    assert deltas(run) == [7, 8]
    check_newest(run, tmp_path)


def test_merged_delta_is_a_way_too(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", versions=VERSIONS)
    compact(run.folder, 0, 5)
    plan = plan_pruning(run.folder, RetentionPolicy(keep_versions=2))
    assert (plan.up_to, plan.merged) == (5, ())
    prune(run.folder, plan)
    assert deltas(run) == [6, 7, 8]
    made = materialize(run.folder, Checkpoint(run.base), VERSIONS, tmp_path / "made")
    assert made.state_digest == run.record(VERSIONS).state_digest


def test_merged_deltas_that_nobody_takes_go(run: TinyRun) -> None:
    for step in ((1, 3), (2, 4), (6, 8), (0, 2)):
        compact(run.folder, *step)
    plan = plan_pruning(run.folder, KEEP_TWO)
    assert plan.merged == ((0, 2), (1, 3), (2, 4))
    prune(run.folder, plan)
    assert run.folder.shortcuts().merged == ((6, 8),)
    assert verify_run(run.folder).is_ok


def test_sampler_can_go_on_from_what_it_acknowledged(run: TinyRun) -> None:
    acknowledge(run, "slow", 3)
    plan = plan_pruning(run.folder, KEEP_TWO)
    assert plan.up_to == 3
    assert "slow" in plan.held_by[0]
    prune(run.folder, plan)
    assert deltas(run) == [4, 5, 6, 7, 8]


def test_sampler_that_has_said_nothing_for_long_holds_nothing_back(run: TinyRun) -> None:
    acknowledge(run, "gone", 3, age_s=90_000)
    assert plan_pruning(run.folder, KEEP_TWO).up_to == 6


@pytest.mark.parametrize(("policy", "kept"), [
    (RetentionPolicy(1, 1), [6]),
    (RetentionPolicy(1, 2), [4, 6]),
    (RetentionPolicy(1, 1, keep_anchor_every=2), [2, 4, 6]),
    (RetentionPolicy(1, 1, keep_anchor_every=4), [4, 6]),
])  # fmt: skip
def test_anchors_are_kept_by_number_and_cadence(run: TinyRun, policy: RetentionPolicy, kept: list[int]) -> None:
    prune(run.folder, plan_pruning(run.folder, policy))
    assert anchors(run) == kept
    assert run.folder.shortcuts().anchors == tuple(kept)


def test_anchor_that_is_not_whole_counts_for_none(run: TinyRun, tmp_path: Path) -> None:
    folder = run.sync_dir / run.folder.read_anchor(6).folder
    next(folder.glob("*.safetensors")).unlink()
    plan = plan_pruning(run.folder, KEEP_TWO)
    assert (plan.up_to, plan.anchors) == (4, (6,))
    prune(run.folder, plan)
    check_newest(run, tmp_path)


def test_damaged_anchor_is_dropped_on_request_unless_it_is_the_only_way(run: TinyRun, tmp_path: Path) -> None:
    policy = RetentionPolicy(drop_anchors=(6,))
    prune(run.folder, plan_pruning(run.folder, policy))
    assert anchors(run) == [2, 4]
    prune(run.folder, plan_pruning(run.folder, RetentionPolicy(keep_versions=1, keep_anchors=1)))
    assert (anchors(run), run.folder.pruned()) == ([4], 4)
    plan = plan_pruning(run.folder, RetentionPolicy(drop_anchors=(4,)))
    assert plan.anchors == ()
    assert "only way" in plan.held_by[0]
    check_newest(run, tmp_path)


def test_what_losers_and_crashes_left_goes_and_what_may_be_being_written_stays(run: TinyRun) -> None:
    for name in ("00000007-deadbeef", "00000009-deadbeef"):
        (run.sync_dir / "deltas" / name).mkdir()
        (run.sync_dir / "deltas" / name / "delta.safetensors").write_bytes(b"half")
    prune(run.folder, plan_pruning(run.folder, RetentionPolicy()))
    assert deltas(run) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert not (run.sync_dir / "deltas" / "00000007-deadbeef").exists()


class Interrupted(PosixStore):
    """A store that goes away at its n-th change."""

    def __init__(self, root: Path, left: int) -> None:
        super().__init__(root)
        self.left = left

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise StoreUnavailable("gone")

    def create(self, key: str, data: bytes) -> None:
        """See `Store.create`."""
        self._count()
        super().create(key, data)

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        self._count()
        super().delete(key)


def test_pruning_cut_off_anywhere_leaves_a_sound_run_and_goes_on(pristine: TinyRun, tmp_path: Path) -> None:
    total = 0
    for left in range(1000):
        run = copy_of(pristine, tmp_path / f"run-{left}")
        folder = RunFolder(Interrupted(run.sync_dir, left))
        plan = plan_pruning(run.folder, KEEP_TWO)
        try:
            prune(folder, plan)
        except StoreUnavailable:
            assert verify_run(run.folder).is_ok
            prune(run.folder, plan_pruning(run.folder, KEEP_TWO))
        else:
            total = left
        assert (deltas(run), anchors(run)) == ([7, 8], [4, 6])
        if total:
            break
    assert total > 10
    check_newest(run, tmp_path)


def test_number_of_a_pruned_version_is_not_used_again(run: TinyRun) -> None:
    zombie, publisher = (DeltaPublisher(run.trainer, sync_dir=str(run.sync_dir), base=run.base) for _ in range(2))
    for number in range(9, 13):
        run.trainer.step(number)
        publisher.publish().wait()
    write_anchor(run.folder, Checkpoint(run.base), 12)
    prune(run.folder, plan_pruning(run.folder, RetentionPolicy(keep_versions=1)))
    with pytest.raises(VersionConflict):
        zombie.publish().wait()
    assert verify_run(run.folder).is_ok
