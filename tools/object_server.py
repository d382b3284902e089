# SPDX-License-Identifier: Apache-2.0
"""Object stores of one's own, for examples, benchmarks and tests: a real server in a process, until it is not needed.

MiniStack, an S3 server that `pip install ministack` brings, is started here; `running` starts any other.
"""

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["S3_ENVIRONMENT", "STORE", "ObjectServer", "free_port", "ministack", "running"]

S3_ENVIRONMENT: Final = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}
"""What a client needs that is to reach such a server, and nothing else by mistake."""
STORE: Final = "DELTA_SNAPSHOT_STORE_"

# MiniStack and moto look into the header for the region, and check nothing.
_AUTHORIZED: Final = (
    "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
)
_READY_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
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
            request = urllib.request.Request(  # noqa: S310 - our own server
                f"{self.url}/{name}", method="PUT", headers={"Authorization": _AUTHORIZED}
            )
        else:
            body = f'{{"name": "{name}"}}'.encode()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(  # noqa: S310 - our own server
                f"{self.url}/storage/v1/b?project=none", body, headers, method="POST"
            )
        with urllib.request.urlopen(request, timeout=30):  # noqa: S310 - our own server
            return name


@contextlib.contextmanager
def ministack(log: Path, host: str = "127.0.0.1") -> Iterator[ObjectServer]:
    """Start MiniStack, which checks conditions and checksums, and stop it afterwards. Blocks until it answers.

    Args:
        log: where its output goes.
        host: the address on which it listens.

    Raises:
        FileNotFoundError: it is not installed beside this Python.
        RuntimeError: it did not start; with the end of its log.
    """
    port = free_port()
    environment = {"BIND_HOST": host, "GATEWAY_PORT": str(port), "SERVICES": "s3"}
    command = [str(Path(sys.executable).with_name("ministack"))]
    with running(command, port, log, environment, host) as (url, process):
        yield ObjectServer("s3", url, S3_ENVIRONMENT | {f"{STORE}ENDPOINT_URL": url}, process)


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def running(
    command: Sequence[str], port: int, log: Path, environment: Mapping[str, str], host: str = "127.0.0.1"
) -> Iterator[tuple[str, int]]:
    """Start a server, wait until it answers HTTP, and kill it afterwards. Yields its URL and its process's id.

    Raises:
        FileNotFoundError: there is no such command.
        RuntimeError: it did not start; with the end of its log.
    """
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
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):  # noqa: S310 - our own server
                return
        except urllib.error.HTTPError:
            return  # it answers
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(log.read_text(errors="replace")[-2000:]) from error
        time.sleep(0.02)
