"""A proxy in front of a real object store that does to chosen requests what networks and busy stores do.

Real bytes over real sockets: a request is read whole, sent on to the server or not, and its answer cut, bent, delayed
or kept back. Requests that no fault is for pass as they are.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from tests.support.object_stores import ObjectServer


class Harm(Enum):
    """What happens to a request."""

    LOSE_REPLY = "the server does it, and its answer is lost"
    CUT_REQUEST = "the connection is cut in the middle of the request's body"
    CUT_REPLY = "the connection is cut in the middle of the answer's body"
    SHORTEN = "the answer's body is too short, and its length says the same"
    CORRUPT = "one byte of the answer's body is another"
    REFUSE = "the answer is an error, and the server is not asked"
    PAGE = "the answer is a page of HTML that says 200, and the server is not asked"
    WHOLE = "a request for a range is answered with all of the object, and 200"
    GZIP = "the answer's body is compressed"
    STALL = "no answer ever comes"
    STALL_REPLY = "the answer stops in the middle of its body"
    DRIP = "the answer's body comes slowly"


@dataclass(frozen=True)
class Fault:
    """A harm, and whom it is done to.

    Attributes:
        harm: see `Harm`.
        where: a pattern, searched in "METHOD unquoted-path" and, on lines of their own, in the first bytes of the body.
        times: how often it is done; after that requests pass.
        status: of REFUSE.
        code: of REFUSE, as the store spells its reasons.
        said: of REFUSE, the store's text.
        body: of REFUSE, the whole of the answer instead.
        headers: of REFUSE.
    """

    harm: Harm
    where: str
    times: int = 1
    status: int = 503
    code: str = "SlowDown"
    said: str = "injected"
    body: str | None = None
    headers: tuple[tuple[str, str], ...] = ()


@dataclass
class FaultProxy:
    """See the module.

    Attributes:
        server: the store behind it, reached through it.
        log: when each request came, and its first line.
        done: how many requests were harmed.
    """

    server: ObjectServer
    log: list[tuple[float, str]] = field(default_factory=list)
    done: int = 0
    faults: dict[Fault, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def inject(self, *faults: Fault) -> None:
        """Do this from now on, and nothing else; without arguments, nothing."""
        with self.lock:
            self.faults = {fault: fault.times for fault in faults}
            self.log.clear()
            self.done = 0

    def times_of(self, where: str) -> list[float]:
        """Return when requests came whose first line matches."""
        return [at for at, line in self.log if re.search(where, line)]

    def harm_of(self, line: str, body: bytes) -> Fault | None:
        """Log a request; return what is to be done to it, if anything."""
        text = f"{line}\n{body[:600].decode(errors='replace')}"
        with self.lock:
            self.log.append((time.monotonic(), line))
            for fault, left in self.faults.items():
                if left and re.search(fault.where, text):
                    self.faults[fault] = left - 1
                    self.done += 1
                    return fault
        return None


@contextlib.contextmanager
def fault_proxy(server: ObjectServer) -> Iterator[FaultProxy]:
    """Start a proxy in front of a server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as listener:
        listener.daemon_threads = True
        url = f"http://127.0.0.1:{listener.server_address[1]}"
        environment = {name: url if value == server.url else value for name, value in server.environment.items()}
        listener.proxy = FaultProxy(replace(server, url=url, environment=environment))
        listener.behind = server.url
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield listener.proxy
        finally:
            listener.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self._upstream: http.client.HTTPConnection | None = None

    def finish(self) -> None:
        with contextlib.suppress(OSError):
            super().finish()
        if self._upstream is not None:
            self._upstream.close()

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            super().handle()

    def log_message(self, *args: object) -> None:
        """Say nothing."""

    def _serve(self) -> None:
        proxy: FaultProxy = self.server.proxy
        length = int(self.headers.get("Content-Length") or 0)
        line = f"{self.command} {unquote(self.path)}"
        peeked = self.rfile.peek(600)[:600] if length else b""
        fault = proxy.harm_of(line, peeked)
        harm = fault.harm if fault else None
        if harm is Harm.CUT_REQUEST:
            self._send_half(self.rfile.read(length // 2))
            return
        body = self.rfile.read(length)
        if harm is Harm.STALL:
            self._wait_for_the_end()
        elif fault and harm is Harm.REFUSE:
            self._refuse(fault)
        elif harm is Harm.PAGE:
            self._send(200, [("Content-Type", "text/html; charset=utf-8")], b"<html>Please log in.</html>" * 9)
        else:
            self._pass_on(harm, body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815

    def _pass_on(self, harm: Harm | None, body: bytes) -> None:
        if harm is Harm.WHOLE:
            del self.headers["Range"]
        status, headers, data = self._ask(body)
        if harm is Harm.LOSE_REPLY:
            self._cut()
            return
        size = len(data)
        if harm is Harm.GZIP:
            data = gzip.compress(data)
            size = len(data)
            headers = [*headers, ("Content-Encoding", "gzip")]
        elif harm is Harm.SHORTEN:
            data = data[: size // 2]
            size = len(data)
        elif harm is Harm.CORRUPT:
            data = data[: size // 2] + bytes([data[size // 2] ^ 1]) + data[size // 2 + 1 :]
        self._send_head(status, headers, size)
        if harm in (Harm.CUT_REPLY, Harm.STALL_REPLY):
            self.wfile.write(data[: size // 2])
            self.wfile.flush()
            self._cut() if harm is Harm.CUT_REPLY else self._wait_for_the_end()
        elif harm is Harm.DRIP:
            step = max(1, size // 8)
            for first in range(0, size, step):
                self.wfile.write(data[first : first + step])
                self.wfile.flush()
                time.sleep(0.05)
        elif self.command != "HEAD":
            self.wfile.write(data)

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        """Send the request on and return the whole answer."""
        if self._upstream is None:
            self._upstream = http.client.HTTPConnection(urlsplit(self.server.behind).netloc, timeout=60)
        self._send_request(self._upstream, body, len(body))
        answer = self._upstream.getresponse()
        data = answer.read()
        mine = self.server.proxy.server.url
        kept = [
            (name, value.replace(self.server.behind, mine))
            for name, value in answer.getheaders()
            if name.lower() not in ("connection", "transfer-encoding", "keep-alive", "date", "server")
        ]
        return answer.status, kept, data

    def _send_request(self, upstream: http.client.HTTPConnection, body: bytes, length: int) -> None:
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        upstream.putheader("Host", urlsplit(self.server.behind).netloc)
        for name, value in self.headers.items():
            if name.lower() not in ("host", "connection", "expect", "content-length"):
                upstream.putheader(name, value)
        if length or self.command in ("PUT", "POST"):
            upstream.putheader("Content-Length", str(length))
        upstream.endheaders()
        if body:
            upstream.send(body)

    def _send_half(self, half: bytes) -> None:
        """Let the server see half of a body, as much as came through, and cut both connections."""
        upstream = http.client.HTTPConnection(urlsplit(self.server.behind).netloc, timeout=60)
        self._send_request(upstream, half, int(self.headers["Content-Length"]))
        upstream.close()
        self._cut()

    def _send_head(self, status: int, headers: list[tuple[str, str]], size: int) -> None:
        self.send_response_only(status)
        lengths = [value for name, value in headers if name.lower() == "content-length"]
        for name, value in headers:
            if name.lower() != "content-length":
                self.send_header(name, value)
        is_bodiless = self.command == "HEAD" or status in (204, 304)
        if status not in (204, 304):
            self.send_header("Content-Length", lengths[0] if is_bodiless and lengths else str(size))
        self.end_headers()

    def _refuse(self, fault: Fault) -> None:
        if self.server.proxy.server.scheme == "s3":
            text = f"<Error><Code>{fault.code}</Code><Message>{fault.said}</Message></Error>"
            kind = "application/xml"
        else:
            error = {"code": fault.status, "message": f"{fault.said} {fault.code}", "errors": [{"reason": fault.code}]}
            text, kind = json.dumps({"error": error}), "application/json"
        self._send(fault.status, [("Content-Type", kind), *fault.headers], (fault.body or text).encode())

    def _send(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self._send_head(status, headers, len(body))
        if self.command != "HEAD":
            self.wfile.write(body)

    def _wait_for_the_end(self) -> None:
        """Say nothing until the client hangs up."""
        with contextlib.suppress(OSError):
            while self.connection.recv(1 << 16):
                pass
        self.close_connection = True

    def _cut(self) -> None:
        """End the connection at once: the client gets a reset, not an orderly end."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True
