"""``sync``, ``repair`` and ``follow`` against small real HTTP servers that answer like vLLM."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import ERROR_FIELDS, Outcome, documented_fields, fields_of
from tests.support.runs import TinyRun, make_run
from tests.support.stub_server import EngineStub, answering
from vllm_delta_snapshot.runs.acks import read_acknowledgements
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import open_store

COMMAND = Path(sys.executable).with_name("delta-snapshot")
KEY = "sk-very-secret"
NOWHERE = "http://127.0.0.1:1"
forms = pytest.mark.parametrize("form", [(), ("--json",)], ids=["text", "json"])
urls_of_no_server = pytest.mark.parametrize("url", ["ftp://host", "localhost:8000", "http://host:port"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_run(tmp_path_factory.mktemp("run"), 2)


@pytest.fixture
def servers() -> Iterator[list[EngineStub]]:
    with ExitStack() as stack:
        yield [stack.enter_context(answering(EngineStub())) for _ in range(2)]


@pytest.fixture
def server(servers: list[EngineStub]) -> EngineStub:
    return servers[0]


@pytest.fixture(autouse=True)
def api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)


def call(*args: object) -> Outcome:
    """Call a verb, and look for the key wherever something was said."""
    outcome = Outcome(*args)
    assert KEY not in outcome.stdout + outcome.stderr
    return outcome


def at(*servers: EngineStub | str) -> list[str]:
    urls = [server.url if isinstance(server, EngineStub) else server for server in servers]
    return [word for url in urls for word in ("--server", url)]


# --- sync


def test_sync_brings_every_server_to_the_newest_version(run: TinyRun, servers: list[EngineStub]):
    outcome = call("sync", run.sync_dir, *at(*servers))
    outcome.assert_ok()
    header, *lines = outcome.stdout.splitlines()
    assert header.split() == ["server", "version", "staged", "s", "paused", "s", "applied", "s", "resumed", "s"]
    assert [line.split()[:2] for line in lines] == [[server.url, "2"] for server in servers]
    for server in servers:
        assert server.label == f"{run.publisher.run_id}@2"
        assert server.keys == {f"Bearer {KEY}"}


def test_sync_has_the_documented_fields(run: TinyRun, servers: list[EngineStub]):
    servers[1].always["apply"] = "ApplyError"
    outcome = call("sync", run.sync_dir, *at(*servers), "--json")
    assert outcome.code == 1
    found = outcome.json
    assert fields_of(found, into=("update",)) == documented_fields("`sync`")
    assert (found["ok"], found["version"]) == (False, 2)
    good, bad = found["servers"]
    assert (good["server"], good["ok"], good["attempts"], good["error"]) == (servers[0].url, True, 1, None)
    assert (good["update"]["engine"], good["update"]["version"]) == (servers[0].url, 2)
    assert (bad["server"], bad["ok"], bad["update"]) == (servers[1].url, False, None)
    assert set(bad["error"]) == ERROR_FIELDS
    assert bad["error"]["kind"] == "ServerError"


def test_sync_names_the_server_that_failed_and_exits_with_1(run: TinyRun, servers: list[EngineStub]):
    servers[1].always["apply"] = "ApplyError"
    outcome = call("sync", run.sync_dir, *at(*servers))
    assert outcome.code == 1
    assert outcome.stdout.splitlines()[2].split()[:2] == [servers[1].url, "FAILED"]
    assert outcome.stderr.startswith(f"{servers[1].url}: the server answered 500")
    assert "Traceback" not in outcome.stderr


def test_sync_goes_to_the_version_that_is_asked_for_in_the_way_that_is_asked_for(run: TinyRun, server: EngineStub):
    options = ("--version", 1, "--pause-mode", "abort", "--allow-rollback", "--timeout", 5)
    call("sync", run.sync_dir, *at(server), *options).assert_ok()
    assert server.updates() == [("prepare", 1), ("apply", 1), ("confirm", 1), ("confirm", 1)]
    assert "/pause?mode=abort" in server.paths()
    infos = [body["update_info"] for _, path, body in server.asked if path == "/update_weights"]
    assert [info.get("allow_rollback") for info in infos] == [True, True, None, None]
    digest = RunFolder(open_store(str(run.sync_dir))).state_digest(1)
    assert all((info["run"], info["digest"]) == (run.publisher.run_id, digest) for info in infos)


def test_sync_initializes_a_server_with_the_whole_path_of_the_run(
    run: TinyRun, server: EngineStub, monkeypatch: pytest.MonkeyPatch
):
    server.restart()
    monkeypatch.chdir(run.sync_dir.parent)
    call("sync", run.sync_dir.name, *at(server)).assert_ok()
    said = [body for _, path, body in server.asked if path == "/init_weight_transfer_engine"]
    assert said == [{"init_info": {"sync_dir": str(run.sync_dir)}}]


@forms
def test_sync_of_no_run_is_a_problem_and_asks_no_server(tmp_path: Path, server: EngineStub, form: tuple[str, ...]):
    message = call("sync", tmp_path, *at(server), *form).assert_failed(1, "ObjectNotFound")
    assert "no run here" in message
    assert server.asked == []


@forms
@urls_of_no_server
def test_sync_with_a_url_that_is_no_servers_is_wrong_usage(run: TinyRun, url: str, form: tuple[str, ...]):
    assert f"found {url}" in call("sync", run.sync_dir, *at(url), *form).assert_failed(2, "ServerError")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "Missing option '--server'"),
        (("--server", NOWHERE, "--version", "-1"), "Invalid value for '--version'"),
        (("--server", NOWHERE, "--timeout", "-1"), "Invalid value for '--timeout'"),
        (("--server", NOWHERE, "--pause-mode", "stop"), "Invalid value for '--pause-mode'"),
    ],
)
def test_sync_with_wrong_arguments_is_wrong_usage(run: TinyRun, args: tuple[str, ...], said: str):
    assert said in call("sync", run.sync_dir, *args).usage


# --- repair


@forms
def test_repair_has_the_documented_fields_and_says_it_is_done(server: EngineStub, form: tuple[str, ...]):
    server.label = "run-1@7"
    outcome = call("repair", *at(server), *form)
    outcome.assert_ok()
    assert [action for action, _ in server.updates()] == ["prepare_repair", "repair", "confirm"]
    if not form:
        assert outcome.stdout.startswith(
            f"ok: all live weights of {server.url} are those of its version (label run-1@7), "
        )
        return
    found = outcome.json
    assert set(found) == documented_fields("`repair`") | {"ok"}
    assert found.pop("seconds") >= 0
    assert found == {"ok": True, "server": server.url, "label": "run-1@7"}


@forms
def test_repair_that_cannot_be_done_exits_with_1(server: EngineStub, form: tuple[str, ...]):
    server.always |= {"repair": "WeightsUncertain", "check": "WeightsUncertain"}
    message = call("repair", *at(server), *form).assert_failed(1, "ServerError")
    assert "WeightsUncertain" in message
    assert "/resume" not in server.paths()


@forms
def test_repair_of_no_server_there_is_a_problem(nowhere: str, form: tuple[str, ...]):
    message = call("repair", *at(nowhere), "--timeout", 0, *form).assert_failed(1, "ServerError")
    assert message.startswith("the server does not answer")


@forms
@urls_of_no_server
def test_repair_with_a_url_that_is_no_servers_is_wrong_usage(url: str, form: tuple[str, ...]):
    assert f"found {url}" in call("repair", *at(url), *form).assert_failed(2, "ServerError")


# --- follow: in a process of its own, since it takes over the signals of its process


@contextlib.contextmanager
def following(*args: object) -> Iterator[subprocess.Popen[str]]:
    """Start ``follow``; it is killed at the end if it has not ended."""
    process = subprocess.Popen(
        [COMMAND, "follow", *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(*args: object) -> tuple[int, str, str]:
    """Let ``follow`` end by itself; return exit code and what it said."""
    with following(*args) as process:
        stdout, stderr = process.communicate(timeout=60)
        assert "Traceback" not in stderr
        return process.returncode, stdout, stderr


def stopped(process: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM) -> tuple[str, str]:
    """Tell it to stop, and return what it said; it must end well."""
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert KEY not in stdout + stderr
    return stdout, stderr


def resumed(server: EngineStub) -> threading.Event:
    """Return what is set once the server was resumed."""
    event = threading.Event()
    server.routes["/resume"] = lambda _: (event.set(), (200, {}))[1]
    return event


def test_follower_ends_well_on_sigterm_and_prints_one_object(run: TinyRun, server: EngineStub):
    event = resumed(server)
    args = ("--sync-dir", run.sync_dir, *at(server), "--listen", "127.0.0.1:0", "--sampler", "a", "--json")
    with following(*args) as process:
        assert event.wait(60)
        stdout, stderr = stopped(process)
    found = json.loads(stdout)
    assert set(found) == documented_fields("`follow`, when it ends, and `/status`") | {"ok"}
    told: dict[str, Any] = {name: found[name] for name in ("ok", "ready", "run_id", "sync_dir", "server", "error")}
    assert told == {
        "ok": True,
        "ready": True,
        "run_id": run.publisher.run_id,
        "sync_dir": str(run.sync_dir),
        "server": server.url,
        "error": None,
    }
    assert (found["applied_version"], found["newest_version"], found["acknowledged_version"]) == (2, 2, 2)
    assert server.label == f"{run.publisher.run_id}@2"
    assert server.keys == {f"Bearer {KEY}"}
    assert "/healthz /status /metrics" in stderr


def test_follower_ends_well_on_ctrl_c_and_prints_nothing_without_json(run: TinyRun, server: EngineStub):
    event = resumed(server)
    with following("--sync-dir", run.sync_dir, *at(server), "--listen", "", "--no-ack") as process:
        assert event.wait(60)
        stdout, stderr = stopped(process, signal.SIGINT)
    assert stdout == ""
    assert "/healthz" not in stderr


def test_follower_without_a_server_goes_on_until_it_is_told(run: TinyRun, server: EngineStub):
    asked = threading.Event()
    server.routes["/weight_info"] = lambda _: asked.set()  # and hangs up
    with following("--sync-dir", run.sync_dir, *at(server), "--listen", "", "--json") as process:
        assert asked.wait(60)
        found = json.loads(stopped(process)[0])
    assert (found["ok"], found["ready"], found["applied_version"]) == (True, False, None)
    assert found["error"]["kind"] == "ServerError"
    assert found["failures"] >= 1


def test_follower_is_known_by_host_and_port_of_its_server(run: TinyRun, server: EngineStub):
    event = resumed(server)
    url = server.url + "/"
    with following("--sync-dir", run.sync_dir, "--server", url, "--listen", "") as process:
        assert event.wait(60)
        stopped(process)
    name = f"{socket.gethostname()}-{server.http.server_port}"
    assert name in read_acknowledgements(run.folder.store, run.publisher.run_id)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--listen", "127.0.0.1:65536"), "is not HOST:PORT"),
        (("--server", "ftp://host"), "not a server's URL"),
        (("--sampler", "../x"), "not a name for a sampler"),
    ],
)
def test_follower_that_cannot_begin_exits_with_2(run: TinyRun, args: tuple[str, ...], said: str):
    code, stdout, stderr = ended("--sync-dir", run.sync_dir, "--server", NOWHERE, *args)
    assert (code, stdout) == (2, "")
    assert said in stderr


def test_follower_whose_port_is_taken_exits_with_2(run: TinyRun):
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, stdout, stderr = ended("--sync-dir", run.sync_dir, "--listen", address, "--json")
    assert (code, json.loads(stdout)["error"]["kind"]) == (2, "StageError")
    assert "--listen" in stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "Missing option '--sync-dir'"),
        (("--sync-dir", "/run", "--max-lag", "-1"), "Invalid value for '--max-lag'"),
        (("--sync-dir", "/run", "--min-interval", "-1"), "Invalid value for '--min-interval'"),
        (("--sync-dir", "/run", "--timeout", "-1"), "Invalid value for '--timeout'"),
        (("--sync-dir", "/run", "--policy", "some"), "Invalid value for '--policy'"),
    ],
)
def test_follower_with_wrong_arguments_is_wrong_usage(args: tuple[str, ...], said: str):
    assert said in call("follow", *args).usage
