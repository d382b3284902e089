# SPDX-License-Identifier: Apache-2.0
"""What a follower tells over HTTP: ``/healthz``, ``/status`` and ``/metrics``. On loopback unless told otherwise.

``/healthz`` answers 200 when the server has caught up and 503 otherwise, so that it can be a readiness probe. It reads
nothing but the follower's state, and nothing can be changed through it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from vllm_delta_snapshot.drive.follow import Follower
from vllm_delta_snapshot.drive.follow_metrics import FollowMetrics
from vllm_delta_snapshot.errors import CompatibilityError, StageError

__all__ = ["serve", "status_of"]

Answer = tuple[int, str, bytes]
"""Status, content type, body."""


def status_of(follower: Follower) -> dict[str, object]:
    """Return what ``/status`` shows."""
    state = follower.state
    return {
        "ready": follower.is_ready,
        "run_id": state.run_id,
        "sync_dir": follower.config.sync_dir,
        "server": follower.server,
        "applied_version": state.applied,
        "newest_version": state.newest,
        "lag_versions": state.lag,
        "acknowledged_version": state.acknowledged,
        "updates": state.updates,
        "failures": state.failures,
        "seconds_since_look": None if state.looked_at is None else round(time.monotonic() - state.looked_at, 3),
        "last_update": None if state.last is None else dataclasses.asdict(state.last),
        "error": None if state.error is None else state.error.to_fields(),
    }


@contextlib.contextmanager
def serve(follower: Follower, metrics: FollowMetrics | None, host: str, port: int) -> Iterator[str]:
    """Answer on threads of its own while the context lasts.

    Args:
        follower: whom it tells of.
        metrics: its metrics; ``None`` where prometheus-client is not installed.
        host: the address to listen on.
        port: the port; 0 for any that is free.

    Yields:
        The URL.

    Raises:
        StageError: the port cannot be had.
    """

    def health() -> Answer:
        status = status_of(follower)
        return (200 if status["ready"] else 503), "application/json", _json(status)

    def exposition() -> Answer:
        if metrics is None:
            error = CompatibilityError(
                "metrics need prometheus-client", hint="pip install 'vllm-delta-snapshot[metrics]'"
            )
            return 501, "text/plain; charset=utf-8", f"{error}\n".encode()
        return 200, *metrics.exposition()

    answers: dict[str, Callable[[], Answer]] = {
        "/healthz": health,
        "/status": lambda: (200, "application/json", _json(status_of(follower))),
        "/metrics": exposition,
    }

    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0  # of a client that says nothing

        def do_GET(self) -> None:
            """Answer one of the three."""
            answer = answers.get(self.path.partition("?")[0])
            if answer is None:
                paths = " ".join(answers)
                code, kind, body = 404, "text/plain; charset=utf-8", f"there is only {paths}\n".encode()
            else:
                code, kind, body = answer()
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing: probes come every few seconds."""

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise StageError(
            "cannot listen", file=f"{host}:{port}", found=error, hint="Choose another port: --listen HOST:PORT"
        ) from error
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="delta-snapshot-http", daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _json(value: object) -> bytes:
    return json.dumps(value, indent=1).encode() + b"\n"
