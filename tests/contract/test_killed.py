"""kill -9 between any two requests to a store, of a trainer and of a stager: the next one carries on exactly."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.bucket_runs import BucketHost, BucketRun, make_bucket_run
from tests.support.checkpoints import write_checkpoint
from tests.support.object_stores import SERVERS
from tests.support.runs import TinyTrainer, assert_same_state
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.audit.verify_run import verify_run
from vllm_delta_snapshot.errors import ObjectNotFound
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import open_store

pytestmark = pytest.mark.servers

ROOT = Path(__file__).parents[2]
STORES = {"folder": "folder", "ministack": "S3", "fake-gcs": "GCS"}


@pytest.fixture(scope="module", params=STORES)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Where runs may lie, and what the store is called."""
    folder = tmp_path_factory.mktemp("place")
    if request.param == "folder":
        yield str(folder / "runs"), STORES[request.param]
        return
    with SERVERS[request.param](folder / "log") as server, pytest.MonkeyPatch.context() as patched:
        for name, value in server.environment.items():
            patched.setenv(name, value)
        yield f"{server.scheme}://{server.make_bucket()}/runs", STORES[request.param]


def dead_of(role: str, uri: str, base: Path, work: Path) -> list[str]:
    command = [sys.executable, "-m", "tests.support.store_kill", role, uri, str(base), str(work)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)
    assert len(found) >= 5
    return list(found)


def test_trainer_killed_between_any_two_requests_is_carried_on_exactly(
    place: tuple[str, str], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    uri, name = place
    base = write_checkpoint(tmp_path / "base", TinyTrainer().weights)
    left = set()
    for number, sync_dir in enumerate(dead_of("trainer", f"{uri}/killed", base, tmp_path)):
        folder = RunFolder(open_store(sync_dir))
        try:
            assert verify_run(folder).is_ok
            left.add(len(folder.versions()))
        except ObjectNotFound:
            left.add(-1)  # not even run.json
        trainer = TinyTrainer()
        trainer.step(1)
        trainer.step(2)
        run = BucketRun(sync_dir, base, trainer)
        publisher = DeltaPublisher(trainer, sync_dir=sync_dir, base=base, threads=1, asynchronous=False)
        version = publisher.publish().version
        assert version == len(folder.versions())
        assert_same_state(run.materialized(version, tmp_path / f"made-{number}"), trainer.state())
        assert verify_run(RunFolder(open_store(sync_dir))).is_ok
    assert left >= {-1, 0}
    record_property(
        "fault", f"publication: kill -9 between any two requests|{name}|nothing: the next trainer carries on"
    )


def test_stager_killed_between_any_two_requests_is_carried_on_exactly(
    place: tuple[str, str], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    uri, name = place
    run = make_bucket_run(f"{uri}/followed", tmp_path, versions=3)
    for stage in dead_of("stager", run.uri, run.base, tmp_path):
        host = BucketHost(run, Path(stage))
        assert host.step() is None
        assert_same_state(host.take(3), run.trainer.state())
        host.close()
    record_property("fault", f"staging: kill -9 between any two requests|{name}|nothing: the next stager goes on")
