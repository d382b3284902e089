"""Small real HTTP servers that answer like vLLM's routes for updates, for drivers; no engine is behind them."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, TypeVar

Answer = tuple[int, Any]

ROUTES: dict[str, Answer] = {
    "/start_weight_update": (200, {"message": "started"}),
    "/update_weights": (200, {"message": "updated"}),
    "/finish_weight_update": (200, {"message": "finished"}),
    "/weight_info": (200, {"weight_version": "run-1@7"}),
}


class StubServer:
    """Answers as told, and keeps what it was asked.

    Attributes:
        routes: by path, the answer, or a function that makes it from the body; ``None`` is to hang up without one.
        asked: method, path and body of each request.
        keys: what was sent to authorize a request.
        is_gone: whether it hangs up on everybody.
    """

    def __init__(self) -> None:
        self.routes: dict[str, Any] = dict(ROUTES)
        self.asked: list[tuple[str, str, Any]] = []
        self.keys: set[str | None] = set()
        self.is_gone = False
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer()

            def do_POST(self) -> None:
                self._answer()

            def _answer(self) -> None:
                data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                body = json.loads(data) if data else None
                stub.asked.append((self.command, self.path, body))
                stub.keys.add(self.headers.get("Authorization"))
                answer = stub.routes.get(self.path, (404, {"detail": "Not Found"}))
                answer = None if stub.is_gone else answer(body) if callable(answer) else answer
                if answer is None:
                    return
                status, content = answer
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def refuse(self, path: str, status: int, message: str) -> None:
        self.routes[path] = (status, {"error": {"message": message, "type": "InternalServerError", "code": status}})

    def paths(self) -> list[str]:
        return [path for _, path, _ in self.asked]


class EngineStub(StubServer):
    """Answers to drivers as an engine would: it has a label and must be initialized, and fails as told.

    Attributes:
        label: the version label that it shows.
        is_initialized: whether it follows a run.
        failing: by action of `update_weights`, the names of the errors of the next calls; ``None`` is no error.
        always: by action, the name of the error of every call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.label = "default"
        self.is_initialized = True
        self.failing: dict[str, list[str | None]] = {}
        self.always: dict[str, str] = {}
        for path in ("/health", "/resume", "/reset_mm_cache", "/reset_encoder_cache"):
            self.routes[path] = (200, {})
        for mode in ("keep", "wait", "abort"):
            self.routes[f"/pause?mode={mode}"] = (200, {})
        for flag in ("false", "true"):
            self.routes[f"/reset_prefix_cache?reset_running_requests={flag}"] = (200, {"success": True})
        self.routes["/init_weight_transfer_engine"] = self._init
        self.routes["/update_weights"] = self._update
        self.routes["/finish_weight_update"] = self._finish
        self.routes["/update_weight_version"] = self._set_label
        self.routes["/weight_info"] = lambda _: (200, {"weight_version": self.label})

    def restart(self) -> None:
        """Be as after a start."""
        self.label, self.is_initialized = "default", False

    def updates(self) -> list[tuple[str, int | None]]:
        """Return action and version of each call of `update_weights`."""
        infos = [body["update_info"] for _, path, body in self.asked if path == "/update_weights"]
        return [(info["action"], info.get("version")) for info in infos]

    def applied(self) -> list[int | None]:
        """Return the versions that were applied, in order."""
        return [version for action, version in self.updates() if action == "apply"]

    def _init(self, body: Any) -> Answer:
        self.is_initialized = True
        return 200, {}

    def _update(self, body: Any) -> Answer:
        action = body["update_info"]["action"]
        planned = self.failing.get(action)
        kind = planned.pop(0) if planned else self.always.get(action)
        if not self.is_initialized:
            kind = "NotInitialized"
        return (500, {"error": {"message": f"it broke [{kind}]"}}) if kind else (200, {})

    def _finish(self, body: Any) -> Answer:
        if body and "weight_version" in body:
            self.label = body["weight_version"]
        return 200, {}

    def _set_label(self, body: Any) -> Answer:
        self.label = body["new_version"]
        return 200, {}


S = TypeVar("S", bound=StubServer)


@contextlib.contextmanager
def answering(stub: S) -> Iterator[S]:
    """Have a stub answer, on a thread of its own."""
    thread = threading.Thread(target=stub.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield stub
    finally:
        stub.http.shutdown()
        thread.join()
        stub.http.server_close()
