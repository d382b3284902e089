"""A trainer that outlives its run, in a folder and in buckets that were wiped and begun anew: nothing of it stays."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import tiny_tensors, write_checkpoint
from tests.support.lives import Life, MortalStore, wipe
from tests.support.object_stores import SERVERS
from vllm_delta_snapshot.errors import RunMismatch, StoreUnavailable
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.store import Store, open_store

pytestmark = pytest.mark.servers

ROOT = Path(__file__).parents[2]
STORES = {"folder": "folder", "ministack": "S3", "moto": "S3", "fake-gcs": "GCS"}

MOMENTS = ((-2, None, 0), (-2, None, 1), (-2, -1, 0), (-2, -1, 1), (-2, 1, 2), (-1, None, 2))
"""Before which request of a commit, from its end (creation, look), the folder is wiped; before which the trainer dies;
and how many versions the new run has by then. Every moment there is: tests/unit/trainer_hooks/test_outlived.py."""

Record = Callable[[str, object], None]


@pytest.fixture(scope="module", params=STORES)
def where(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Return the name of a store, and the URI of a place in it."""
    folder = tmp_path_factory.mktemp("outlived")
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


def test_whenever_the_folder_is_wiped_and_the_trainer_dies_the_new_run_is_whole(
    where: tuple[str, str], base: Path, record_property: Record
):
    name, place = where
    told: set[str] = set()
    for number, (at, dies, versions) in enumerate(MOMENTS):
        store = open_store(f"{place}/outlived-{number}")
        mortal = MortalStore(store)
        old = Life(mortal, base, seed=1)
        old.publish(1)
        mortal.arm(None, None, lambda: None)
        old.publish(1)
        end = len(mortal.made)
        assert mortal.made[-2:] == ["create", "read_range"]
        new: list[Life] = []

        def begin_anew(store: Store = store, new: list[Life] = new, versions: int = versions) -> None:
            wipe(store)
            new.append(Life(store, base, seed=2))
            new[0].publish(versions)

        mortal.arm(end + at, None if dies is None else end + dies, begin_anew)
        with pytest.raises((RunMismatch, StoreUnavailable)) as caught:
            old.publish()
        told.add(type(caught.value).__name__)
        if dies is None:
            assert caught.type is RunMismatch
            assert len(store.list(layout.VERSIONS_FOLDER)) == versions
        new[0].publish(3)  # past the number that the old one had come to
        new[0].check()
    assert told == {"RunMismatch", "StoreUnavailable"}
    what = "a run is wiped and begun anew in the middle of a commit of its old trainer, which goes on or dies"
    record_property("fault", f"{what}|{STORES[name]}|`RunMismatch`; what it left there is taken over")


def test_trainer_that_wakes_up_in_a_run_that_was_begun_anew_leaves_it_alone(
    where: tuple[str, str], base: Path, record_property: Record
):
    name, place = where
    uri = f"{place}/woken"
    zombie = subprocess.Popen(
        [sys.executable, "-m", "tests.support.zombie", uri, str(base)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert zombie.stdout is not None
        assert zombie.stdout.readline() == "stopping\n"
        os.waitid(os.P_PID, zombie.pid, os.WSTOPPED | os.WNOWAIT)
        store = open_store(uri)
        wipe(store)
        new = Life(store, base, seed=2)
        new.publish(1)  # so the next number is the one that the old trainer is about to commit
        zombie.send_signal(signal.SIGCONT)
        assert zombie.communicate(timeout=120)[0].split() == ["RunMismatch", "RunMismatch"]
    finally:
        zombie.kill()
        zombie.wait()
    new.check()
    new.publish(2)
    new.check()
    what = "a trainer sleeps before its commit, and wakes up after the folder was wiped and another run begun there"
    record_property("fault", f"{what}|{STORES[name]}|`RunMismatch`")
