"""Several trainers on one run, in a folder and in buckets: one wins, and nothing of the others is seen."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.bucket_runs import BucketRun, make_bucket_run
from tests.support.checkpoints import tiny_tensors, write_checkpoint
from tests.support.object_stores import SERVERS
from tests.support.runs import TinyTrainer, assert_same_state
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.audit.verify_run import verify_run
from vllm_delta_snapshot.errors import CorruptFile, ObjectNotFound, RunMismatch
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import Store, open_store

pytestmark = pytest.mark.servers

ROOT = Path(__file__).parents[2]
RACERS = 8
ROUNDS = {"folder": 20, "ministack": 20, "fake-gcs": 20}
STORES = {"folder": "folder", "ministack": "S3", "fake-gcs": "GCS"}

Record = Callable[[str, object], None]


@pytest.fixture(scope="module", params=list(ROUNDS))
def where(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Return the name of a store, and the URI of a place in it."""
    folder = tmp_path_factory.mktemp("races")
    with contextlib.ExitStack() as stack:
        if request.param == "folder":
            yield request.param, str(folder)
            return
        server = stack.enter_context(SERVERS[request.param](folder / "log"))
        patched = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in server.environment.items():
            patched.setenv(name, value)
        yield request.param, f"{server.scheme}://{server.make_bucket()}"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "base", tiny_tensors())


def test_eight_trainers_of_one_version_have_one_winner_each_round(
    where: tuple[str, str], base: Path, record_property: Record
):
    name, place = where
    uri, rounds = f"{place}/race", ROUNDS[name]
    command = [sys.executable, "-m", "tests.support.racing_trainer", uri, str(base), str(rounds), str(RACERS)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    result = json.loads(done.stdout)
    assert result["exits"] == [0] * RACERS
    winners: dict[int, list[str]] = {turn: [] for turn in range(rounds)}
    losers = set()
    for turn, _, said, digest in result["said"]:
        if said.isdigit():
            winners[turn].append(digest)
        else:
            losers.add(said)
    assert losers == {"VersionConflict"}
    for turn, digests in winners.items():
        folder = RunFolder(open_store(f"{uri}/{turn}"))
        assert folder.versions() == [1]
        assert [folder.read_version(1).state_digest] == digests
        assert turn or verify_run(folder).is_ok
    what = f"{RACERS} trainers publish the same version, {rounds} rounds"
    record_property("fault", f"{what}|{STORES[name]}|one wins each time, the others get `VersionConflict`")


def test_run_in_the_folder_of_another_is_refused_and_changes_nothing(
    where: tuple[str, str], tmp_path: Path, record_property: Record
):
    name, place = where
    run = make_bucket_run(f"{place}/two", tmp_path)
    before = everything(open_store(run.uri))
    other = TinyTrainer("another")
    base = write_checkpoint(tmp_path / "other", other.weights)
    with pytest.raises(RunMismatch) as caught:
        DeltaPublisher(other, sync_dir=run.uri, base=base, asynchronous=False)
    assert run.publisher is not None
    assert run.publisher.run_id in str(caught.value)
    assert everything(open_store(run.uri)) == before
    assert run.publish() == 2
    record_property("fault", f"two runs in one folder|{STORES[name]}|`RunMismatch`: {caught.value.what}")


def test_trainer_that_wakes_up_after_another_took_over_changes_nothing(
    where: tuple[str, str], base: Path, tmp_path: Path, record_property: Record
):
    name, place = where
    uri = f"{place}/zombie"
    zombie = subprocess.Popen(
        [sys.executable, "-m", "tests.support.zombie", uri, str(base)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert zombie.stdout is not None
        assert zombie.stdout.readline() == "stopping\n"
        os.waitid(os.P_PID, zombie.pid, os.WSTOPPED | os.WNOWAIT)
        successor = TinyTrainer()
        publisher = DeltaPublisher(successor, sync_dir=uri, base=base, asynchronous=False)
        for number in (11, 12):
            successor.step(number)
            publisher.publish()
        before = everything(open_store(uri))
        zombie.send_signal(signal.SIGCONT)
        assert zombie.communicate(timeout=120)[0].split() == ["VersionConflict", "VersionConflict"]
    finally:
        zombie.kill()
        zombie.wait()
    after = everything(open_store(uri))
    assert {key: after[key] for key in before} == before
    folder = RunFolder(open_store(uri))
    assert folder.versions() == [1, 2, 3]
    successor.step(13)
    assert publisher.publish().version == 4
    assert_same_state(BucketRun(uri, base, successor).materialized(4, tmp_path / "out"), successor.state())
    what = "a trainer sleeps before its commit, and wakes up after another took over"
    record_property("fault", f"{what}|{STORES[name]}|`VersionConflict`, until it is restarted")


def everything(store: Store, folder: str = "") -> dict[str, bytes]:
    """Return every object of a store."""
    found = {}
    for name in store.list(folder):
        key = f"{folder}/{name}".lstrip("/")
        try:
            found[key] = store.read(key, max_bytes=1 << 24)
        except (ObjectNotFound, CorruptFile):  # a folder: in a bucket there is none, on a disk it is no file
            found |= everything(store, key)
    return found
