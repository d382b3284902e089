"""A small real HTTP server that answers like vLLM's routes for updates, for drivers; no engine is behind it."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

ROUTES: dict[str, tuple[int, Any]] = {
    "/start_weight_update": (200, {"message": "started"}),
    "/update_weights": (200, {"message": "updated"}),
    "/finish_weight_update": (200, {"message": "finished"}),
    "/weight_info": (200, {"weight_version": "run-1@7"}),
}


class StubServer:
    """Answers as told, and keeps what it was asked."""

    def __init__(self) -> None:
        self.routes: dict[str, Any] = dict(ROUTES)
        self.asked: list[tuple[str, str, Any]] = []
        self.keys: set[str | None] = set()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer()

            def do_POST(self) -> None:
                self._answer()

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                stub.asked.append((self.command, self.path, json.loads(body) if body else None))
                stub.keys.add(self.headers.get("Authorization"))
                answer = stub.routes.get(self.path, (404, {"detail": "Not Found"}))
                status, content = answer(json.loads(body)) if callable(answer) else answer
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
