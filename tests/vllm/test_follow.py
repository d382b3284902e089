"""A follower beside a real server keeps it at the newest version, whichever of the two is killed on the way."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import urllib.error
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.follower import FollowerProcess, Gate, Moment, follower
from tests.support.server import ServerProcess, servers
from tests.support.tiny_models import make_model, train_step
from tests.support.waiting import eventually
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.drive import verify_server

SAMPLER = "beside"
MOMENTS: tuple[Moment, ...] = (
    ("after", "start_weight_update"),
    ("after", "prepare"),
    ("after", "pause"),
    ("before", "apply"),
    ("after", "apply"),
    ("after", "label"),
    ("before", "resume"),
    ("after", "resume"),
)
"""When a follower is killed."""


class Setup:
    """A trainer, its run, a server, and a gate before it."""

    def __init__(self, folder: Path) -> None:
        self.base, self.sync_dir, self._logs = folder / "base", folder / "run", folder
        self.model = make_model("qwen3", self.base)
        self.publisher = DeltaPublisher(self.model, sync_dir=str(self.sync_dir), base=self.base, asynchronous=False)
        environment = {"DELTA_SNAPSHOT_STAGE_DIR": str(folder / "stage")}
        self.server = ServerProcess(self.base, folder / "server.log", **environment)
        self.gate = Gate(self.server.client)
        self._followers = 0

    def publish(self) -> int:
        """Train a step and publish it."""
        train_step(self.model, self.publisher.version + 1)
        return self.publisher.publish().version

    def follower(self, url: str | None = None) -> contextlib.AbstractContextManager[FollowerProcess]:
        """Return a new follower, by default behind the gate."""
        self._followers += 1
        log = self._logs / f"follower-{self._followers}.log"
        return follower(self.sync_dir, url or self.gate.url, log, "--sampler", SAMPLER)

    def wait_served(self) -> None:
        """Wait for what the follower says in the store, and check that it is true."""
        version = self.publisher.version
        said = self.publisher.wait_applied([SAMPLER], timeout_s=60)
        assert (said[SAMPLER].version, said[SAMPLER].run_id) == (version, self.publisher.run_id)
        assert self.server.client.weight_version() == f"{self.publisher.run_id}@{version}"
        assert not self.server.client.is_paused()


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    made = Setup(tmp_path_factory.mktemp("follow"))
    with servers(made.server), made.gate:
        yield made


def test_follower_initializes_its_server_and_takes_versions_as_they_are_published(setup: Setup) -> None:
    is_held, is_let_go = threading.Event(), threading.Event()

    def hold() -> bool:
        is_held.set()
        return is_let_go.wait(60)

    setup.gate.arm(("before", "init_weight_transfer_engine"), hold)
    with setup.follower() as process:
        assert is_held.wait(60)
        assert not process.is_ready
        assert process.status()["applied_version"] is None
        is_let_go.set()
        eventually(lambda: process.is_ready)
        for _ in range(3):
            version = setup.publish()
            setup.wait_served()
            assert process.is_ready
            assert f"\ndelta_snapshot_applied_version {version}.0\n" in process.get("/metrics")[1]
        status = process.status()
        assert (status["applied_version"], status["newest_version"], status["failures"]) == (version, version, 0)
        assert status["server"] == setup.gate.url
        assert process.get("/other")[0] == 404
    verify_server(setup.server.client, version)


def test_versions_published_while_the_follower_is_away_are_taken_in_one_update(setup: Setup) -> None:
    with setup.follower() as process:
        eventually(lambda: process.is_ready)
        process.terminate()
        assert process.wait() == 0
    updates = setup.server.updates()
    for _ in range(20):
        setup.publish()
    with setup.follower() as process:
        setup.wait_served()
        assert process.status()["updates"] == 1
    assert setup.server.updates() == updates + 1
    verify_server(setup.server.client, setup.publisher.version)


def test_follower_after_one_that_was_killed_brings_its_server_to_the_newest(setup: Setup) -> None:
    with contextlib.ExitStack() as living:
        process = living.enter_context(setup.follower())
        eventually(lambda: process.is_ready)
        for moment in MOMENTS:
            setup.gate.arm(moment, partial(_killed, process))
            setup.publish()
            assert setup.gate.acted.wait(60), moment
            assert process.wait() == -signal.SIGKILL
            if moment[0] == "before":
                assert setup.server.client.is_paused(), moment
                setup.publish()
            process = living.enter_context(setup.follower())
            setup.wait_served()
            assert process.status()["failures"] == 0, moment
            verify_server(setup.server.client, setup.publisher.version)


def _killed(process: FollowerProcess) -> bool:
    process.kill()
    return False


def test_follower_that_is_told_to_stop_ends_its_update_first_and_leaves_nothing(setup: Setup) -> None:
    with setup.follower() as process:
        eventually(lambda: process.is_ready)

        def terminate() -> bool:
            process.terminate()
            return True

        setup.gate.arm(("after", "pause"), terminate)
        setup.publish()
        assert setup.gate.acted.wait(60)
        assert process.wait() == 0
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)  # nor has a child of it stayed
        with pytest.raises(urllib.error.URLError, match="refused"):
            process.get("/healthz")
        assert "Traceback" not in process.log
    setup.wait_served()


def test_killed_server_is_not_ready_until_it_has_caught_up_again(setup: Setup) -> None:
    with setup.follower(setup.server.client.url) as process:
        eventually(lambda: process.is_ready)
        assert process.children() == []
        setup.server.kill()
        eventually(lambda: not process.is_ready)
        for _ in range(2):
            setup.publish()
        updates = setup.server.updates()
        setup.server.start()
        assert not process.is_ready
        setup.server.wait_ready()
        setup.wait_served()
        assert process.is_ready
        assert setup.server.updates() == updates + 1
    verify_server(setup.server.client, setup.publisher.version)
