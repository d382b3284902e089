# SPDX-License-Identifier: Apache-2.0
"""``delta-snapshot follow``: keep the server beside it at the versions of a run, until it is told to stop."""

from __future__ import annotations

import logging
import signal
import socket
import sys
import threading
import urllib.parse

import typer

from vllm_delta_snapshot.cli.output import EXIT_USAGE, print_json, reported
from vllm_delta_snapshot.cli.server import client_of
from vllm_delta_snapshot.drive.follow import FollowConfig, Follower
from vllm_delta_snapshot.drive.follow_http import serve, status_of
from vllm_delta_snapshot.drive.follow_metrics import FollowMetrics
from vllm_delta_snapshot.errors import CompatibilityError
from vllm_delta_snapshot.runs.acks import check_sampler
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import open_store

__all__ = ["run"]


def run(
    config: FollowConfig, url: str, *, listen: str | None, sampler: str | None, acknowledges: bool, as_json: bool
) -> None:
    """Follow until SIGTERM or SIGINT; then print where it was. Exits with 2 if it cannot begin."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with reported(as_json=as_json, code=EXIT_USAGE):
        client = client_of(url)
        client.timeout_s = config.request_timeout_s
        name = check_sampler(sampler or f"{socket.gethostname()}-{_port_of(url)}") if acknowledges else None
        folder = RunFolder(open_store(config.sync_dir))
        config = config.model_copy(update={"sync_dir": folder.store.uri})  # the server has another working directory
        metrics = _metrics()
        follower = Follower(config, client, folder, sampler=name, observer=metrics)
        if metrics is not None:
            metrics.watch(follower)
        host, port = _address(listen)
        if host is None:
            follower.run(stop)
        else:
            with serve(follower, metrics, host, port) as at:
                typer.echo(f"{at}/healthz /status /metrics", err=True)
                follower.run(stop)
    if as_json:
        print_json({"ok": True, **status_of(follower)})


def _metrics() -> FollowMetrics | None:
    try:
        return FollowMetrics()
    except CompatibilityError as error:
        logging.getLogger(__name__).warning("%s", error)
        return None


def _address(listen: str | None) -> tuple[str | None, int]:
    if listen is None:
        return None, 0
    host, _, port = listen.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise typer.BadParameter(f"{listen!r} is not HOST:PORT", param_hint="--listen")
    return host.strip("[]") or "127.0.0.1", int(port)


def _port_of(url: str) -> int:
    parts = urllib.parse.urlsplit(url)
    return parts.port or (443 if parts.scheme == "https" else 80)
