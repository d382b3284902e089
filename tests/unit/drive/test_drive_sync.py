"""What the driver does with a server that cannot vouch for its weights, and how it asks for an earlier version."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.stub_server import EngineStub, answering
from vllm_delta_snapshot.drive import ServerClient, ServerError, sync_server
from vllm_delta_snapshot.drive.labels import UNCERTAIN_LABEL
from vllm_delta_snapshot.errors import ApplyError, CompatibilityError, WeightsUncertain


@pytest.fixture
def server() -> Iterator[EngineStub]:
    with answering(EngineStub()) as stub:
        yield stub


def failing(kinds: dict[str, str]) -> Any:
    """Return an answer of /update_weights: by action, the class of the error."""

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        kind = kinds.get(body["update_info"]["action"])
        return (500, {"error": {"message": f"it broke [{kind}]"}}) if kind else (200, {})

    return answer


def test_server_that_cannot_undo_stays_paused_and_names_no_version(server: EngineStub) -> None:
    kind = WeightsUncertain.__name__
    server.routes["/update_weights"] = failing({"apply": kind, "check": kind})
    with pytest.raises(ServerError) as caught:
        sync_server(ServerClient(server.url), 7)
    assert caught.value.kind is WeightsUncertain
    assert "/resume" not in server.paths()
    assert ("POST", "/update_weight_version", {"new_version": UNCERTAIN_LABEL}) in server.asked


def test_server_that_undid_is_resumed_and_keeps_its_label(server: EngineStub) -> None:
    server.routes["/update_weights"] = failing({"apply": ApplyError.__name__})
    with pytest.raises(ServerError) as caught:
        sync_server(ServerClient(server.url), 7)
    assert caught.value.kind is ApplyError
    assert server.paths()[-1] == "/resume"
    assert "/update_weight_version" not in server.paths()


@pytest.mark.parametrize("is_meant", [False, True])
def test_going_back_is_asked_for_only_when_it_is_meant(server: EngineStub, is_meant: bool) -> None:
    sync_server(ServerClient(server.url), 7, allow_rollback=is_meant)
    asked = [body["update_info"] for _, path, body in server.asked if path == "/update_weights"]
    assert [info["action"] for info in asked] == ["prepare", "apply"]
    assert all(info["version"] == 7 and info["allow_rollback"] is is_meant for info in asked)


def test_server_with_an_older_plugin_is_the_one_to_upgrade(server: EngineStub) -> None:
    said = "Invalid update_info for DeltaSnapshotWeightTransferEngine: got an unexpected keyword argument 'run'"
    server.routes["/update_weights"] = (500, {"error": {"message": said}})
    with pytest.raises(ServerError, match="older vllm-delta-snapshot than this driver: upgrade it there") as caught:
        sync_server(ServerClient(server.url), 7, run_id="r")
    assert caught.value.kind is CompatibilityError
    assert "/pause?mode=keep" not in server.paths()
    assert server.label == "default"


def test_run_that_a_server_does_not_serve_is_switched_to_only_when_told(server: EngineStub) -> None:
    server.failing["prepare"] = ["RunMismatch", "RunMismatch"]
    with pytest.raises(ServerError):
        sync_server(ServerClient(server.url), 7, run_id="r")
    assert server.label == "default"
    report = sync_server(ServerClient(server.url), 7, run_id="r", state_digest="d", switch_to="/run")
    assert report.is_switched
    assert server.updates()[1:] == [
        ("prepare", 7),
        ("prepare_switch", 7),
        ("switch", 7),
        ("confirm", 7),
        ("confirm", 7),
    ]
    assert server.label == "r@7"


def test_label_that_another_driver_set_meanwhile_is_set_to_what_the_engine_serves(server: EngineStub) -> None:
    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        if body["update_info"]["action"] != "confirm":
            return 200, {}
        return 500, {"error": {"message": "the engine is not at that version, found it serves run-2@9 [OutOfOrder]"}}

    server.routes["/update_weights"] = answer
    with pytest.raises(ServerError, match="serves run-2@9"):
        sync_server(ServerClient(server.url), 7, run_id="r")
    assert server.label == "run-2@9"
    paths = server.paths()
    assert paths.index("/update_weight_version") < paths.index("/resume")  # no token is generated under a wrong label
    assert "/reset_prefix_cache?reset_running_requests=false" in paths[paths.index("/update_weight_version") :]
