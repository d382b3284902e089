# SPDX-License-Identifier: Apache-2.0
"""``delta-snapshot repair``: give a server whose weights something else has changed those of its version again."""

from __future__ import annotations

import time

import typer

from vllm_delta_snapshot.cli.output import EXIT_USAGE, print_json, reported
from vllm_delta_snapshot.cli.server import client_of
from vllm_delta_snapshot.drive.sync import repair_server

__all__ = ["run"]


def run(url: str, timeout_s: float, *, as_json: bool) -> None:
    """Repair a server, and exit with 1 if it cannot be done."""
    with reported(as_json=as_json, code=EXIT_USAGE):
        client = client_of(url)
    with reported(as_json=as_json):
        started = time.monotonic()
        repair_server(client, timeout_s=timeout_s)
        label, seconds = client.weight_version(), time.monotonic() - started
    if as_json:
        print_json({"ok": True, "server": url, "label": label, "seconds": round(seconds, 3)})
    else:
        typer.echo(f"ok: all live weights of {url} are those of its version (label {label}), {seconds:.2f} s")
