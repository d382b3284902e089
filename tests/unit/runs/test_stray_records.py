"""A record that nothing leads to: named by every verb, no work by its number, and nothing sound is held up by it."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tracemalloc
from pathlib import Path

import pytest

from tests.support.cli import Outcome
from tests.support.hosts import Host
from tests.support.runs import TinyRun, make_run
from tests.support.stub_server import EngineStub, answering
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.drive import ServerClient
from vllm_delta_snapshot.drive.follow import FollowConfig, Follower
from vllm_delta_snapshot.errors import BrokenChain
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.runs.chain import Shortcuts, known_way, newest_in_line, plan_steps
from vllm_delta_snapshot.runs.materialize import materialize
from vllm_delta_snapshot.upkeep.anchor import write_anchor
from vllm_delta_snapshot.upkeep.retention import RetentionPolicy, plan_pruning

FAR = 99_999_999
KINDS = {"empty": b"", "another version's": None, "no JSON": b"{", "of a folder that went": b"{}"}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_run(tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def run(pristine: TinyRun, tmp_path: Path) -> TinyRun:
    """A run of three versions, and an empty record far beyond them. Only to be read."""
    sync_dir = shutil.copytree(pristine.sync_dir, tmp_path / "run")
    run = dataclasses.replace(pristine, sync_dir=sync_dir)
    stray(run).write_bytes(b"")
    return run


def stray(run: TinyRun) -> Path:
    return run.sync_dir / layout.version_key(FAR)


def verbs(run: TinyRun, out: Path) -> dict[str, tuple[object, ...]]:
    return {
        "inspect": ("inspect", run.sync_dir),
        "log": ("log", run.sync_dir),
        "verify": ("verify", run.sync_dir),
        "verify --deep": ("verify", run.sync_dir, "--deep", "--base", run.base),
        "materialize": ("materialize", run.sync_dir, out, "--base", run.base),
        "diff": ("diff", f"{run.sync_dir}@1", run.sync_dir, "--base", run.base),
        "anchor": ("anchor", run.sync_dir, "--base", run.base),
        "prune": ("prune", run.sync_dir, "--keep-versions", 1, "--yes"),
        "sync": ("sync", run.sync_dir, "--server", "http://127.0.0.1:1"),
        "doctor": ("doctor", "--sync-dir", run.sync_dir),
    }


VERBS = (*("inspect", "log", "verify", "verify --deep", "materialize", "diff", "anchor", "prune", "sync", "doctor"),)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_names_the_record_that_is_out_of_line(run: TinyRun, verb: str, tmp_path: Path) -> None:
    before = sorted(path for path in run.sync_dir.rglob("*") if path.is_file())
    outcome = Outcome(*verbs(run, tmp_path / "out")[verb])
    assert outcome.code in (1, 2)
    assert f"versions/{FAR}.json" in outcome.stdout + outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert sorted(path for path in run.sync_dir.rglob("*") if path.is_file()) == before
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verb", ["inspect", "verify", "log"])
def test_whatever_the_record_holds_it_is_named(run: TinyRun, verb: str, kind: str, tmp_path: Path) -> None:
    data = KINDS[kind]
    stray(run).write_bytes((run.sync_dir / layout.version_key(3)).read_bytes() if data is None else data)
    outcome = Outcome(*verbs(run, tmp_path / "out")[verb])
    assert outcome.code == 1
    assert f"versions/{FAR}.json" in outcome.stdout + outcome.stderr


def test_inspect_still_shows_what_is_sound(run: TinyRun) -> None:
    outcome = Outcome("inspect", run.sync_dir, "--json")
    assert outcome.code == 1
    found = json.loads(outcome.stdout)
    assert (found["ok"], found["newest_version"]) == (False, 3)
    assert "expected version 4 next, found 1 records beyond the gap. If it is stray, delete" in found["out_of_line"]


def test_sound_versions_are_had_by_their_numbers(run: TinyRun, tmp_path: Path) -> None:
    materialize(run.folder, Checkpoint(run.base), 3, tmp_path / "out")
    assert Checkpoint(tmp_path / "out").state_digest == run.record(3).state_digest


def test_living_trainer_publishes_on_and_a_restarted_one_refuses_until_it_is_gone(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    stray(run).write_bytes(b"")
    run.trainer.step(4)
    assert run.publisher.publish().version == 4
    with pytest.raises(BrokenChain, match="nothing leads to version 99999999") as caught:
        DeltaPublisher(run.trainer, sync_dir=str(run.sync_dir), base=run.base)
    assert str(caught.value.file).endswith(f"versions/{FAR}.json")
    assert "delete that file" in str(caught.value)
    stray(run).unlink()
    with DeltaPublisher(run.trainer, sync_dir=str(run.sync_dir), base=run.base, asynchronous=False) as again:
        run.trainer.step(5)
        assert again.publish().version == 5


def test_host_stages_what_is_sound_and_says_what_is_not(run: TinyRun, tmp_path: Path) -> None:
    host = Host(run, tmp_path / "stage")
    host.tell(0, 0)
    host.stager.step()
    assert host.staged() == {"00000000-00000003"}
    assert host.state.problem is not None
    assert "version 4 is missing" in str(host.state.problem.error)
    host.check_update(0, 3)
    host.close()


def test_follower_takes_the_newest_sound_version(run: TinyRun, caplog: pytest.LogCaptureFixture) -> None:
    with answering(EngineStub()) as server:
        config = FollowConfig(sync_dir=str(run.sync_dir))
        follower = Follower(config, ServerClient(server.url), run.folder, sampler=None, observer=None)
        for _ in range(3):
            follower.step()
        assert (follower.state.newest, follower.state.applied) == (3, 3)
        assert server.label == f"{run.publisher.run_id}@3"
    assert caplog.text.count(f"versions/{FAR}.json") == 1


def test_nothing_is_deleted_because_of_it(run: TinyRun) -> None:
    with pytest.raises(BrokenChain):
        plan_pruning(run.folder, RetentionPolicy(keep_versions=1))


def test_anchor_leads_over_records_that_were_lost(tmp_path: Path) -> None:
    run = make_run(tmp_path, 5)
    write_anchor(run.folder, Checkpoint(run.base), 3)
    (run.sync_dir / layout.version_key(2)).unlink()
    assert run.folder.newest() == 5
    (run.sync_dir / layout.version_key(4)).unlink()
    with pytest.raises(BrokenChain, match=r"nothing leads to version 5.*versions/00000004.json was lost"):
        run.folder.newest()


@pytest.mark.parametrize("last", [10**6, FAR])
def test_plans_cost_what_exists_and_not_what_numbers_say(last: int) -> None:
    tracemalloc.start()
    with pytest.raises(BrokenChain, match="missing: 4, 5, 6") as caught:
        plan_steps([1, 2, 3, last], 0, last, Shortcuts())
    assert caught.value.file == layout.version_key(4)
    assert known_way([(0, 3), (3, last)], 0, last) == [(0, 3), (3, last)]
    assert known_way([(0, 3)], 0, last) is None
    assert newest_in_line([1, 2, 3, last], ()) == 3
    assert newest_in_line([1, 2, 3, last], [last]) == last
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
