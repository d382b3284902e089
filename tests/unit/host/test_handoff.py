"""The stager as a process: started by the first worker, shared, killed, started again, gone with the last."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hosts import places_of
from tests.support.runs import TinyRun, make_run
from tests.support.waiting import eventually
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import BaseMismatch, NotStaged, ObjectNotFound, OutOfOrder, StageError
from vllm_delta_snapshot.host.area import StageArea, StagerConfig, is_locked
from vllm_delta_snapshot.host.handoff import Handoff
from vllm_delta_snapshot.host.mapping import read_lanes
from vllm_delta_snapshot.host.places import PlaceMap
from vllm_delta_snapshot.runs.materialize import materialize


@pytest.fixture
def run(tmp_path: Path) -> TinyRun:
    return make_run(tmp_path, versions=2)


def _config(run: TinyRun, checkpoint: Path | None = None) -> StagerConfig:
    return StagerConfig(sync_dir=str(run.sync_dir), checkpoint=str(checkpoint or run.base), poll_interval_s=0.02)


def _handoff(run: TinyRun, root: Path, places: PlaceMap | None = None, checkpoint: Path | None = None) -> Handoff:
    return Handoff(_config(run, checkpoint), root, places or PlaceMap({}), timeout_s=60)


def _area(run: TinyRun, root: Path) -> StageArea:
    return StageArea.of(root, _config(run))


def _pid(area: StageArea) -> int:
    state = area.read_state()
    assert state is not None
    return state.pid


def test_stager_serves_a_worker_and_ends_with_it(run: TinyRun, tmp_path: Path) -> None:
    places = places_of(run)
    worker = _handoff(run, tmp_path / "stage", places)
    assert (worker.start_version, worker.start_digest) == (0, run.record(1).base_state_digest)
    assert worker.read_run().run_id == run.publisher.run_id
    found = worker.wait(0, 2, timeout_s=60)
    assert found.patches.name == "00000000-00000002"
    assert found.mapped.name == f"00000000-00000002-{places.id}"
    _, head = read_lanes(found.mapped)
    assert (head["base_version"], head["version"], head["run_id"]) == (0, 2, run.publisher.run_id)
    assert worker.find(0, 2) == found
    worker.set_version(2)
    run.trainer.step(3)
    run.publisher.publish()
    assert worker.wait(2, 3, timeout_s=60).patches.name == "00000002-00000003"
    area = _area(run, tmp_path / "stage")
    worker.close()
    worker.close()
    eventually(lambda: not is_locked(area.lock))
    assert not area.state.exists()


def test_two_workers_share_one_stager_that_outlives_the_first(run: TinyRun, tmp_path: Path) -> None:
    first = _handoff(run, tmp_path / "stage")
    second = _handoff(run, tmp_path / "stage")
    area = _area(run, tmp_path / "stage")
    pid = _pid(area)
    first.close()
    second.set_version(1)
    assert second.wait(1, 2, timeout_s=60).patches.is_dir()
    assert _pid(area) == pid
    second.close()
    eventually(lambda: not is_locked(area.lock))


@pytest.mark.slow
def test_killed_stager_is_started_again_by_whoever_asks(run: TinyRun, tmp_path: Path) -> None:
    worker = _handoff(run, tmp_path / "stage")
    area = _area(run, tmp_path / "stage")
    worker.wait(0, 2, timeout_s=60)
    worker.set_version(2)
    pid = _pid(area)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not is_locked(area.lock))
    run.trainer.step(3)
    run.publisher.publish()
    assert worker.wait(2, 3, timeout_s=60).mapped.is_dir()
    assert _pid(area) != pid
    worker.close()
    eventually(lambda: not is_locked(area.lock))


@pytest.mark.slow
def test_stager_ends_when_its_worker_is_killed(run: TinyRun, tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from vllm_delta_snapshot.host.area import StagerConfig\n"
        "from vllm_delta_snapshot.host.handoff import Handoff\n"
        "from vllm_delta_snapshot.host.places import PlaceMap\n"
        "config = StagerConfig.from_json(sys.argv[1].encode(), file='argv')\n"
        "Handoff(config, pathlib.Path(sys.argv[2]), PlaceMap({}), timeout_s=60)\n"
        "print('following', flush=True); sys.stdin.read()"
    )
    argv = [sys.executable, "-c", code, _config(run).to_json().decode(), str(tmp_path / "stage")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "following\n"
        area = _area(run, tmp_path / "stage")
        assert is_locked(area.lock)
        worker.kill()
    eventually(lambda: not is_locked(area.lock))


@pytest.mark.slow
def test_failed_start_leaves_nothing_running_and_can_be_tried_again(run: TinyRun, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    run.sync_dir.rename(hidden)
    with pytest.raises(ObjectNotFound, match="no run here"):
        _handoff(run, tmp_path / "stage")
    area = _area(run, tmp_path / "stage")
    assert not is_locked(area.lock)
    hidden.rename(run.sync_dir)
    worker = _handoff(run, tmp_path / "stage")
    worker.close()
    eventually(lambda: not is_locked(area.lock))


def test_checkpoint_of_another_run_is_refused(run: TinyRun, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", versions=0, seed=3)
    with pytest.raises(BaseMismatch, match="neither the base of the run"):
        _handoff(run, tmp_path / "stage", checkpoint=other.base)


def test_version_that_is_not_there_is_not_staged(run: TinyRun, tmp_path: Path) -> None:
    worker = _handoff(run, tmp_path / "stage")
    with pytest.raises(NotStaged, match="version 9 is not staged"):
        worker.wait(0, 9, timeout_s=0.05)
    worker.close()


def test_worker_goes_back_when_it_asks_and_places_may_change(run: TinyRun, tmp_path: Path) -> None:
    worker = _handoff(run, tmp_path / "stage")
    assert worker.oldest_version == 0
    worker.set_version(2)
    places = places_of(run)
    worker.set_places(places)
    found = worker.wait(2, 0, timeout_s=60)
    assert found.mapped.name == f"00000002-00000000-{places.id}"
    assert read_lanes(found.mapped)[1]["state_digest"] == worker.start_digest
    worker.close()


def test_one_update_that_cannot_be_made_is_no_problem_of_others(run: TinyRun, tmp_path: Path) -> None:
    materialize(run.folder, Checkpoint(run.base), 1, tmp_path / "one")
    worker = _handoff(run, tmp_path / "stage", checkpoint=tmp_path / "one")
    worker.set_version(2)
    with pytest.raises(OutOfOrder, match="before the engine's checkpoint"):
        worker.wait(2, 0, timeout_s=60)
    try:
        with pytest.raises(NotStaged, match="version 3 is not staged"):
            worker.find(2, 3)
    finally:
        worker.close()


def test_places_that_cannot_be_written_are_a_stage_error(run: TinyRun, tmp_path: Path) -> None:
    worker = _handoff(run, tmp_path / "stage")
    area = _area(run, tmp_path / "stage")
    shutil.rmtree(area.places)
    area.places.write_text("")
    with pytest.raises(StageError, match="cannot write the stage area"):
        worker.set_places(places_of(run))
    worker.close()


def test_stager_imports_neither_torch_nor_vllm(run: TinyRun, tmp_path: Path) -> None:
    code = "import sys, vllm_delta_snapshot.host.__main__; print({'torch', 'vllm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_stager_that_cannot_start_is_reported(run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(StageError, match=r"the stager died 4 times.*exit status 1"):
        _handoff(run, tmp_path / "stage")
