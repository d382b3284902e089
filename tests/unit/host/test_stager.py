"""The stager, round by round in this process: what it stages, what it refuses, what it forgets."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support import damage
from tests.support.hosts import Host
from tests.support.mounts import tmpfs
from tests.support.runs import TinyRun, make_run
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import StageError, error_of_fields
from vllm_delta_snapshot.host.area import StageArea, StagerConfig
from vllm_delta_snapshot.runs.materialize import materialize


@pytest.fixture
def run(tmp_path: Path) -> TinyRun:
    return make_run(tmp_path, versions=3)


@pytest.fixture
def host(run: TinyRun, tmp_path: Path) -> Iterator[Host]:
    host = Host(run, tmp_path / "stage")
    yield host
    host.close()


def test_stager_stages_one_update_to_the_newest_version(host: Host, run: TinyRun) -> None:
    host.stager.step()
    assert host.staged() == {"00000000-00000003"}
    metadata = host.check_update(0, 3)
    assert metadata.state_digest == run.record(3).state_digest
    assert metadata.base_state_digest == run.record(1).base_state_digest


def test_stager_goes_on_from_where_the_worker_is(host: Host, run: TinyRun) -> None:
    host.workers[0].tell(2)
    host.stager.step()
    assert host.staged() == {"00000002-00000003"}
    host.check_update(2, 3)


def test_new_version_is_staged_beside_the_old_one_until_the_worker_has_moved(host: Host, run: TinyRun) -> None:
    host.stager.step()
    run.trainer.step(4)
    run.publisher.publish()
    run.history.append(run.trainer.state())
    host.stager.step()
    assert host.staged() == {"00000000-00000003", "00000000-00000004"}
    host.workers[0].tell(3)
    host.stager.step()
    assert host.staged() == {"00000003-00000004"}
    host.check_update(3, 4)
    assert {path.name for path in host.area.fetched.iterdir()} == {"00000004"}


def test_version_that_a_worker_wants_is_staged_too(host: Host, run: TinyRun) -> None:
    host.want(0, 2)
    host.stager.step()
    assert host.staged() == {"00000000-00000002", "00000000-00000003"}
    host.check_update(0, 2)


def test_worker_that_comes_late_gets_an_update_of_its_own(host: Host, run: TinyRun) -> None:
    host.workers[0].tell(3)
    host.stager.step()
    host.attach(0)  # from the base; what it needs was forgotten
    host.stager.step()
    assert host.staged() == {"00000000-00000003"}
    host.check_update(0, 3)


def test_engine_may_start_from_any_materialized_version(run: TinyRun, tmp_path: Path) -> None:
    materialize(run.folder, Checkpoint(run.base), 2, tmp_path / "two")
    host = Host(run, tmp_path / "stage", tmp_path / "two")
    assert (host.state.status, host.state.start_version) == ("following", 2)
    host.stager.step()
    assert host.staged() == {"00000002-00000003"}
    host.close()


def test_stager_ends_with_the_last_worker(host: Host) -> None:
    host.attach(0)
    host.workers[0].close()
    assert host.stager.step()
    host.workers[1].close()
    assert not host.stager.step()


@pytest.mark.parametrize(
    ("harm", "kind"),
    [
        (damage.flip_payload, "CorruptFile"),
        (damage.truncate_payload, "CorruptFile"),
        (damage.remove_payload, "CorruptFile"),
        (damage.flip_metadata, "CorruptFile"),
        (damage.foreign_record, "RunMismatch"),
        (damage.unknown_format, "UnsupportedFormat"),
        (damage.out_of_order, "CorruptFile"),
        (damage.missing_version, "BrokenChain"),
    ],
)
def test_stager_stops_at_a_damaged_version_says_why_and_goes_on_when_it_is_repaired(
    harm, kind: str, host: Host, run: TinyRun
) -> None:
    kept = {path: path.read_bytes() for path in run.sync_dir.rglob("*") if path.is_file()}
    harm(run.sync_dir)
    host.stager.step()
    problem = host.state.problem
    assert problem is not None
    assert (problem.version, type(error_of_fields(problem.error)).__name__) == (1, kind)
    assert host.staged() == set()
    for path, data in kept.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    host.stager.step()
    assert host.state.problem is None
    host.check_update(0, 3)


def test_damaged_newest_version_leaves_the_ones_before_it_staged(host: Host, run: TinyRun) -> None:
    damage.flip_first_byte(run.payload(3))
    host.stager.step()
    assert host.staged() == {"00000000-00000002"}
    host.check_update(0, 2)
    assert host.state.problem is not None
    assert host.state.problem.version == 3


def test_half_written_leftovers_of_a_dead_stager_are_written_anew(host: Host, run: TinyRun) -> None:
    torn = host.area.fetched_folder(0, 1)
    torn.mkdir()
    (torn / "delta.safetensors").write_bytes(b"torn")
    (torn / ".delta.safetensors.1.part").write_bytes(b"torn")
    (host.area.staged / ".00000000-00000003.dead").mkdir()
    host.stager.step()
    host.check_update(0, 3)


def test_checkpoint_of_something_else_fails_for_good(run: TinyRun, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", versions=0, seed=9)
    host = Host(run, tmp_path / "stage", other.base)
    assert host.state.status == "failed"
    assert host.state.error is not None
    assert host.state.error["kind"] == "BaseMismatch"
    host.close()


def test_empty_delta_is_staged(host: Host, run: TinyRun) -> None:
    run.publisher.publish()
    run.history.append(run.trainer.state())
    host.workers[0].tell(3)
    host.stager.step()
    assert host.check_update(3, 4).tensors == ()


def test_state_is_one_json_object_that_a_reader_always_finds_whole(host: Host) -> None:
    host.stager.step()
    assert json.loads(host.area.state.read_text())["newest"] == 3
    host.area.state.unlink()  # a worker that found no living stager clears it
    host.stager.step()
    assert host.state.newest == 3


def test_stage_folder_that_others_may_write_is_refused(run: TinyRun, tmp_path: Path) -> None:
    root = tmp_path / "stage"
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(StageError, match="can be written by others"):
        StageArea.of(root, StagerConfig(sync_dir=str(run.sync_dir), checkpoint=str(run.base)))


def test_update_over_many_versions_equals_them_one_by_one(tmp_path: Path) -> None:
    run = make_run(tmp_path, versions=8, seed="many")
    host = Host(run, tmp_path / "stage")
    host.stager.step()
    host.check_update(0, 8)
    assert np.unique([len(run.history)]) == [9]
    host.workers[0].close()


def test_full_disk_stops_staging_with_a_clear_error_and_nothing_half_done(run: TinyRun, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "4m") as small:
        host = Host(run, small / "stage")
        filler = small / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 12))
        host.stager.step()
        assert host.staged() == set()
        filler.unlink()
        host.stager.step()
        host.check_update(0, 3)
        host.close()
