"""A fleet of servers brought to a version: side by side, a report for each, and none waits for another."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.stub_server import EngineStub, StubServer, answering
from vllm_delta_snapshot.drive import DeltaSync, FleetReport, ServerClient, ServerError, ServerReport, sync_server
from vllm_delta_snapshot.drive.sync import repair_server
from vllm_delta_snapshot.errors import ApplyError, BaseMismatch, MirrorBusy, NotInitialized, WeightsUncertain

RUN = "0123abcd-0123-0123-0123-0123456789ab"
KEY = "sk-very-secret"
LONG_S = 30.0


@pytest.fixture
def servers() -> Iterator[list[EngineStub]]:
    with ExitStack() as stack:
        yield [stack.enter_context(answering(EngineStub())) for _ in range(3)]


@pytest.fixture
def server(servers: list[EngineStub]) -> EngineStub:
    return servers[0]


def fleet_of(*servers: StubServer | str | ServerClient, **options: Any) -> DeltaSync:
    urls = [server.url if isinstance(server, StubServer) else server for server in servers]
    return DeltaSync(urls, backoff_s=0.0, **options)


def only(report: FleetReport) -> ServerReport:
    (found,) = report.servers
    return found


def test_every_server_has_the_version_and_its_label_and_the_reports_are_in_order(servers: list[EngineStub]):
    report = fleet_of(*servers).sync(7, run_id=RUN)
    report.check()
    assert (report.ok, report.version, report.failed) == (True, 7, ())
    assert [found.server for found in report.servers] == [server.url for server in servers]
    for server, found in zip(servers, report.servers, strict=True):
        assert (found.ok, found.version, found.attempts, found.error) == (True, 7, 1, None)
        assert found.update is not None
        assert (found.update.engine, found.update.version) == (server.url, 7)
        assert (found.update.is_cache_reset, found.update.is_repaired) == (True, False)
        assert found.update.pause_s >= found.update.apply_s + found.update.resume_s > 0
        assert found.seconds >= found.update.stage_s + found.update.pause_s
        assert server.updates() == [("prepare", 7), ("apply", 7), ("confirm", 7), ("confirm", 7)]
        assert server.label == f"{RUN}@7"


def test_only_what_changes_weights_lies_between_pause_and_resume(server: EngineStub):
    fleet_of(server, pause_mode="abort").sync(7)
    paths = server.paths()
    assert paths[: paths.index("/pause?mode=abort")] == [
        "/health",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
    ]
    assert paths[paths.index("/pause?mode=abort") + 1 :] == [
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/reset_prefix_cache?reset_running_requests=false",
        "/reset_mm_cache",
        "/reset_encoder_cache",
        "/resume",
    ]


@pytest.mark.parametrize("running_requests", ["recompute", "keep_cache"])
def test_cache_of_frozen_requests_is_dropped_if_it_is_to_be_computed_again(server: EngineStub, running_requests: Any):
    server.routes["/reset_prefix_cache?reset_running_requests=false"] = (200, {"success": False})
    update = only(fleet_of(server, running_requests=running_requests).sync(7)).update
    assert update is not None
    is_dropped = "/reset_prefix_cache?reset_running_requests=true" in server.paths()
    assert update.is_cache_reset is is_dropped is (running_requests == "recompute")


def test_fleet_of_no_servers_has_every_version():
    fleet = fleet_of()
    assert fleet.sync(7) == FleetReport(7, ())
    assert fleet.init() == FleetReport(0, ())
    fleet.sync(7).check()


def test_server_that_refuses_keeps_its_version_and_is_asked_once(servers: list[EngineStub]):
    servers[1].always["apply"] = "ApplyError"
    report = fleet_of(*servers, retries=5).sync(7, run_id=RUN)
    assert [found.ok for found in report.servers] == [True, False, True]
    (failed,) = report.failed
    assert (failed.server, failed.attempts, failed.update) == (servers[1].url, 1, None)
    assert isinstance(failed.error, ServerError)
    assert failed.error.kind is ApplyError
    assert servers[1].paths()[-1] == "/resume"
    assert [server.label for server in servers] == [f"{RUN}@7", "default", f"{RUN}@7"]


def test_server_that_cannot_vouch_for_its_weights_stays_paused(server: EngineStub):
    server.always |= {"apply": "WeightsUncertain", "check": "WeightsUncertain"}
    error = only(fleet_of(server).sync(7)).error
    assert isinstance(error, ServerError)
    assert error.kind is WeightsUncertain
    assert "/resume" not in server.paths()
    assert server.label == "uncertain"


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_server_that_is_not_there_is_tried_again_so_many_times(nowhere: str, retries: int):
    failed = only(fleet_of(nowhere, retries=retries).sync(7))
    assert (failed.ok, failed.attempts) == (False, retries + 1)
    assert isinstance(failed.error, ServerError)
    assert failed.error.status is None


@pytest.mark.parametrize("status", [502, 503, 504])
def test_gateway_without_its_server_is_tried_again_so_many_times(server: EngineStub, status: int):
    server.routes["/health"] = (status, b"<html>no upstream</html>")
    failed = only(fleet_of(server, retries=2).sync(7))
    assert (failed.ok, failed.attempts) == (False, 3)
    assert server.paths() == ["/health"] * 3


@pytest.mark.parametrize("status", [400, 401, 404, 500])
def test_what_a_server_says_itself_stays_true(server: EngineStub, status: int):
    server.routes["/health"] = (status, {})
    assert only(fleet_of(server, retries=2).sync(7)).attempts == 1


def test_server_that_comes_back_in_time_has_the_version(server: EngineStub):
    answers = iter([(503, {}), (503, {}), (200, {})])
    server.routes["/health"] = lambda _: next(answers)
    found = only(fleet_of(server, retries=2).sync(7))
    assert (found.ok, found.attempts) == (True, 3)


def test_connection_lost_in_the_middle_of_an_update_is_tried_again(server: EngineStub):
    answers = iter([None, (200, {})])
    server.routes["/pause?mode=keep"] = lambda _: next(answers)
    found = only(fleet_of(server).sync(7))
    assert (found.ok, found.attempts) == (True, 2)
    assert server.applied() == [7]


def test_servers_are_brought_side_by_side(servers: list[EngineStub]):
    together = threading.Barrier(len(servers))

    def meet(_: Any) -> tuple[int, Any]:
        together.wait(LONG_S)
        return 200, {}

    for server in servers:
        server.routes["/pause?mode=keep"] = meet
    assert fleet_of(*servers).sync(7).ok
    assert not together.broken


def test_server_that_hangs_holds_up_no_other(servers: list[EngineStub]):
    served = [threading.Event() for _ in servers[1:]]

    def hang(_: Any) -> tuple[int, Any]:
        assert all(event.wait(LONG_S) for event in served)
        return 503, {}

    def serve(event: threading.Event) -> Any:
        def answer(_: Any) -> tuple[int, Any]:
            event.set()
            return 200, {}

        return answer

    servers[0].routes["/health"] = hang
    for server, event in zip(servers[1:], served, strict=True):
        server.routes["/resume"] = serve(event)
    report = fleet_of(*servers, retries=0).sync(7)
    assert [found.ok for found in report.servers] == [False, True, True]


def test_server_that_was_restarted_is_initialized_and_has_the_version(servers: list[EngineStub]):
    servers[1].restart()
    fleet = fleet_of(*servers, sync_dir="/shared/run-1", init_info={"stage_dir": "/stage"})
    report = fleet.sync(7, run_id=RUN)
    report.check()
    assert [found.attempts for found in report.servers] == [1, 1, 1]
    said = [body for _, path, body in servers[1].asked if path == "/init_weight_transfer_engine"]
    assert said == [{"init_info": {"stage_dir": "/stage", "sync_dir": "/shared/run-1"}}]
    assert "/init_weight_transfer_engine" not in servers[0].paths()
    assert servers[1].label == f"{RUN}@7"


def test_server_that_is_not_initialized_is_an_error_without_a_sync_dir(server: EngineStub):
    server.restart()
    failed = only(fleet_of(server).sync(7))
    assert isinstance(failed.error, ServerError)
    assert (failed.error.kind, failed.attempts) == (NotInitialized, 1)
    assert "/init_weight_transfer_engine" not in server.paths()


def test_init_begins_staging_everywhere_and_reports_who_refused(servers: list[EngineStub]):
    for server in servers:
        server.restart()
    servers[2].refuse("/init_weight_transfer_engine", 500, "no such folder [ObjectNotFound]")
    report = fleet_of(*servers, sync_dir="/shared/run-1").init()
    assert (report.version, [found.ok for found in report.servers]) == (0, [True, True, False])
    assert [server.is_initialized for server in servers] == [True, True, False]
    assert all(server.updates() == [] for server in servers)


def test_check_names_every_server_that_failed_and_why(servers: list[EngineStub], nowhere: str):
    servers[1].always["prepare"] = "OutOfOrder"
    report = fleet_of(*servers, nowhere, retries=0).sync(7)
    with pytest.raises(ApplyError, match="2 of 4 servers do not serve version 7") as caught:
        report.check()
    assert f"{servers[1].url}: the server answered 500" in str(caught.value.found)
    assert "OutOfOrder" in str(caught.value.found)
    assert f"{nowhere}: the server does not answer" in str(caught.value.found)
    assert servers[0].url not in str(caught.value)
    assert caught.value.__cause__ is report.failed[0].error


@pytest.mark.parametrize("is_meant", [False, True])
def test_going_back_is_asked_for_only_when_it_is_meant(server: EngineStub, is_meant: bool):
    fleet_of(server).sync(7, allow_rollback=is_meant)
    asked = [body["update_info"]["allow_rollback"] for _, path, body in server.asked if path == "/update_weights"]
    assert asked == [is_meant, is_meant]


def test_key_is_sent_to_servers_given_by_url_and_appears_nowhere(
    servers: list[EngineStub], nowhere: str, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG)
    servers[0].refuse("/update_weights", 401, "Unauthorized")
    own = ServerClient(servers[1].url, api_key="another")
    fleet = fleet_of(servers[0], own, nowhere, api_key=KEY, retries=1)
    report = fleet.sync(7)
    assert servers[0].keys == {f"Bearer {KEY}"}
    assert servers[1].keys == {"Bearer another"}
    with pytest.raises(ApplyError) as caught:
        report.check()
    said = [caplog.text, str(caught.value), repr(report), repr(fleet), *(str(of.error) for of in report.failed)]
    assert [text for text in said if KEY in text] == []


def test_headers_are_sent_with_every_request(server: EngineStub):
    fleet_of(server, headers={"Authorization": "Basic eA=="}).sync(7)
    assert server.keys == {"Basic eA=="}


def test_server_whose_weights_were_changed_is_repaired_first(server: EngineStub):
    server.failing["prepare"] = ["BaseMismatch"]
    found = only(fleet_of(server).sync(7, run_id=RUN))
    assert found.update is not None
    assert found.update.is_repaired
    assert server.updates() == [
        ("prepare", 7),
        ("prepare_repair", None),
        ("repair", None),
        ("prepare", 7),
        ("apply", 7),
        ("confirm", 7),
        ("confirm", 7),
    ]
    assert server.label == f"{RUN}@7"
    paths = server.paths()
    repair = paths[paths.index("/pause?mode=keep") : paths.index("/resume") + 1]
    assert repair == [
        "/pause?mode=keep",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/weight_info",
        "/reset_prefix_cache?reset_running_requests=false",
        "/reset_mm_cache",
        "/reset_encoder_cache",
        "/resume",
    ]
    update = paths[len(paths) - 1 - paths[::-1].index("/pause?mode=keep") :]
    asked, resumed = ["/start_weight_update", "/update_weights", "/finish_weight_update"], update.index("/resume")
    assert update[resumed - 4 : resumed - 1] == asked  # what it serves: before the first token, and again
    assert update[resumed + 1 : resumed + 4] == asked


def test_drift_is_an_error_where_repair_is_not_wanted(server: EngineStub):
    server.failing["prepare"] = ["BaseMismatch"]
    with pytest.raises(ServerError) as caught:
        sync_server(ServerClient(server.url), 7, repair=False)
    assert caught.value.kind is BaseMismatch
    assert server.updates() == [("prepare", 7)]


def test_weights_that_change_again_right_after_a_repair_are_an_error(server: EngineStub):
    server.always["prepare"] = "BaseMismatch"
    failed = only(fleet_of(server).sync(7))
    assert isinstance(failed.error, ServerError)
    assert failed.error.kind is BaseMismatch
    assert [action for action, _ in server.updates()] == ["prepare", "prepare_repair", "repair", "prepare"]


def test_repair_waits_until_the_mirror_can_be_had(server: EngineStub):
    server.failing["prepare_repair"] = [MirrorBusy.__name__]
    repair_server(ServerClient(server.url), timeout_s=LONG_S)
    assert [action for action, _ in server.updates()] == ["prepare_repair", "prepare_repair", "repair"]


def test_repair_that_fails_half_way_leaves_the_server_paused_without_a_version(server: EngineStub):
    server.always |= {"repair": "WeightsUncertain", "check": "WeightsUncertain"}
    with pytest.raises(ServerError) as caught:
        repair_server(ServerClient(server.url))
    assert caught.value.kind is WeightsUncertain
    assert "/resume" not in server.paths()
    assert server.label == "uncertain"
