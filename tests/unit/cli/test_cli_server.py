"""``verify --server`` against a small real HTTP server that answers like vLLM."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from tests.support.cli import Outcome, documented_fields
from tests.support.stub_server import StubServer, answering

DIFFERENT = (
    "live weights are not those of version 7: tensor model.layers.0.attn.weight, expected digest 01, found digest 02; "
    "tensor model.norm.weight, expected digest 03, found digest 04 [VerifyError]"
)
KEY = "sk-very-secret"
forms = pytest.mark.parametrize("form", [(), ("--json",)], ids=["text", "json"])


@pytest.fixture
def server() -> Iterator[StubServer]:
    with answering(StubServer()) as stub:
        yield stub


@pytest.fixture(autouse=True)
def api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)


def call(*args: object) -> Outcome:
    """Verify, and look for the key wherever something was said."""
    outcome = Outcome("verify", *args)
    assert "secret" not in outcome.stdout + outcome.stderr
    return outcome


@pytest.mark.parametrize("version", [None, 0, 7])
def test_good_server_has_the_documented_fields_and_was_asked_to_verify(server: StubServer, version: int | None):
    given = () if version is None else ("--version", version)
    outcome = call("--server", server.url, "--json", *given)
    outcome.assert_ok()
    found = outcome.json
    assert set(found) == documented_fields("`verify --server`") | {"ok"}
    assert found.pop("seconds") >= 0
    assert found == {"ok": True, "server": server.url, "label": "run-1@7", "version": version}
    labelled = {"version": 7, "run": "run-1", "action": "confirm"}
    info = {"version": 7 if version is None else version, "run": "run-1", "action": "verify", "timeout_s": 600.0}
    assert server.asked == [
        ("GET", "/weight_info", None),
        ("POST", "/start_weight_update", None),
        ("POST", "/update_weights", {"update_info": labelled}),
        ("POST", "/update_weights", {"update_info": info}),
        ("POST", "/finish_weight_update", None),
        ("GET", "/weight_info", None),
    ]


def test_good_server_is_named_with_its_label(server: StubServer):
    outcome = call("--server", f"{server.url}/")
    outcome.assert_ok()
    assert outcome.stdout.startswith(
        f"ok: all live weights of {server.url}/ are those of its version (label run-1@7), "
    )
    assert "of version 7 (label" in call("--server", server.url, "--version", 7).stdout


@forms
def test_weights_that_differ_exit_with_1_and_name_the_tensors(server: StubServer, form: tuple[str, ...]):
    server.refuse("/update_weights", 500, DIFFERENT)
    outcome = call("--server", server.url, *form)
    message = outcome.assert_failed(1, "ServerError")
    assert "model.layers.0.attn.weight" in message
    assert "model.norm.weight" in message
    assert "the server answered 500" in message
    assert bool(outcome.stdout) == bool(form)
    if form:
        assert outcome.json["error"]["found"] == DIFFERENT


def test_session_is_closed_after_a_refusal_too(server: StubServer):
    server.refuse("/update_weights", 500, DIFFERENT)
    server.refuse("/finish_weight_update", 400, "no update was started")
    assert "model.norm.weight" in call("--server", server.url).assert_failed(1, "ServerError")
    assert server.paths() == ["/weight_info", "/start_weight_update", "/update_weights", "/finish_weight_update"]


@forms
def test_server_without_the_routes_names_the_switch(server: StubServer, form: tuple[str, ...]):
    server.routes.clear()
    message = call("--server", server.url, *form).assert_failed(1, "ServerError")
    assert "VLLM_SERVER_DEV_MODE=1" in message
    assert server.paths() == ["/weight_info"]


@forms
def test_answer_that_is_no_json_is_a_problem(server: StubServer, form: tuple[str, ...]):
    server.routes["/weight_info"] = (200, b"<html>a proxy</html>")
    assert "not JSON" in call("--server", server.url, *form).assert_failed(1, "ServerError")


@forms
def test_no_server_there_is_a_problem(form: tuple[str, ...]):
    with contextlib.closing(socket.socket()) as bound:  # taken, but nobody listens
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        outcome = call("--server", url, *form)
    message = outcome.assert_failed(1, "ServerError")
    assert message.startswith(f"the server does not answer: file GET {url}/weight_info")
    assert bool(outcome.stdout) == bool(form)


@forms
@pytest.mark.parametrize("url", ["ftp://host", "localhost:8000", "http://", "http://host:port", "http://[::1"])
def test_url_that_is_no_servers_is_wrong_usage(url: str, form: tuple[str, ...]):
    outcome = call("--server", url, *form)
    assert f"expected http://host:port, found {url}" in outcome.assert_failed(2, "ServerError")
    assert bool(outcome.stdout) == bool(form)


@pytest.mark.parametrize("key", [KEY, f"{KEY}\n"])
def test_key_is_sent_as_a_bearer_token(server: StubServer, monkeypatch: pytest.MonkeyPatch, key: str):
    monkeypatch.setenv("VLLM_API_KEY", key)
    call("--server", server.url).assert_ok()
    assert server.keys == {f"Bearer {KEY}"}


@pytest.mark.parametrize("key", [None, ""])
def test_no_key_sends_none(server: StubServer, monkeypatch: pytest.MonkeyPatch, key: str | None):
    monkeypatch.delenv("VLLM_API_KEY")
    if key is not None:
        monkeypatch.setenv("VLLM_API_KEY", key)
    call("--server", server.url).assert_ok()
    assert server.keys == {None}


def test_key_that_is_refused_is_not_shown(server: StubServer):
    server.refuse("/start_weight_update", 401, "Unauthorized")
    assert "the server answered 401" in call("--server", server.url, "--json").assert_failed(1, "ServerError")


@forms
@pytest.mark.parametrize("key", ["secret\nX-Other: 1", "secr\u00e9t-secret"])
def test_key_that_no_header_can_carry_is_wrong_usage_and_not_shown(
    server: StubServer, monkeypatch: pytest.MonkeyPatch, key: str, form: tuple[str, ...]
):
    monkeypatch.setenv("VLLM_API_KEY", key)
    assert "VLLM_API_KEY" in call("--server", server.url, *form).assert_failed(2, "ServerError")
    assert server.asked == []


@forms
def test_both_or_neither_of_run_and_server_are_wrong_usage(form: tuple[str, ...]):
    for args in ((), ("run", "--server", "http://127.0.0.1:1")):
        assert "give either SYNC_DIR or --server URL" in call(*args, *form).usage


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("run", "--version", "2"), "--version goes with --server"),
        (("--server", "http://127.0.0.1:1", "--version", "-1"), "Invalid value for '--version'"),
        (("--server", "http://127.0.0.1:1", "--version", "new"), "Invalid value for '--version'"),
    ],
)
def test_version_of_no_server_or_no_number_is_wrong_usage(args: tuple[str, ...], said: str):
    assert said in call(*args).usage
