"""A writer that outlives its run, in a folder that was wiped and begun anew: it leaves nothing there, or what is taken
over; whenever the folder was wiped, and whenever the writer dies."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.checkpoints import snapshot_of, tiny_tensors, write_checkpoint
from tests.support.faults import FaultyStore
from tests.support.hosts import Host
from tests.support.lives import KINDS, Life, MortalStore, opened, wipe
from tests.support.runs import TinyRun, TinyTrainer
from trainer_hooks import PublishReport
from trainer_hooks.publication.upkeep import SideUpkeep
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import (
    BrokenChain,
    CorruptFile,
    DeltaSnapshotError,
    RunMismatch,
    StoreError,
    StoreUnavailable,
    VersionConflict,
)
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.anchor import PrunedMark
from vllm_delta_snapshot.runs.materialize import materialize
from vllm_delta_snapshot.runs.own_run import OwnRun, run_id_of
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store.posix import PosixStore
from vllm_delta_snapshot.upkeep import UpkeepOrder, UpkeepPolicy, upkeep
from vllm_delta_snapshot.upkeep.anchor import write_anchor
from vllm_delta_snapshot.upkeep.compact import compact
from vllm_delta_snapshot.upkeep.retention import RetentionPolicy, plan_pruning, prune
from vllm_delta_snapshot.upkeep.upkeep import main as do_upkeep

OTHER = "00000000-0000-4000-8000-000000000000"


@pytest.fixture
def base(ram_path: Path) -> Path:
    return write_checkpoint(ram_path / "base", tiny_tensors())


@pytest.fixture
def store(ram_path: Path) -> PosixStore:
    return PosixStore(ram_path / "run")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Story:
    """An old life that publishes its second version, and a new one that begins meanwhile with some versions."""

    def __init__(self, folder: Path, base: Path, kind: str, versions: int) -> None:
        self.inner = PosixStore(folder)
        self.mortal = MortalStore(self.inner)
        self.base, self.kind, self.versions = base, kind, versions
        self.old = Life(self.mortal, base, seed=1, kind=kind)
        self.old.publish()
        self.new: Life | None = None

    def begin_anew(self) -> None:
        wipe(self.inner)
        self.new = Life(self.inner, self.base, seed=2, kind=self.kind)
        self.new.publish(self.versions)

    def play(self, at: int | None, dies: int | None = None) -> DeltaSnapshotError | None:
        """Have the old life publish; return what it was told."""
        self.mortal.arm(at, dies, self.begin_anew)
        try:
            self.old.publish()
        except DeltaSnapshotError as error:
            return error
        return None


def operations(folder: Path, base: Path, kind: str) -> list[str]:
    story = Story(folder, base, kind, 0)
    assert story.play(None) is None
    return story.mortal.made


@pytest.mark.parametrize("versions", [0, 1, 2, 3])
def test_trainer_that_outlived_its_run_leaves_nothing_in_the_new_one(
    base: Path, ram_path: Path, kind: str, versions: int
):
    made = operations(ram_path / "counted", base, kind)
    assert made[-3:] == ["read_range", "create", "read_range"]
    for at in range(len(made)):
        story = Story(ram_path / f"run-{at}", base, kind, versions)
        error = story.play(at)
        assert isinstance(error, RunMismatch), (at, error)
        assert "was wiped or replaced" in error.what
        assert story.new is not None
        assert (error.expected, error.found) == (
            f"run {story.old.publisher.run_id}",
            f"run {story.new.publisher.run_id}",
        )
        story.new.check()
        assert len(story.inner.list(layout.DELTAS_FOLDER)) == versions
        before = snapshot_of(Path(story.inner.uri))
        story.mortal.arm(None, None, lambda: None)
        with pytest.raises(RunMismatch, match="was wiped or replaced"):
            story.old.publish()
        assert "put" not in story.mortal.made
        assert snapshot_of(Path(story.inner.uri)) == before
        story.new.publish(2)
        story.new.check()


@pytest.mark.parametrize("versions", [0, 1, 2])
@pytest.mark.parametrize("next_life", ["goes on", "starts again"])
def test_wherever_the_outlived_trainer_dies_the_new_run_repairs_what_it_left(
    base: Path, ram_path: Path, versions: int, next_life: str
):
    made = operations(ram_path / "counted", base, "DeltaPublisher")
    left = 0
    for at in range(len(made) - 3, len(made)):
        for dies in range(at, len(made) + 3):
            story = Story(ram_path / f"run-{at}-{dies}", base, "DeltaPublisher", versions)
            error = story.play(at, dies)
            new = story.new
            assert isinstance(error, RunMismatch | StoreUnavailable), (at, dies, error)
            assert new is not None
            folder = RunFolder(story.inner)
            left += folder.versions() != list(range(1, versions + 1))
            if next_life == "starts again":
                new.restart()
            new.publish(3)
            new.check()
    assert versions == 2 or left  # or this would prove nothing


def test_new_trainer_that_takes_over_while_the_old_one_takes_back_is_whole_again(base: Path, ram_path: Path):
    made = operations(ram_path / "counted", base, "DeltaPublisher")
    story = Story(ram_path / "run", base, "DeltaPublisher", 1)
    new_version: list[int] = []

    class Slow(MortalStore):
        def delete(self, key: str) -> None:
            if key == layout.version_key(2) and not new_version:
                assert story.new is not None
                new_version.append(2)
                story.new.publish()  # it finds the old one's record at its next number
            super().delete(key)

    slow = Slow(story.inner)
    story.old.publisher._own.store = slow
    slow.arm(made[made.index("metadata") :].index("create") if "metadata" in made else None, None, story.begin_anew)
    wiped: list[int] = []
    real = slow.create

    def create(key: str, data: bytes) -> None:
        if not wiped:
            wiped.append(1)
            story.begin_anew()
        real(key, data)

    slow.create = create  # type: ignore[method-assign]
    with pytest.raises(RunMismatch):
        story.old.publish()
    assert new_version == [2]
    assert story.new is not None
    assert RunFolder(story.inner).versions() == [1]  # the old one took away what the new one had just put there
    story.new.publish()
    story.new.check()


def test_folder_that_was_wiped_and_not_begun_anew_stays_empty(base: Path, store: PosixStore, kind: str):
    life = Life(store, base, seed=1, kind=kind)
    life.publish()
    wipe(store)
    with pytest.raises(RunMismatch, match="found no run any more"):
        life.publish()
    assert [path for path in Path(store.uri).rglob("*") if path.is_file()] == []


def test_lost_answer_of_a_commit_that_came_into_another_run_is_withdrawn_by_the_next_call(base: Path, ram_path: Path):
    made = operations(ram_path / "counted", base, "DeltaPublisher")
    story = Story(ram_path / "run", base, "DeltaPublisher", 0)
    assert isinstance(story.play(len(made) - 2, len(made) - 1), StoreUnavailable)
    assert story.inner.list(layout.VERSIONS_FOLDER) == ["00000002.json"]
    story.mortal.arm(None, None, lambda: None)
    with pytest.raises(RunMismatch, match="was wiped or replaced"):
        story.old.publisher.publish()
    assert story.inner.list(layout.VERSIONS_FOLDER) == []
    assert story.new is not None
    story.new.publish(3)
    story.new.check()


def test_run_that_is_read_again_after_an_interrupt_is_ones_own(base: Path, store: PosixStore):
    life = Life(store, base, seed=1)
    life.publish(2)
    life.publisher._published._is_moving = True  # an interrupt came in the middle of a move
    another_run_begins(store, base)
    with pytest.raises(RunMismatch, match="was wiped or replaced"):
        life.publish()
    assert life.publisher.version == 2


def forge(store: PosixStore, key: str, like: bytes, **changes: object) -> None:
    """Put a record of another run there."""
    store.create(key, json.dumps(json.loads(like) | {"run_id": OTHER} | changes).encode())


def forged_version(life: Life, version: int) -> None:
    like = life.store.read(layout.version_key(1), max_bytes=1 << 16)
    folder = layout.delta_folder(version, "0" * 32)
    forge(life.inner, layout.version_key(version), like, version=version, base_version=version - 1, folder=folder)


@pytest.fixture
def life(base: Path, store: PosixStore) -> Life:
    life = Life(store, base, seed=1)
    life.inner = store  # type: ignore[attr-defined]
    life.publish(2)
    return life


def test_readers_name_the_record_of_another_run_and_go_on_when_it_was_taken_over(
    life: Life, base: Path, store: PosixStore, tmp_path: Path
):
    forged_version(life, 3)
    folder = RunFolder(store)
    assert folder.newest_and_stray()[0] == 2
    with pytest.raises(RunMismatch, match="belongs to another run") as caught:
        folder.newest()
    assert str(caught.value.file).endswith("versions/00000003.json")
    assert "the run's own trainer takes its place" in str(caught.value).lower()
    with pytest.raises(RunMismatch, match="belongs to another run"):
        materialize(folder, Checkpoint(base), 3, tmp_path / "not")
    materialize(folder, Checkpoint(base), 2, tmp_path / "two")
    run = TinyRun(base, Path(store.uri), life.trainer, life.publisher, life.history)
    host = Host(run, tmp_path / "stage")
    host.tell(0, 0)
    for _ in range(3):
        host.stager.step()
    host.check_update(0, 2)
    assert host.state.problem is not None
    assert "belongs to another run" in str(host.state.problem.error)
    life.publish()
    assert folder.newest() == 3
    host.stager._retry_at = 0.0
    host.stager.step()
    assert host.state.problem is None
    host.check_update(0, 3)
    host.close()
    life.check()


def test_reader_of_a_run_that_was_wiped_is_told_so_and_not_to_delete_anything(
    life: Life, base: Path, store: PosixStore
):
    folder = RunFolder(store)
    assert folder.newest() == 2
    wipe(store)
    new = Life(store, base, seed=2)
    new.publish(3)
    for read in (folder.newest, lambda: folder.read_version(3)):
        with pytest.raises(RunMismatch, match="the folder holds another run now") as caught:
            read()
        assert "--switch-run" in str(caught.value)
        assert "delete that file" not in str(caught.value)


@pytest.mark.parametrize("numbers", [(3,), (3, 4), (7,), (3, 99)])
def test_trainer_that_starts_again_removes_what_another_run_left(life: Life, numbers: tuple[int, ...]):
    for number in numbers:
        forged_version(life, number)
    life.restart()
    assert life.publisher.version == 2
    life.publish(3)
    life.check()


def test_trainer_that_finds_all_versions_to_be_another_runs_deletes_none(life: Life, store: PosixStore):
    data = json.loads((Path(store.uri) / layout.RUN_KEY).read_text())
    (Path(store.uri) / layout.RUN_KEY).write_text(
        json.dumps(data | {"run_id": "f" * 8 + "-ffff-4fff-bfff-" + "f" * 12})
    )
    before = snapshot_of(Path(store.uri))
    with pytest.raises(RunMismatch, match="all 2 versions here are of another run") as caught:
        life.restart()
    assert "restore it from a copy" in str(caught.value)
    assert snapshot_of(Path(store.uri)) == before


def test_record_that_says_of_no_run_that_it_is_another_is_left_alone(life: Life, store: PosixStore):
    store.create(layout.version_key(3), b"{}")
    with pytest.raises(CorruptFile):
        life.publish()
    assert store.read(layout.version_key(3), max_bytes=10) == b"{}"
    with pytest.raises(CorruptFile):
        life.restart()


def test_records_without_a_run_are_no_place_for_a_new_one(life: Life, base: Path, store: PosixStore):
    store.delete(layout.RUN_KEY)
    before = snapshot_of(Path(store.uri))
    with pytest.raises(RunMismatch, match=r"run\.json is gone") as caught:
        Life(store, base, seed=2)
    assert "Restore it from a copy" in str(caught.value)
    assert snapshot_of(Path(store.uri)) == before


def test_new_run_begins_over_a_stray_record_that_a_dying_trainer_left(base: Path, store: PosixStore, life: Life):
    like = store.read(layout.version_key(2), max_bytes=1 << 16)
    wipe(store)
    store.create(layout.version_key(2), like)
    new = Life(store, base, seed=2)
    new.publish(3)
    new.check()


def test_version_before_that_is_gone_is_not_built_upon(life: Life, store: PosixStore):
    life.restart()
    (Path(store.uri) / layout.version_key(2)).unlink()
    before = store.list(layout.VERSIONS_FOLDER)
    with pytest.raises(BrokenChain, match="the version before is gone") as caught:
        life.publish()
    assert "docs/operations.md" in str(caught.value)
    assert store.list(layout.VERSIONS_FOLDER) == before


def test_version_before_whose_files_are_gone_too_is_not_put_back(life: Life, store: PosixStore):
    record = RunFolder(store).read_version(2)
    (Path(store.uri) / layout.version_key(2)).unlink()
    shutil.rmtree(Path(store.uri) / record.folder)
    with pytest.raises(BrokenChain, match="the version before is gone"):
        life.publish()


def test_version_before_that_somebody_took_away_is_put_back(life: Life, store: PosixStore):
    (Path(store.uri) / layout.version_key(2)).unlink()
    life.publish()
    life.check()


def test_version_before_that_is_another_one_is_a_conflict(life: Life, store: PosixStore, base: Path, tmp_path: Path):
    copy = PosixStore(shutil.copytree(store.uri, tmp_path / "copy"))
    for each in (store, copy):
        (Path(each.uri) / layout.version_key(2)).unlink()
    other = opened("DeltaPublisher", TinyTrainer("other"), copy, base)
    assert other.publish().version == 2
    shutil.copytree(copy.uri, store.uri, dirs_exist_ok=True)
    with pytest.raises(VersionConflict, match="version 2 is not the one that this trainer published"):
        life.publish()
    assert RunFolder(store).versions() == [1, 2]


def another_run_begins(store: PosixStore, base: Path) -> Life:
    wipe(store)
    life = Life(store, base, seed=2)
    life.publish(4)
    return life


SHORTCUTS: dict[str, tuple[str, Callable[[RunFolder, Path], object]]] = {
    "anchor": (layout.anchor_key(2), lambda folder, base: write_anchor(folder, Checkpoint(base), 2)),
    "merged delta": (layout.merged_key(0, 2), lambda folder, base: compact(folder, 0, 2)),
}


@pytest.mark.parametrize("what", SHORTCUTS)
def test_anchors_and_merged_deltas_of_an_outlived_writer_do_not_come_into_another_run(
    base: Path, ram_path: Path, what: str
):
    _, write = SHORTCUTS[what]
    story = Story(ram_path / "counted", base, "DeltaPublisher", 0)
    story.old.publish(2)
    story.mortal.arm(None, None, lambda: None)
    write(RunFolder(story.mortal), base)
    made = story.mortal.made
    assert made[-3:] == ["read", "create", "read_range"]
    for at in range(len(made) - 4, len(made)):
        story = Story(ram_path / f"run-{at}", base, "DeltaPublisher", 4)
        story.old.publish(2)
        story.mortal.arm(at, None, story.begin_anew)
        with pytest.raises(RunMismatch, match="was wiped or replaced"):
            write(RunFolder(story.mortal), base)
        assert story.new is not None
        story.new.check()
        assert story.inner.list(layout.ANCHORS_FOLDER) == story.inner.list(layout.MERGED_FOLDER) == []
        write(RunFolder(story.inner), base)
        story.new.check()


@pytest.mark.parametrize("what", SHORTCUTS)
def test_anchors_and_merged_deltas_that_another_run_left_are_passed_over_and_taken_over(
    life: Life, base: Path, store: PosixStore, tmp_path: Path, what: str
):
    key, write = SHORTCUTS[what]
    write(RunFolder(store), base)
    like = store.read(key, max_bytes=1 << 16)
    store.delete(key)
    forge(store, key, like)
    out = materialize(RunFolder(store), Checkpoint(base), 2, tmp_path / "out")
    assert out.state_digest == life.publisher.state_digest
    write(RunFolder(store), base)
    assert run_id_of(store.read(key, max_bytes=1 << 16)) == life.publisher.run_id
    life.check()


def test_upkeep_is_not_misled_by_what_another_run_left(life: Life, base: Path, store: PosixStore):
    write_anchor(RunFolder(store), Checkpoint(base), 2)
    like = store.read(layout.anchor_key(2), max_bytes=1 << 16)
    store.delete(layout.anchor_key(2))
    forge(store, layout.anchor_key(50), like, version=50, folder=layout.anchor_folder(50, "0" * 32))
    report = upkeep(RunFolder(store), Checkpoint(base), UpkeepPolicy(anchor_every=2))
    assert report.anchor is not None
    assert report.anchor.version == 2
    assert RunFolder(store).shortcuts().anchors == (2,)


def test_pruning_that_was_planned_before_the_folder_was_wiped_deletes_nothing_of_the_new_run(
    base: Path, ram_path: Path
):
    def begun(folder: Path) -> Story:
        story = Story(folder, base, "DeltaPublisher", 4)
        story.old.publish(3)
        write_anchor(RunFolder(story.inner), Checkpoint(base), 2)
        write_anchor(RunFolder(story.inner), Checkpoint(base), 4)
        compact(RunFolder(story.inner), 0, 2)
        return story

    policy = RetentionPolicy(keep_versions=1, keep_anchors=1)

    def anew(story: Story) -> None:
        story.begin_anew()
        write_anchor(RunFolder(story.inner), Checkpoint(base), 2)
        compact(RunFolder(story.inner), 0, 2)

    story = begun(ram_path / "counted")
    folder = RunFolder(story.mortal)
    plan = plan_pruning(folder, policy)
    assert plan.anchors
    assert plan.merged
    assert plan.folders
    story.mortal.arm(None, None, lambda: None)
    prune(folder, plan)  # to its end
    made = story.mortal.made
    first = made.index("create")
    looks = [at for at, verb in enumerate(made) if verb == "read_range"]
    assert len(looks) == 2 + len(plan.anchors) + len(plan.merged)
    for at in sorted({*range(first + 2), *looks}):
        story = begun(ram_path / f"run-{at}")
        folder = RunFolder(story.mortal)
        plan = plan_pruning(folder, policy)
        before: dict[str, bytes] = {}

        def happens(story: Story = story, before: dict[str, bytes] = before) -> None:
            anew(story)
            before.update(snapshot_of(Path(story.inner.uri)))

        story.mortal.arm(at, None, happens)
        with pytest.raises(RunMismatch, match="was wiped or replaced"):
            prune(folder, plan)
        assert snapshot_of(Path(story.inner.uri)) == before
        assert RunFolder(story.inner).pruned() == 0


def test_mark_of_pruning_of_another_run_hides_nothing_and_goes(life: Life, base: Path, store: PosixStore):
    mark = PrunedMark(run_id=OTHER, version=2, created_at="")
    store.create(layout.pruned_key(2), mark.to_json())
    assert RunFolder(store).pruned() == 0
    life.restart()
    life.publish(2)
    write_anchor(RunFolder(store), Checkpoint(base), 3)
    upkeep(RunFolder(store), Checkpoint(base), UpkeepPolicy(keep_versions=2, keep_anchors=1))
    assert RunFolder(store).pruned() == 2
    [name] = store.list(layout.PRUNED_FOLDER)
    assert run_id_of(store.read(f"{layout.PRUNED_FOLDER}/{name}", max_bytes=1 << 16)) == life.publisher.run_id


def test_lower_mark_of_another_run_goes_with_the_next_pruning(life: Life, base: Path, store: PosixStore):
    store.create(layout.pruned_key(1), PrunedMark(run_id=OTHER, version=1, created_at="").to_json())
    store.create(layout.pruned_key(9), PrunedMark(run_id=OTHER, version=9, created_at="").to_json())
    life.publish(2)
    write_anchor(RunFolder(store), Checkpoint(base), 3)
    upkeep(RunFolder(store), Checkpoint(base), UpkeepPolicy(keep_versions=2, keep_anchors=1))
    assert store.list(layout.PRUNED_FOLDER) == ["00000002.json"]


def test_run_that_is_there_is_proven_by_a_few_kilobytes(life: Life, store: PosixStore):
    counting = FaultyStore(store)
    own = OwnRun(counting, life.publisher.run_id)
    for _ in range(3):
        own.check()
    assert counting.log == ["read", "read_range", "read_range"]


def test_run_whose_file_was_written_anew_by_a_copy_is_the_same_run(life: Life, store: PosixStore):
    own = OwnRun(store, life.publisher.run_id)
    own.check()
    path = Path(store.uri) / layout.RUN_KEY
    said = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(said.items())), indent=1))
    for _ in range(2):
        own.check()
    path.write_text(json.dumps(said | {"run_id": OTHER}))
    with pytest.raises(RunMismatch):
        own.check()
    path.write_text("{")
    with pytest.raises(CorruptFile):
        own.check()


def test_record_of_another_run_that_comes_again_and_again_is_given_up(life: Life, store: PosixStore):
    like = store.read(layout.version_key(1), max_bytes=1 << 16)

    class Haunted(FaultyStore):
        def create(self, key: str, data: bytes) -> None:
            forge(store, key, like)
            super().create(key, data)

    with pytest.raises(StoreError, match="comes again and again"):
        OwnRun(Haunted(store), life.publisher.run_id).create(layout.version_key(3), b"mine")


class Undeletable(MortalStore):
    """A bucket in which a trainer may add, and delete nothing."""

    def delete(self, key: str) -> None:
        raise StoreError("not allowed", file=key)


def test_without_the_right_to_delete_the_record_that_is_in_the_way_is_named(life: Life, base: Path, store: PosixStore):
    forged_version(life, 3)
    life.publisher._own.store = Undeletable(store)
    with pytest.raises(StoreError, match="in the way, and cannot be deleted") as caught:
        life.publish()
    assert str(caught.value.file).endswith("versions/00000003.json")
    store.delete(layout.version_key(3))
    assert life.publisher.publish().wait().version == 3


def test_without_the_right_to_delete_nothing_is_withdrawn_and_the_new_run_takes_over(
    base: Path, ram_path: Path, caplog: pytest.LogCaptureFixture
):
    made = operations(ram_path / "counted", base, "DeltaPublisher")
    story = Story(ram_path / "run", base, "DeltaPublisher", 1)
    story.mortal.delete = Undeletable(story.inner).delete  # type: ignore[method-assign]
    assert isinstance(story.play(len(made) - 2), RunMismatch)
    assert "cannot withdraw" in caplog.text
    assert story.inner.list(layout.VERSIONS_FOLDER) == ["00000001.json", "00000002.json"]
    assert story.new is not None
    story.new.publish(2)
    story.new.check()


def test_upkeep_that_was_ordered_for_a_run_that_is_no_more_does_nothing(
    base: Path, store: PosixStore, life: Life, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    order = UpkeepOrder(
        sync_dir=store.uri, base=str(base), run_id=life.publisher.run_id, policy=UpkeepPolicy(anchor_every=1)
    )
    another_run_begins(store, base)
    before = snapshot_of(Path(store.uri))
    monkeypatch.setattr("sys.stdin", io.StringIO(order.model_dump_json()))
    assert do_upkeep() == 1
    assert "was wiped or replaced" in capsys.readouterr().err
    assert snapshot_of(Path(store.uri)) == before


def test_upkeep_beside_a_trainer_is_ordered_for_its_run(monkeypatch: pytest.MonkeyPatch):
    side = SideUpkeep.of(UpkeepPolicy(anchor_every=1), "/run", "/base", single_writer=False)
    assert side is not None
    monkeypatch.setattr(SideUpkeep, "_start", lambda _: None)
    side.after(PublishReport("the run", 1, 1, 2, 1, 10, 20, "deltas/x", 0.1, 0.2, 0.2))
    assert side._order.run_id == "the run"


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff", b'{"run_id": 3}', b'{"run_id": "x"}'])
def test_what_says_of_no_run_is_of_none(data: bytes):
    assert run_id_of(data) is None
