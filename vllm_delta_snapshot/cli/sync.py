# SPDX-License-Identifier: Apache-2.0
"""``delta-snapshot sync``: bring servers to a version of a run, side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import typer

from vllm_delta_snapshot.cli.output import (
    EXIT_PROBLEM,
    EXIT_USAGE,
    open_run,
    print_json,
    print_table,
    progress_bar,
    reported,
)
from vllm_delta_snapshot.cli.server import client_of
from vllm_delta_snapshot.drive.client import PauseMode
from vllm_delta_snapshot.drive.fleet import DeltaSync, FleetReport, ServerReport
from vllm_delta_snapshot.host.area import stagers_of

__all__ = ["run"]


def run(
    sync_dir: str,
    version: int | None,
    urls: Sequence[str],
    *,
    pause_mode: PauseMode,
    timeout_s: float,
    allow_rollback: bool,
    switch_run: bool,
    as_json: bool,
) -> None:
    """Sync, print a line for each server, and exit with 1 if one failed."""
    with reported(as_json=as_json, code=EXIT_USAGE):
        clients = [client_of(url) for url in urls]
    with reported(as_json=as_json):
        folder = open_run(sync_dir)
        run_id = folder.read_run().run_id
        wanted = folder.newest() if version is None else version
        state_digest = folder.state_digest(wanted)
        fleet = DeltaSync(
            clients,
            sync_dir=folder.store.uri,
            pause_mode=pause_mode,
            stage_timeout_s=timeout_s,
            switch_run=switch_run,
        )

        def fetched() -> int:
            return sum(state.fetched_bytes for state in stagers_of(folder.store.uri))

        # Bytes are those that stagers on this machine fetch; what other hosts fetch is not seen from here.
        with progress_bar("syncing", as_json=as_json, unit="servers", moved=fetched) as bar:
            bar.add_task("", total=None)
            report = fleet.sync(wanted, run_id=run_id, state_digest=state_digest, allow_rollback=allow_rollback)
    if as_json:
        print_json(_as_json(report))
    else:
        _print(report)
    if not report.ok:
        raise typer.Exit(EXIT_PROBLEM)


def _as_json(report: FleetReport) -> dict[str, object]:
    return {
        "ok": report.ok,
        "version": report.version,
        "servers": [
            {
                "server": of.server,
                "ok": of.ok,
                "attempts": of.attempts,
                "seconds": round(of.seconds, 3),
                "update": None if of.update is None else dataclasses.asdict(of.update),
                "error": None if of.error is None else of.error.to_fields(),
            }
            for of in report.servers
        ],
    }


def _print(report: FleetReport) -> None:
    rows = [_row(of) for of in report.servers]
    print_table(("server", "version", "staged s", "paused s", "applied s", "resumed s"), rows)
    for of in report.failed:
        typer.echo(f"{of.server}: {of.error}", err=True)


def _row(of: ServerReport) -> tuple[object, ...]:
    if of.update is None:
        return of.server, "FAILED", "-", "-", "-", "-"
    seconds = (of.update.stage_s, of.update.pause_s, of.update.apply_s, of.update.resume_s)
    return of.server, of.update.version, *(f"{value:.3f}" for value in seconds)
