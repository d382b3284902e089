# SPDX-License-Identifier: Apache-2.0
"""``delta-snapshot verify``: is every byte of a run, or of a server's live weights, what it should be?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import typer

from vllm_delta_snapshot.cli import verify_foreign
from vllm_delta_snapshot.cli.output import (
    EXIT_PROBLEM,
    EXIT_USAGE,
    human_bytes,
    open_run,
    print_json,
    progress_bar,
    reported,
)
from vllm_delta_snapshot.cli.server import client_of
from vllm_delta_snapshot.cli.targets import find_foreign
from vllm_delta_snapshot.drive.sync import verify_server
from vllm_delta_snapshot.verify_run import RunVerification, verify_run

__all__ = ["run"]


def run(targets: Sequence[str], base: Path | None, *, as_json: bool) -> None:
    """Verify a run, or deltas of other tools; print every problem, and exit with 1 if there is one."""
    with reported(as_json=as_json):
        chain = find_foreign(targets)
    if chain is not None:
        command = f"delta-snapshot verify {' '.join(targets)}"
        verify_foreign.run(chain, base, command=command, as_json=as_json)
    else:
        _run(targets[0], base, as_json=as_json)


def _run(sync_dir: str, base: Path | None, *, as_json: bool) -> None:
    with reported(as_json=as_json), progress_bar("verifying", as_json=as_json) as bar:
        folder = open_run(sync_dir)
        if base is not None:
            raise typer.BadParameter("--base goes with deltas of SkyRL or OpenRL; a run is verified without it")
        task = bar.add_task("", total=None)
        found = verify_run(folder, progress=lambda done, total, _: bar.update(task, completed=done, total=total))
    if as_json:
        print_json(_as_json(found))
    else:
        _print(found)
    if not found.is_ok:
        raise typer.Exit(EXIT_PROBLEM)


def run_server(url: str, version: int | None, *, as_json: bool) -> None:
    """Have a server compare its live weights, and exit with 1 if any differs."""
    with reported(as_json=as_json, code=EXIT_USAGE):
        client = client_of(url)
    with reported(as_json=as_json):
        started = time.monotonic()
        verify_server(client, version)
        label, seconds = client.weight_version(), time.monotonic() - started
    if as_json:
        print_json({"ok": True, "server": url, "label": label, "version": version, "seconds": round(seconds, 3)})
    else:
        compared = "its version" if version is None else f"version {version}"
        typer.echo(f"ok: all live weights of {url} are those of {compared} (label {label}), {seconds:.2f} s")


def _as_json(found: RunVerification) -> dict[str, object]:
    return {
        "ok": found.is_ok,
        "run_id": found.run_id,
        "versions": found.versions,
        "newest_version": found.newest,
        "payload_bytes": found.payload_bytes,
        "changed_elements": found.changed_elements,
        "problems": [{"version": problem.version, **problem.error.to_fields()} for problem in found.problems],
        "leftovers": found.leftovers,
        "pruned_up_to": found.pruned,
        "anchors": found.anchors,
        "merged": found.merged,
    }


def _print(found: RunVerification) -> None:
    for problem in found.problems:
        typer.echo(f"version {problem.version}: {problem.error}")
    for name in found.leftovers:
        typer.echo(f"leftover of a publication that was never committed (harmless): {name}", err=True)
    if found.is_ok:
        good = f"{found.versions} versions, newest {found.newest}, {human_bytes(found.payload_bytes)} of payload"
        if found.anchors or found.merged:
            good += f", {found.anchors} anchors, {found.merged} merged deltas"
        if found.pruned:
            good += f", deltas up to version {found.pruned} pruned"
        typer.echo(f"ok: {good}, run {found.run_id}")
    else:
        damaged = len({problem.version for problem in found.problems})
        typer.echo(f"NOT ok: {damaged} of {found.versions} versions damaged, newest {found.newest}, run {found.run_id}")
