# SPDX-License-Identifier: Apache-2.0
"""``delta-snapshot verify``: is every byte of a run, or of a server's live weights, what it should be?"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path

import typer

from vllm_delta_snapshot.audit.verify_deep import verify_deep
from vllm_delta_snapshot.audit.verify_run import RunVerification, verify_run
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
from vllm_delta_snapshot.cli.targets import base_or_anchor, find_foreign
from vllm_delta_snapshot.drive.sync import verify_server

__all__ = ["run"]


def run(targets: Sequence[str], base: str | None, *, is_deep: bool, scratch: Path | None, as_json: bool) -> None:
    """Verify a run, or deltas of other tools; print every problem, and exit with 1 if there is one."""
    with reported(as_json=as_json):
        chain = find_foreign(targets)
    if chain is not None:
        if is_deep:
            raise typer.BadParameter("--deep is for runs of this tool; deltas of others are replayed in any case")
        command = f"delta-snapshot verify {shlex.join(targets)}"
        verify_foreign.run(chain, base, command=command, as_json=as_json)
    else:
        _run(targets[0], base, is_deep=is_deep, scratch=scratch, as_json=as_json)


def _run(sync_dir: str, base: str | None, *, is_deep: bool, scratch: Path | None, as_json: bool) -> None:
    title = "proving" if is_deep else "verifying"
    with reported(as_json=as_json), progress_bar(title, as_json=as_json, unit="records") as bar:
        folder = open_run(sync_dir)
        task = bar.add_task("", total=None)

        def progress(done: int, total: int, _: int) -> None:
            bar.update(task, completed=done, total=total)

        if is_deep:
            command = f"delta-snapshot verify --deep {shlex.quote(sync_dir)}"
            newest = folder.newest()
            checkpoint = base_or_anchor(folder, newest, base, command=command, as_json=as_json)
            found = verify_deep(folder, checkpoint, scratch=scratch, progress=progress)
        elif base is not None or scratch is not None:
            raise typer.BadParameter(
                "--base and --scratch go with --deep, or with deltas of SkyRL or OpenRL; else a run is verified "
                "without its base"
            )
        else:
            found = verify_run(folder, progress=progress)
    if as_json:
        print_json(_as_json(found, is_deep=is_deep))
    else:
        _print(found, is_deep=is_deep)
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


def _as_json(found: RunVerification, *, is_deep: bool) -> dict[str, object]:
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
        "is_deep": is_deep,
        "newest_proven": found.newest_proven,
        "not_checked": found.not_checked,
    }


def _print(found: RunVerification, *, is_deep: bool) -> None:
    for problem in found.problems:
        typer.echo(f"version {problem.version}: {problem.error}")
    for name in found.leftovers:
        typer.echo(f"leftover of a publication that was never committed (harmless): {name}", err=True)
    for text in found.not_checked:
        typer.echo(f"not checked: {text}")
    if found.is_ok:
        good = f"{found.versions} versions, newest {found.newest}, {human_bytes(found.payload_bytes)} of payload"
        if found.anchors or found.merged:
            good += f", {found.anchors} anchors, {found.merged} merged deltas"
        if found.pruned:
            good += f", deltas up to version {found.pruned} pruned"
        if is_deep:
            good += f"; the weights recomputed bit by bit up to version {found.newest_proven}"
        typer.echo(f"ok: {good}, run {found.run_id}")
    else:
        damaged = len({problem.version for problem in found.problems})
        typer.echo(f"NOT ok: {damaged} of {found.versions} versions damaged, newest {found.newest}, run {found.run_id}")
