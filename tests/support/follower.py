"""``delta-snapshot follow`` in a process of its own, and a gate before a server where it can be met at any request."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.support.waiting import eventually
from vllm_delta_snapshot.drive import ServerClient

Moment = tuple[str, str]
"""``before`` or ``after`` the server did what it was asked to, and what that is (see `_name_of`)."""

Act = Callable[[], bool]
"""Returns whether what was asked still gets to the server; only asked ``before``."""


class FollowerProcess:
    """A follower, started as the console script starts it, in a session of its own.

    Args:
        sync_dir: the run's folder.
        url: the server.
        log: where it writes; must not exist.
        options: further ones.
    """

    def __init__(self, sync_dir: Path | str, url: str, log: Path, *options: str) -> None:
        self._log = log
        with log.open("xb") as output:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-c", "from vllm_delta_snapshot.cli import main; main()", "follow"),
                    *("--sync-dir", str(sync_dir), "--server", url, "--listen", "127.0.0.1:0", *options),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.url = ""

    def wait_listening(self) -> None:
        """Wait until it has said where it answers."""
        eventually(
            lambda: re.search(r"(http://127\.0\.0\.1:\d+)/healthz", self.log) or self._process.poll() is not None
        )
        found = re.search(r"(http://127\.0\.0\.1:\d+)/healthz", self.log)
        assert found, self.log
        self.url = found[1]

    @property
    def pid(self) -> int:
        """Its process, and its session."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    @property
    def log(self) -> str:
        """What it has written so far."""
        return self._log.read_text(errors="replace")

    def get(self, path: str) -> tuple[int, str]:
        """Return status and body of one of its pages."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    @property
    def is_ready(self) -> bool:
        """What its readiness probe says."""
        code, _ = self.get("/healthz")
        assert code in (200, 503)
        return code == 200

    def status(self) -> dict[str, Any]:
        """Return its status."""
        code, body = self.get("/status")
        assert code == 200
        return dict(json.loads(body))

    def children(self) -> list[int]:
        """Return its living child processes."""
        tasks = Path(f"/proc/{self.pid}/task").glob("*/children")
        return [int(child) for task in tasks for child in task.read_text().split()]

    def terminate(self) -> None:
        """Ask it to stop."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill all its processes at once. Nothing happens if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Wait until it has ended; return its exit status."""
        return self._process.wait(60)


@contextlib.contextmanager
def follower(sync_dir: Path | str, url: str, log: Path, *options: str) -> Iterator[FollowerProcess]:
    """Start a follower, wait until it answers, and see that it has ended afterwards."""
    process = FollowerProcess(sync_dir, url, log, *options)
    try:
        process.wait_listening()
        yield process
    finally:
        process.kill()
        process.wait()


class Gate:
    """Stands before a server, hands on what it is asked, and acts once at a given moment.

    Args:
        client: the server.
    """

    def __init__(self, client: ServerClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._moment: Moment | None = None
        self._act: Act = lambda: True
        self.acted = threading.Event()
        gate = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                gate._hand_on(self)

            def do_POST(self) -> None:
                gate._hand_on(self)

            def log_message(self, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def arm(self, moment: Moment, act: Act) -> None:
        """Act at the next such moment. The asker waits meanwhile."""
        with self._lock:
            self.acted.clear()
            self._moment, self._act = moment, act

    def _pass(self, moment: Moment) -> bool:
        with self._lock:
            if moment != self._moment:
                return True
            self._moment = None
        goes_on = self._act()
        self.acted.set()
        return goes_on

    def _hand_on(self, handler: BaseHTTPRequestHandler) -> None:
        content = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        name = _name_of(handler.path, content)
        if not self._pass(("before", name)):
            return
        target = http.client.HTTPConnection(self._client.url.removeprefix("http://"), timeout=120)
        with contextlib.closing(target):
            target.request(handler.command, handler.path, content, {"Content-Type": "application/json"})
            response = target.getresponse()
            answer = response.read()
        self._pass(("after", name))
        with contextlib.suppress(OSError):  # whoever asked is dead
            handler.send_response(response.status)
            handler.send_header("Content-Length", str(len(answer)))
            handler.end_headers()
            handler.wfile.write(answer)

    def __enter__(self) -> Gate:
        threading.Thread(target=self._http.serve_forever, name="gate", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()


def _name_of(path: str, content: bytes) -> str:
    """Return the action of an update, ``label`` for the end of one that sets it, or the path without its slash."""
    body = json.loads(content) if content else {}
    if "update_info" in body:
        return str(body["update_info"]["action"])
    return "label" if "weight_version" in body else path.partition("?")[0].strip("/")
