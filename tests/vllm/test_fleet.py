"""A trainer brings two real servers to its versions, whichever of trainer, stager and servers is killed on the way."""

from __future__ import annotations

import http.client
import itertools
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import forked
from tests.support.server import ServerProcess, servers
from tests.support.stagers import area_in, downloads, stagers, the_stager
from tests.support.tiny_models import make_model, train_step
from tests.support.waiting import eventually
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.drive import DeltaSync, ServerClient, ServerError, verify_server
from vllm_delta_snapshot.drive.sync import _wait_prepared


class Setup:
    """A trainer, its run, and two servers on one host that follow it."""

    def __init__(self, folder: Path) -> None:
        self.base, self.sync_dir, self.stage_dir = folder / "base", folder / "run", folder / "stage"
        self.model = make_model("qwen3", self.base)
        self.publisher = DeltaPublisher(self.model, sync_dir=str(self.sync_dir), base=self.base, asynchronous=False)
        environment = {"DELTA_SNAPSHOT_STAGE_DIR": str(self.stage_dir)}
        self.servers = [ServerProcess(self.base, folder / f"{name}.log", **environment) for name in ("one", "two")]
        self.clients = [process.client for process in self.servers]
        self.fleet = self.fleet_of()

    def fleet_of(self, *more: str, **options: Any) -> DeltaSync:
        """Return a new fleet of both servers and others."""
        urls = [client.url for client in self.clients]
        return DeltaSync([*urls, *more], sync_dir=str(self.sync_dir), **options)

    def train(self) -> None:
        """Make an optimizer step."""
        train_step(self.model, self.publisher.version + 1)

    def publish(self) -> int:
        """Train a step and publish it."""
        self.train()
        return self.publisher.publish().version

    def assert_both_serve(self, version: int) -> None:
        """Check that both generate with the same weights, under the label of that version."""
        label = f"{self.publisher.run_id}@{version}"
        assert [(client.weight_version(), client.is_paused()) for client in self.clients] == [(label, False)] * 2
        one, two = (client.checksums() for client in self.clients)
        assert one == two

    def assert_both_hold(self, version: int) -> None:
        """Check besides that it is the weights that the trainer published."""
        self.assert_both_serve(version)
        for client in self.clients:
            verify_server(client, version)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    made = Setup(tmp_path_factory.mktemp("fleet"))
    with servers(*made.servers):
        made.fleet.init().check()
        yield made


def test_one_call_brings_both_servers_to_what_was_trained(setup: Setup) -> None:
    before = setup.clients[0].checksums()
    setup.train()
    report = setup.publisher.sync(setup.fleet, step=1)
    report.check()
    assert (report.version, [of.attempts for of in report.servers]) == (setup.publisher.version, [1, 1])
    assert [of.server for of in report.servers] == [client.url for client in setup.clients]
    assert all(of.update is not None and of.update.is_cache_reset for of in report.servers)
    setup.assert_both_hold(report.version)
    assert setup.clients[0].checksums() != before
    area = area_in(setup.stage_dir)
    assert the_stager(area)
    assert downloads(area) == [report.version]  # one for both: they are on one host


def test_servers_that_cannot_be_reached_fail_alone_and_soon(setup: Setup) -> None:
    with socket.socket() as closed, socket.socket() as silent:
        closed.bind(("127.0.0.1", 0))  # and nobody listens
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # and nobody answers
        urls = [f"http://127.0.0.1:{other.getsockname()[1]}" for other in (closed, silent)]
        fleet = setup.fleet_of(*urls, connect_timeout_s=1.0, retries=1, backoff_s=0.1)
        setup.train()
        report = setup.publisher.sync(fleet)
    assert [of.ok for of in report.servers] == [True, True, False, False]
    setup.assert_both_serve(report.version)
    for of, url in zip(report.failed, urls, strict=True):
        assert (of.server, of.attempts) == (url, 2)
        assert isinstance(of.error, ServerError)
        assert of.error.status is None
        assert url in str(of.error)
        assert of.seconds < 10  # two time-outs of a second, on a busy machine
    with pytest.raises(Exception, match="2 of 4 servers do not serve version") as caught:
        report.check()
    assert all(url in str(caught.value) for url in urls)


def test_killed_stager_is_replaced_on_the_way(setup: Setup) -> None:
    area = area_in(setup.stage_dir)
    state = area.read_state()
    assert state is not None
    assert the_stager(area) == state.pid
    os.kill(state.pid, signal.SIGKILL)
    eventually(lambda: not stagers(area))
    setup.train()
    report = setup.publisher.sync(setup.fleet)
    report.check()
    setup.assert_both_hold(report.version)
    assert the_stager(area) != state.pid


@pytest.mark.parametrize("is_asked", [False, True], ids=["before-asking", "before-the-answer"])
def test_sync_after_a_trainer_that_was_killed_at_any_step_brings_both_to_the_newest(
    setup: Setup, is_asked: bool
) -> None:
    for number in itertools.count(1):
        version = setup.publish()
        # From here on each sync asks the same: nothing is waited for any more.
        _wait_prepared(setup.clients[0], "prepare", {"version": version, "run": setup.publisher.run_id}, 60)
        death = forked(lambda number=number, version=version: _sync_until(setup, version, number, is_asked=is_asked))
        if number % 4 == 0:
            version = setup.publish()
        report = setup.fleet.sync(version, run_id=setup.publisher.run_id)
        report.check()
        setup.assert_both_serve(version)
        if death == 0:  # it came to the end of its sync
            break
        assert os.WTERMSIG(death) == signal.SIGKILL
    assert number > 10
    setup.assert_both_hold(version)


def _sync_until(setup: Setup, version: int, last: int, *, is_asked: bool) -> None:
    """Sync the first server, and die before a request, or when it is sent and not yet answered. Never returns, then."""
    made = 0

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal made
            made += 1
            if made == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call

    owner: Any = http.client.HTTPConnection if is_asked else ServerClient
    name = "getresponse" if is_asked else "request"
    setattr(owner, name, counting(getattr(owner, name)))
    DeltaSync([setup.clients[0].url]).sync(version, run_id=setup.publisher.run_id).check()


def test_killed_server_catches_up_in_one_pause_once_it_is_back(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    alive, dead = setup.servers
    dead.kill()
    for _ in range(3):
        setup.train()
        report = setup.publisher.sync(setup.fleet)
        assert [of.ok for of in report.servers] == [True, False]
        assert alive.client.weight_version() == f"{setup.publisher.run_id}@{report.version}"
    dead.start()
    dead.wait_ready()
    asked: list[str] = []
    request = ServerClient.request

    def noted(client: ServerClient, method: str, path: str, *args: Any, **options: Any) -> dict[str, Any]:
        if client.url == dead.client.url:
            asked.append(path.partition("?")[0])
        return request(client, method, path, *args, **options)

    monkeypatch.setattr(ServerClient, "request", noted)
    updates = dead.updates()
    setup.train()
    report = setup.publisher.sync(setup.fleet)
    report.check()
    assert [of.attempts for of in report.servers] == [1, 1]
    assert (asked.count("/init_weight_transfer_engine"), asked.count("/pause")) == (1, 1)
    assert dead.updates() == updates + 1
    setup.assert_both_hold(report.version)
