"""A follower keeps one server at the versions of a run; nothing connects it to the trainer but the store."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import documented_fields
from tests.support.faults import FaultyStore
from tests.support.runs import TinyRun, make_run
from tests.support.stub_server import EngineStub, answering
from vllm_delta_snapshot.drive import ServerClient, ServerError, UpdateReport, follow
from vllm_delta_snapshot.drive.follow import FollowConfig, Follower
from vllm_delta_snapshot.drive.follow_http import serve, status_of
from vllm_delta_snapshot.drive.follow_metrics import FollowMetrics
from vllm_delta_snapshot.errors import (
    ApplyError,
    CompatibilityError,
    DeltaSnapshotError,
    NotStaged,
    ObjectNotFound,
    StageError,
    StoreUnavailable,
)
from vllm_delta_snapshot.host.area import StageArea, StagerConfig, StagerState
from vllm_delta_snapshot.runs.acks import read_acknowledgements
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store.posix import PosixStore
from vllm_delta_snapshot.util.traffic import retries

VERSIONS = 4
SERVING_DOC = Path(__file__).parents[3] / "docs" / "serving.md"


class Seen:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.errors: list[DeltaSnapshotError] = []

    def updated(self, report: UpdateReport) -> None:
        self.versions.append(report.version)

    def failed(self, error: DeltaSnapshotError, stage: str) -> None:
        self.errors.append(error)


class Setting:
    """A run in a real folder, of which only some versions are committed yet, and a server; followers of both."""

    def __init__(self, run: TinyRun, sync_dir: Path, server: EngineStub) -> None:
        self.run = run
        self.sync_dir = sync_dir
        self.server = server
        self.seen = Seen()
        self.run_id = run.publisher.run_id
        self.store: Any = PosixStore(sync_dir)

    def commit(self, *versions: int) -> None:
        for version in versions:
            folder = self.sync_dir / "versions"
            folder.mkdir(exist_ok=True)
            shutil.copy(self.run.sync_dir / "versions" / f"{version:08d}.json", folder)

    def follower(self, *, sampler: str | None = None, **config: Any) -> Follower:
        client = ServerClient(self.server.url)
        folder = RunFolder(self.store)
        settings = FollowConfig(sync_dir=str(self.sync_dir), **config)
        return Follower(settings, client, folder, sampler=sampler, observer=self.seen)

    def said(self) -> dict[str, int]:
        found = read_acknowledgements(PosixStore(self.sync_dir), self.run_id)
        return {name: of.version for name, of in found.items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_run(tmp_path_factory.mktemp("run"), VERSIONS)


@pytest.fixture
def setting(run: TinyRun, tmp_path: Path) -> Iterator[Setting]:
    sync_dir = tmp_path / "run"
    sync_dir.mkdir()
    shutil.copy(run.sync_dir / "run.json", sync_dir)
    with answering(EngineStub()) as server:
        found = Setting(run, sync_dir, server)
        found.commit(1, 2)
        yield found


# --- which version, and when


def test_newest_version_is_taken_at_once_and_the_server_is_labelled(setting: Setting):
    follower = setting.follower()
    assert not follower.is_ready
    follower.step()
    assert setting.server.applied() == [2]
    assert setting.server.label == f"{setting.run_id}@2"
    state = follower.state
    assert (state.run_id, state.applied, state.newest, state.lag) == (setting.run_id, 2, 2, 0)
    assert (state.updates, state.failures, state.error) == (1, 0, None)
    assert state.last is not None
    assert (state.last.version, state.last.engine) == (2, setting.server.url)
    assert follower.is_ready


def test_server_that_has_the_newest_version_is_left_alone(setting: Setting):
    follower = setting.follower()
    for _ in range(3):
        follower.step()
    assert setting.server.applied() == [2]
    assert setting.server.paths().count("/pause?mode=keep") == 1


def test_missed_versions_are_merged_into_one_pause(setting: Setting):
    follower = setting.follower()
    follower.step()
    setting.commit(3, 4)
    follower.step()
    assert setting.server.applied() == [2, 4]
    assert setting.seen.versions == [2, 4]


def test_policy_every_begins_with_the_newest_and_takes_each_one_in_turn(setting: Setting):
    follower = setting.follower(policy="every")
    follower.step()
    setting.commit(3, 4)
    lags = []
    for _ in range(3):
        follower.step()
        lags.append(follower.state.lag)
    assert setting.server.applied() == [2, 3, 4]
    assert lags == [1, 0, 0]


def test_run_without_versions_is_followed_from_its_base(setting: Setting):
    shutil.rmtree(setting.sync_dir / "versions")
    follower = setting.follower()
    follower.step()
    assert setting.server.applied() == [0]
    assert follower.is_ready


def test_update_within_the_interval_waits_until_it_is_over(setting: Setting):
    follower = setting.follower(min_interval_s=1000.0)
    follower.step()
    setting.commit(3)
    follower.step()
    assert (follower.state.applied, follower.state.lag) == (2, 1)
    follower._updated_at -= 1000.0
    follower.step()
    assert follower.state.applied == 3


def test_pause_mode_and_further_init_info_reach_the_server(setting: Setting):
    setting.server.restart()
    follower = setting.follower(pause_mode="wait", init_info={"stage_dir": "/stage"})
    for _ in range(2):
        follower.step()
    said = [body for _, path, body in setting.server.asked if path == "/init_weight_transfer_engine"]
    assert said == [{"init_info": {"sync_dir": str(setting.sync_dir), "stage_dir": "/stage"}}]
    assert "/pause?mode=wait" in setting.server.paths()


@pytest.mark.parametrize(
    "wrong", [{"max_lag": -1}, {"policy": "some"}, {"poll_interval_s": 0.0}, {"pause_mode": "stop"}, {"interval": 1}]
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, object]):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        FollowConfig(sync_dir="/run", **wrong)  # type: ignore[arg-type]


# --- readiness


@pytest.mark.parametrize(("max_lag", "is_ready"), [(0, False), (1, False), (2, True)])
def test_server_may_be_so_many_versions_behind_and_still_be_ready(setting: Setting, max_lag: int, is_ready: bool):
    follower = setting.follower(min_interval_s=1000.0, max_lag=max_lag)
    follower.step()
    assert follower.is_ready
    setting.commit(3, 4)
    follower.step()
    assert follower.state.lag == 2
    assert follower.is_ready is is_ready


def test_server_is_not_ready_before_it_has_caught_up_however_little_it_lags(setting: Setting):
    setting.server.failing["apply"] = ["ApplyError"]
    follower = setting.follower(max_lag=100)
    follower.step()
    assert (follower.state.lag, follower.is_ready) == (None, False)
    follower.step()
    assert follower.is_ready


def test_server_that_catches_up_one_by_one_is_ready_once_it_has_the_newest(setting: Setting):
    follower = setting.follower(policy="every", max_lag=100)
    follower.step()
    follower._set(has_caught_up=False)
    setting.commit(3, 4)
    found = []
    for _ in range(2):
        follower.step()
        found.append(follower.is_ready)
    assert found == [False, True]


def test_follower_that_has_not_looked_lately_is_not_ready(setting: Setting):
    follower = setting.follower()
    follower.step()
    assert follower.state.looked_at is not None
    follower._set(looked_at=time.monotonic() - 1000.0)
    assert not follower.is_ready


# --- what becomes of the server


def test_restarted_server_is_initialized_and_brought_back_and_not_ready_meanwhile(setting: Setting):
    follower = setting.follower()
    follower.step()
    setting.server.restart()
    follower.step()
    assert (follower.state.applied, follower.is_ready, follower.state.failures) == (None, False, 0)
    assert setting.server.is_initialized
    follower.step()
    assert (follower.state.applied, follower.is_ready, follower.state.updates) == (2, True, 2)
    assert setting.server.label == f"{setting.run_id}@2"


def test_server_that_somebody_else_brought_elsewhere_is_brought_back(setting: Setting):
    follower = setting.follower()
    follower.step()
    setting.server.label = f"{setting.run_id}@1"
    setting.server.failing["apply"] = ["ApplyError"]
    follower.step()
    assert (follower.state.applied, follower.is_ready) == (None, False)
    follower.step()
    assert (follower.state.applied, follower.is_ready) == (2, True)


def test_server_that_is_gone_is_not_ready_at_once_and_asked_for_every_few_seconds(setting: Setting):
    follower = setting.follower(retry_interval_s=2.0)
    follower.step()
    setting.server.is_gone = True
    waits = []
    for number in range(1, 7):
        follower.step()
        waits.append(follower._wait_s)
        assert not follower.is_ready
        assert follower.state.failures == number
        assert isinstance(follower.state.error, ServerError)
    assert waits == [2.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    assert [type(error) for error in setting.seen.errors] == [ServerError] * 6
    setting.server.is_gone = False
    follower.step()
    assert (follower.is_ready, follower.state.error, follower.state.failures) == (True, None, 6)
    assert follower._wait_s == follower.config.poll_interval_s
    assert setting.server.applied() == [2]


def test_server_that_refuses_an_update_serves_its_old_version_and_is_asked_again(setting: Setting):
    follower = setting.follower()
    follower.step()
    setting.commit(3)
    setting.server.failing["apply"] = ["ApplyError"]
    follower.step()
    assert isinstance(follower.state.error, ServerError)
    assert follower.state.error.kind is ApplyError
    assert (follower.state.applied, follower.is_ready, setting.server.label) == (2, True, f"{setting.run_id}@2")
    follower.step()
    assert (follower.state.applied, follower.state.error) == (3, None)


def test_server_that_goes_on_refusing_is_asked_ever_more_rarely(setting: Setting):
    follower = setting.follower(retry_interval_s=2.0)
    setting.server.failing["apply"] = ["ApplyError"] * 6
    waits = []
    for _ in range(6):
        follower.step()
        waits.append(follower._wait_s)
    assert waits == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_server_whose_weights_were_changed_is_repaired(setting: Setting):
    setting.server.failing["prepare"] = ["BaseMismatch"]
    follower = setting.follower()
    follower.step()
    assert follower.state.last is not None
    assert follower.state.last.is_repaired
    assert follower.is_ready


# --- staging


@pytest.fixture
def _no_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask once whether a version is staged, and look for the order to stop before asking again."""
    monkeypatch.setattr(follow, "_STAGE_SLICE_S", 0.0)


@pytest.mark.usefixtures("_no_slices")
def test_version_that_is_still_being_staged_is_no_failure_until_it_takes_too_long(setting: Setting):
    setting.server.always["prepare"] = "NotStaged"
    follower = setting.follower(stage_timeout_s=1000.0)
    for _ in range(3):
        follower.step()
    assert (follower.state.failures, follower.state.error, follower.state.updates) == (0, None, 0)
    assert not follower.is_ready
    assert follower._staging_since is not None
    follower._staging_since -= 1000.0
    follower.step()
    assert isinstance(follower.state.error, ServerError)
    assert follower.state.error.kind is NotStaged
    follower.step()
    assert (follower.state.failures, follower.state.error) == (1, None)
    del setting.server.always["prepare"]
    follower.step()
    assert (follower.state.applied, follower.is_ready) == (2, True)


@pytest.mark.usefixtures("_no_slices")
def test_time_of_staging_is_all_of_it(setting: Setting):
    setting.server.failing["prepare"] = ["NotStaged", "NotStaged"]
    follower = setting.follower(stage_timeout_s=1000.0)
    follower.step()
    assert follower._staging_since is not None
    follower._staging_since -= 100.0
    follower.step()
    follower.step()
    assert follower.state.last is not None
    assert 100.0 <= follower.state.last.stage_s < 200.0
    assert follower.state.last.pause_s < 100.0
    setting.commit(3)
    follower.step()
    assert follower.state.last.version == 3
    assert follower.state.last.stage_s < 100.0


# --- the store


def test_run_that_is_not_there_yet_is_waited_for(setting: Setting):
    hidden = setting.sync_dir.rename(setting.sync_dir.with_name("hidden"))
    follower = setting.follower()
    follower.step()
    assert isinstance(follower.state.error, ObjectNotFound)
    assert (follower.state.failures, follower.is_ready, setting.server.asked) == (1, False, [])
    hidden.rename(setting.sync_dir)
    follower.step()
    assert (follower.state.applied, follower.state.error, follower.is_ready) == (2, None, True)


def test_store_that_is_out_of_reach_for_a_moment_leaves_the_server_ready(setting: Setting):
    setting.store = FaultyStore(setting.store)
    follower = setting.follower()
    follower.step()
    setting.store._at = len(setting.store.log)
    follower.step()
    assert isinstance(follower.state.error, StoreUnavailable)
    assert follower.is_ready
    setting.store.heal()
    follower.step()
    assert follower.state.error is None


def test_versions_are_acknowledged_in_the_store_once(setting: Setting):
    follower = setting.follower(sampler="node1-8000")
    for _ in range(2):
        follower.step()
    assert setting.said() == {"node1-8000": 2}
    setting.commit(3)
    follower.step()
    assert setting.said() == {"node1-8000": 3}
    assert follower.state.acknowledged == 3
    said = read_acknowledgements(PosixStore(setting.sync_dir), setting.run_id)["node1-8000"]
    assert follower.state.last is not None
    assert (said.pause_s, said.stage_s) == (follower.state.last.pause_s, follower.state.last.stage_s)
    assert len(PosixStore(setting.sync_dir).list("acks/node1-8000")) == 2


def test_follower_without_a_name_writes_nothing_into_the_store(setting: Setting):
    setting.follower().step()
    assert not (setting.sync_dir / "acks").exists()


class ReadOnly(FaultyStore):
    """A store in which nothing can be created."""

    def create(self, key: str, data: bytes) -> None:
        raise StoreUnavailable("read-only", file=key)


def test_version_that_cannot_be_acknowledged_is_served_and_acknowledged_later(setting: Setting):
    inner = setting.store
    setting.store = ReadOnly(inner)
    follower = setting.follower(sampler="a")
    follower.step()
    assert (follower.state.applied, follower.is_ready, follower.state.error) == (2, True, None)
    assert (follower.state.acknowledged, follower.state.failures, setting.said()) == (None, 0, {})
    setting.commit(3)
    follower.step()
    assert (follower.state.applied, setting.said()) == (3, {})
    setting.store.create = inner.create
    follower.step()
    assert (follower.state.acknowledged, setting.said()) == (3, {"a": 3})
    assert setting.server.applied() == [2, 3]


# --- the process


def test_follower_ends_when_it_is_told_and_what_it_began_is_done(setting: Setting):
    stop = threading.Event()
    setting.server.routes["/pause?mode=keep"] = lambda _: (stop.set(), (200, {}))[1]
    follower = setting.follower(sampler="a")
    thread = threading.Thread(target=follower.run, args=(stop,))
    thread.start()
    thread.join(60.0)
    assert not thread.is_alive()
    assert follower.state.applied == 2
    assert setting.said() == {"a": 2}
    assert "/resume" in setting.server.paths()
    assert setting.server.updates()[-1] == ("confirm", 2)


def test_follower_goes_on_by_itself(setting: Setting):
    stop = threading.Event()

    class Next(Seen):
        def updated(self, report: UpdateReport) -> None:
            super().updated(report)
            if report.version == VERSIONS:
                stop.set()
            else:
                setting.commit(report.version + 1)

    setting.seen = Next()
    thread = threading.Thread(target=setting.follower(poll_interval_s=0.001).run, args=(stop,))
    thread.start()
    thread.join(60.0)
    stop.set()
    assert setting.seen.versions == [2, 3, 4]


def test_follower_that_is_told_before_it_begins_does_nothing(setting: Setting):
    stop = threading.Event()
    stop.set()
    setting.follower().run(stop)
    assert setting.server.asked == []


# --- over HTTP


def get(url: str) -> tuple[int, str, str]:
    """Return status, content type and body."""
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            return response.status, response.headers["Content-Type"], response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def test_health_is_503_until_the_server_has_caught_up_and_200_then(setting: Setting):
    follower = setting.follower()
    with serve(follower, None, "127.0.0.1", 0) as url:
        assert get(f"{url}/healthz")[0] == 503
        follower.step()
        status, kind, body = get(f"{url}/healthz?verbose")
        assert (status, kind, json.loads(body)["ready"]) == (200, "application/json", True)
        setting.server.is_gone = True
        follower.step()
        assert get(f"{url}/healthz")[0] == 503


def test_status_has_the_documented_fields(setting: Setting):
    follower = setting.follower(sampler="a")
    with serve(follower, None, "127.0.0.1", 0) as url:
        status, kind, body = get(f"{url}/status")
        assert (status, kind) == (200, "application/json")
        before = json.loads(body)
        assert (before["ready"], before["run_id"], before["applied_version"]) == (False, "", None)
        assert (before["last_update"], before["error"], before["seconds_since_look"]) == (None, None, None)
        follower.step()
        setting.server.is_gone = True
        follower.step()
        found = json.loads(get(f"{url}/status")[2])
    documented = documented_fields("`follow`, when it ends, and `/status`")
    assert set(found) == set(before) == documented
    updates = documented_fields("`sync`") - {"servers", "server", "ok", "attempts", "seconds", "update", "error"}
    assert set(found["last_update"]) == updates
    assert found["error"]["kind"] == "ServerError"
    told = ("run_id", "sync_dir", "server", "applied_version", "newest_version", "lag_versions")
    assert [found[name] for name in told] == [setting.run_id, str(setting.sync_dir), setting.server.url, 2, 2, 0]
    assert (found["acknowledged_version"], found["updates"], found["failures"], found["ready"]) == (2, 1, 1, False)


def test_seconds_since_the_last_look_are_told(setting: Setting):
    follower = setting.follower()
    follower.step()
    follower._set(looked_at=time.monotonic() - 100.0)
    seconds = status_of(follower)["seconds_since_look"]
    assert isinstance(seconds, float)
    assert 100.0 <= seconds < 200.0


def test_metrics_have_the_documented_names_and_tell_what_happened(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("prometheus_client")
    monkeypatch.setenv("DELTA_SNAPSHOT_STAGE_DIR", str(tmp_path / "stage"))
    for sync_dir, fetched in ((str(setting.sync_dir), 4096), ("/another/run", 1)):
        area = StageArea.of(tmp_path / "stage", StagerConfig(sync_dir=sync_dir, checkpoint="/base"))
        state = StagerState(status="following", pid=1, fetched_bytes=fetched, retries={"stage": 2 * (fetched > 1)})
        area.write(area.state, state.to_json())
    metrics = FollowMetrics()
    setting.seen = metrics  # type: ignore[assignment]
    follower = setting.follower()
    metrics.watch(follower)
    with serve(follower, metrics, "127.0.0.1", 0) as url:
        assert "delta_snapshot_applied_version -1.0" in get(f"{url}/metrics")[2]
        setting.server.failing |= {"prepare": ["BaseMismatch"], "apply": ["ApplyError"]}
        follower.step()
        setting.server.failing["prepare"] = ["BaseMismatch"]
        follower.step()
        setting.commit(3)
        setting.server.is_gone = True
        follower.step()
        status, kind, body = get(f"{url}/metrics")
    assert (status, kind.partition(";")[0]) == (200, "text/plain")
    said = dict(line.rsplit(" ", 1) for line in body.splitlines() if not line.startswith("#"))
    expected = {
        "applied_version": 2,
        "head_version": 3,
        "lag_versions": 1,
        "ready": 0,
        "updates_total": 1,
        "repairs_total": 1,
        'errors_total{error="ApplyError",stage="update"}': 1,
        'errors_total{error="ServerError",stage="look"}': 1,
        "chain_length": 3,
        "fetched_bytes_total": 4096,
        'retries_total{operation="stage"}': 2 + retries().get("stage", 0),
        "stage_duration_seconds_count": 1,
        "apply_duration_seconds_count": 1,
        "pause_duration_seconds_count": 1,
    }
    assert {name: float(said[f"delta_snapshot_{name}"]) for name in expected} == expected
    text = SERVING_DOC.read_text()
    names = ("applied_version", "head_version", "lag_versions", "ready", "updates_total", "repairs_total")
    names += ("errors_total{stage,error}", "retries_total{operation}", "chain_length", "fetched_bytes_total")
    assert [name for name in (*names, "build_info{version}") if f"`{name}`" not in text] == []
    assert any(name.startswith("delta_snapshot_build_info{version=") for name in said)
    assert all(name.startswith("delta_snapshot_") for name in said)


@pytest.mark.parametrize("path", ["", "/", "/metrics/", "/healthz/x", "/../etc/passwd"])
def test_unknown_path_says_which_there_are(setting: Setting, path: str):
    with serve(setting.follower(), None, "127.0.0.1", 0) as url:
        status, _, body = get(url + path)
    assert (status, body) == (404, "there is only /healthz /status /metrics\n")


def test_nothing_can_be_changed_over_http(setting: Setting):
    with serve(setting.follower(), None, "127.0.0.1", 0) as url:
        request = urllib.request.Request(f"{url}/status", b"{}", method="POST")
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=30)
        with caught.value:
            assert caught.value.code == 501


def test_port_in_use_names_the_option(setting: Setting):
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(StageError, match="cannot listen") as caught,
            serve(setting.follower(), None, "127.0.0.1", port),
        ):
            pass
    assert caught.value.file == f"127.0.0.1:{port}"
    assert caught.value.hint is not None
    assert "--listen" in caught.value.hint


def test_port_is_free_again_afterwards(setting: Setting):
    with serve(setting.follower(), None, "127.0.0.1", 0) as url:
        port = int(url.rpartition(":")[2])
    with serve(setting.follower(), None, "127.0.0.1", port) as again:
        assert again == url


def test_metrics_without_their_library_are_501_and_say_how_to_get_it(setting: Setting, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(CompatibilityError, match=r"pip install 'vllm-delta-snapshot\[metrics\]'"):
        FollowMetrics()
    follower = setting.follower()
    follower.step()
    with serve(follower, None, "127.0.0.1", 0) as url:
        status, _, body = get(f"{url}/metrics")
        assert status == 501
        assert "pip install 'vllm-delta-snapshot[metrics]'" in body
        assert get(f"{url}/healthz")[0] == 200


def test_probes_leave_nothing_in_the_log(setting: Setting, capfd: pytest.CaptureFixture[str]):
    with serve(setting.follower(), None, "127.0.0.1", 0) as url:
        get(f"{url}/healthz")
    assert capfd.readouterr() == ("", "")
