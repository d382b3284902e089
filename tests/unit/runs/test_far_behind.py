"""Engines and trainers that are far behind: merged deltas, anchors, and what is left when deltas were pruned."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hosts import Host, places_of
from tests.support.runs import TinyRun, assert_same_state, copy_of, make_run
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.audit.verify_run import verify_run
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.errors import BrokenChain, CorruptFile, OutOfOrder
from vllm_delta_snapshot.runs.materialize import materialize
from vllm_delta_snapshot.runs.replay import plan_run
from vllm_delta_snapshot.upkeep.anchor import write_anchor
from vllm_delta_snapshot.upkeep.compact import compact
from vllm_delta_snapshot.upkeep.retention import RetentionPolicy, plan_pruning, prune

VERSIONS = 9


@pytest.fixture(scope="module", params=["difference", "auto", "raw"])
def pristine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A run of differences, of both kinds, or of absolute values."""
    return make_run(tmp_path_factory.mktemp("run"), versions=VERSIONS, encoding=request.param)


@pytest.fixture
def run(pristine: TinyRun, tmp_path: Path) -> TinyRun:
    return copy_of(pristine, tmp_path / "run")


@pytest.fixture
def pruned(run: TinyRun) -> TinyRun:
    """The run with an anchor of version 6 and a merged delta from there, and only its newest deltas."""
    write_anchor(run.folder, Checkpoint(run.base), 6)
    compact(run.folder, 6, 8)
    plan = plan_pruning(run.folder, RetentionPolicy(keep_versions=3))
    assert plan.up_to == 6
    prune(run.folder, plan)
    return run


def hosts_of(run: TinyRun, root: Path, checkpoint: Path | None = None) -> Iterator[Host]:
    host = Host(run, root, checkpoint)
    yield host
    host.close()


@pytest.fixture
def late(pruned: TinyRun, tmp_path: Path) -> Iterator[Host]:
    """A host whose engines start from the base, when most deltas are gone."""
    yield from hosts_of(pruned, tmp_path / "stage")


def bits_of_checkpoint(folder: Path) -> dict[str, Bits]:
    return {spec.name: bits for spec, bits in Checkpoint(folder).items()}


@pytest.mark.parametrize(("base", "version"), [(0, 2), (0, VERSIONS), (3, 7)])
def test_merged_delta_comes_to_the_same_as_the_versions(run: TinyRun, tmp_path: Path, base: int, version: int) -> None:
    report = compact(run.folder, base, version)
    assert (report.deltas, report.existed) == (version - base, False)
    assert report.payload_bytes <= report.merged_bytes
    assert verify_run(run.folder).is_ok
    made = materialize(run.folder, Checkpoint(run.base), VERSIONS, tmp_path / "made")
    assert_same_state(bits_of_checkpoint(Path(made.folder)), run.history[VERSIONS])
    assert compact(run.folder, base, version).existed


def test_merged_deltas_are_merged_further(run: TinyRun) -> None:
    compact(run.folder, 0, 4)
    compact(run.folder, 4, 8)
    assert compact(run.folder, 0, 8).deltas == 2
    assert verify_run(run.folder).is_ok


@pytest.mark.parametrize(("base", "version"), [(3, 3), (3, 4), (4, 3)])
def test_less_than_two_versions_are_not_merged(run: TinyRun, base: int, version: int) -> None:
    with pytest.raises(OutOfOrder, match="nothing to merge"):
        compact(run.folder, base, version)


def test_versions_that_are_not_there_are_not_merged(run: TinyRun) -> None:
    with pytest.raises(BrokenChain, match="missing: 10"):
        compact(run.folder, 3, 10)
    assert run.folder.shortcuts().merged == ()


def test_anchor_is_a_plain_checkpoint_of_its_version(run: TinyRun) -> None:
    report = write_anchor(run.folder, Checkpoint(run.base), 5)
    folder = run.sync_dir / report.folder
    assert_same_state(bits_of_checkpoint(folder), run.history[5])
    assert write_anchor(run.folder, Checkpoint(run.base), 5).existed
    assert verify_run(run.folder).is_ok


def test_anchor_is_made_from_an_earlier_one_where_the_base_is_not(run: TinyRun) -> None:
    write_anchor(run.folder, Checkpoint(run.base), 3)
    report = write_anchor(run.folder, None, 5)
    assert_same_state(bits_of_checkpoint(run.sync_dir / report.folder), run.history[5])
    with pytest.raises(BrokenChain, match="no anchor"):
        write_anchor(run.folder, None, 2)


def test_late_engine_goes_over_a_merged_delta(run: TinyRun, tmp_path: Path) -> None:
    compact(run.folder, 0, 7)
    for host in hosts_of(run, tmp_path / "stage"):
        host.stager.step()
        host.check_update(0, VERSIONS)
        assert sorted(path.name for path in host.area.fetched.iterdir()) == [
            "00000000-00000007",
            "00000008",
            "00000009",
        ]


def test_late_engine_jumps_to_the_anchor_and_goes_on_from_there(late: Host) -> None:
    places = places_of(late.run)
    late.attach(0, places)
    late.stager.step()
    late.check_update(0, VERSIONS)
    late.check_mapped(0, VERSIONS, places)
    names = sorted(path.name for path in late.area.fetched.iterdir())
    assert names == ["00000000-00000006", "00000006-00000008", "00000009"]
    late.tell(0, VERSIONS)
    late.tell(1, VERSIONS, places)
    publisher = DeltaPublisher(late.run.trainer, sync_dir=str(late.run.sync_dir), base=late.run.base)
    late.run.trainer.step(VERSIONS + 1)
    publisher.publish().wait()
    late.run.history.append(late.run.trainer.state())
    late.stager.step()
    late.check_update(VERSIONS, VERSIONS + 1)


@pytest.mark.parametrize("target", [6, 8])
def test_late_engine_goes_to_any_version_that_is_left(late: Host, target: int) -> None:
    late.want(0, target)
    late.stager.step()
    late.check_update(0, target)


def test_late_engine_comes_back_to_where_it_was(late: Host) -> None:
    late.stager.step()
    late.tell(0, VERSIONS)
    late.want(VERSIONS, 6)
    late.stager.step()
    late.check_update(VERSIONS, 6)


def test_mirror_of_a_late_host_is_made_by_way_of_the_anchor(late: Host) -> None:
    late.area.write(late.area.mirror_target, str(VERSIONS).encode())
    for _ in range(3):
        late.stager.step()
    assert_same_state(bits_of_checkpoint(late.area.mirror), late.run.history[VERSIONS])


def test_stager_killed_in_a_jump_makes_it_anew(late: Host) -> None:
    torn = late.area.fetched / ".00000000-00000006.0123"
    torn.mkdir()
    (torn / "delta.safetensors").write_bytes(b"torn")
    late.start_stager()
    late.stager.step()
    late.check_update(0, VERSIONS)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_jump_of_a_stager_before_is_kept_if_it_is_whole(late: Host, is_damaged: bool) -> None:
    late.stager.step()
    jump = late.area.fetched_folder(0, 6)
    payload = jump / "delta.safetensors"
    if is_damaged:
        payload.write_bytes(bytes(payload.stat().st_size))
    before = payload.stat().st_ino
    for path in late.area.staged.iterdir():
        shutil.rmtree(path)
    late.start_stager()
    late.stager.step()
    late.check_update(0, VERSIONS)
    assert (payload.stat().st_ino == before) != is_damaged


def test_lost_files_of_a_jump_are_made_again(late: Host) -> None:
    late.stager.step()
    for folder in (late.area.fetched, late.area.staged):
        for path in folder.iterdir():
            shutil.rmtree(path)
    late.start_stager()
    late.stager.step()
    late.check_update(0, VERSIONS)


def test_damaged_anchor_is_found_out_and_nothing_is_staged(pruned: TinyRun, tmp_path: Path) -> None:
    anchor = pruned.sync_dir / pruned.folder.read_anchor(6).folder
    (file,) = anchor.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    [problem] = verify_run(pruned.folder).problems
    assert (problem.version, type(problem.error)) == (6, CorruptFile)
    for host in hosts_of(pruned, tmp_path / "stage"):
        host.stager.step()
        assert host.staged() == set()
        assert host.state.problem is not None
        assert "checksum" in str(host.state.problem.error["what"])
        assert "--drop-anchor 6" in str(host.state.problem.error["hint"])
    with pytest.raises(CorruptFile, match="checksum"):
        materialize(pruned.folder, None, VERSIONS, tmp_path / "made")


def test_engine_between_pruned_versions_is_told_to_restart(late: Host) -> None:
    late.tell(0, 3)
    late.stager.step()
    assert late.staged() == set()
    assert late.state.problem is not None
    assert late.state.problem.error["kind"] == "BrokenChain"
    assert "restart" in str(late.state.problem.error["hint"])


@pytest.mark.parametrize("version", [6, 7, VERSIONS])
def test_checkpoint_is_made_without_the_base(pruned: TinyRun, tmp_path: Path, version: int) -> None:
    report = materialize(pruned.folder, None, version, tmp_path / "made")
    assert report.anchor == 6
    assert_same_state(bits_of_checkpoint(tmp_path / "made"), pruned.history[version])


def test_pruned_version_is_said_to_be_so(pruned: TinyRun, tmp_path: Path) -> None:
    with pytest.raises(BrokenChain, match="pruned"):
        materialize(pruned.folder, Checkpoint(pruned.base), 5, tmp_path / "made")
    with pytest.raises(BrokenChain, match="pruned"):
        pruned.folder.read_metadata(pruned.record(5))


def test_trainer_goes_on_from_the_anchor(pruned: TinyRun) -> None:
    publisher = DeltaPublisher(pruned.trainer, sync_dir=str(pruned.sync_dir), base=pruned.base)
    assert publisher.version == VERSIONS
    pruned.trainer.step(VERSIONS + 1)
    assert publisher.publish().wait().version == VERSIONS + 1
    assert verify_run(pruned.folder).is_ok


def test_cheaper_way_is_taken(run: TinyRun) -> None:
    base = Checkpoint(run.base)
    write_anchor(run.folder, base, 8)
    chain = sum(run.record(version).payload_bytes for version in range(1, VERSIONS + 1))
    anchor = run.folder.read_anchor(8).payload_bytes + run.record(VERSIONS).payload_bytes
    plan = plan_run(run.folder, VERSIONS, start=(0, base.state_digest))
    assert (plan.anchor is not None) == (anchor < chain)
    assert plan_run(run.folder, 7, start=(0, base.state_digest)).anchor is None
    assert plan_run(run.folder, VERSIONS, start=(0, base.state_digest), may_jump=False).anchor is None
