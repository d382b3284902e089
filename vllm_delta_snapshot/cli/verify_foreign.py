# SPDX-License-Identifier: Apache-2.0
"""``delta-snapshot verify FOLDER... --base BASE``: are deltas of SkyRL or OpenRL what they should be?"""

from __future__ import annotations

from pathlib import Path

import typer

from vllm_delta_snapshot.cli.output import EXIT_PROBLEM, human_bytes, print_json, progress_bar, reported
from vllm_delta_snapshot.cli.targets import base_of_chain
from vllm_delta_snapshot.interop.chain import ForeignChain
from vllm_delta_snapshot.interop.verify import ForeignVerification, verify_chain

__all__ = ["run"]


def run(chain: ForeignChain, base: str | None, *, command: str, as_json: bool) -> None:
    """Verify, print every problem and what could not be checked, and exit with 1 if there is a problem."""
    with reported(as_json=as_json), progress_bar("verifying", as_json=as_json) as bar:
        checkpoint = base_of_chain(base, command=command, as_json=as_json)
        task = bar.add_task("", total=None)
        found = verify_chain(
            chain, checkpoint, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    if as_json:
        print_json(_as_json(found, checkpoint.folder))
    else:
        _print(found)
    if not found.is_ok:
        raise typer.Exit(EXIT_PROBLEM)


def _as_json(found: ForeignVerification, base: Path) -> dict[str, object]:
    return {
        "ok": found.is_ok,
        "kind": found.kind,
        "base": str(base),
        "deltas": found.deltas,
        "newest_version": found.version,
        "payload_bytes": found.payload_bytes,
        "changed_elements": found.changed_elements,
        "problems": [
            {"version": problem.delta.version, "folder": str(problem.delta.folder), **problem.error.to_fields()}
            for problem in found.problems
        ],
        "not_checked": found.not_checked,
    }


def _print(found: ForeignVerification) -> None:
    for problem in found.problems:
        typer.echo(f"{problem.delta}: {problem.error}")
    for text in found.not_checked:
        typer.echo(f"not checked: {text}")
    what = found.kind if found.version is None else f"{found.kind}, newest version {found.version}"
    if found.is_ok:
        typer.echo(f"ok: {found.deltas} deltas ({what}), {human_bytes(found.payload_bytes)} of payload")
    else:
        damaged = len({problem.delta.folder for problem in found.problems})
        typer.echo(f"NOT ok: {damaged} of {found.deltas} deltas damaged ({what})")
