# SPDX-License-Identifier: Apache-2.0
"""``delta-snapshot materialize``: a version of a run, or what deltas of other tools lead to, as a plain checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import typer

from vllm_delta_snapshot.cli.output import print_json, progress_bar, reported
from vllm_delta_snapshot.cli.targets import base_of_chain, base_or_anchor, find_foreign, open_run_at
from vllm_delta_snapshot.interop.chain import ForeignChain
from vllm_delta_snapshot.interop.materialize import materialize_chain
from vllm_delta_snapshot.runs.materialize import materialize

__all__ = ["run"]


def run(targets: Sequence[str], out: Path, base: str | None, *, as_json: bool) -> None:
    """Materialize and say where it is."""
    with reported(as_json=as_json):
        chain = find_foreign(targets)
    command = f"delta-snapshot materialize {' '.join(targets)} {out}"
    if chain is not None:
        _run_chain(chain, out, base, command=command, as_json=as_json)
    else:
        _run(targets[0], out, base, command=command, as_json=as_json)


def _run(target: str, out: Path, base: str | None, *, command: str, as_json: bool) -> None:
    with reported(as_json=as_json), progress_bar("materializing", as_json=as_json) as bar:
        folder, version = open_run_at(target)
        checkpoint = base_or_anchor(folder, version, base, command=command, as_json=as_json)
        task = bar.add_task("", total=None)
        report = materialize(
            folder,
            checkpoint,
            version,
            out,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if as_json:
        print_json({"ok": True, **asdict(report)})
    else:
        typer.echo(f"{report.folder}: version {report.version} of run {report.run_id}, digest {report.state_digest}")


def _run_chain(chain: ForeignChain, out: Path, base: str | None, *, command: str, as_json: bool) -> None:
    with reported(as_json=as_json), progress_bar("materializing", as_json=as_json) as bar:
        checkpoint = base_of_chain(base, command=command, as_json=as_json)
        task = bar.add_task("", total=None)
        report = materialize_chain(
            chain, checkpoint, out, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    if as_json:
        print_json({"ok": True, **asdict(report)})
    else:
        what = f"{report.kind}, version {report.version}" if report.version is not None else report.kind
        typer.echo(f"{report.folder}: {report.deltas} deltas applied ({what}), digest {report.state_digest}")
