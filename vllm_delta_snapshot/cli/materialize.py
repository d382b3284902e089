# SPDX-License-Identifier: Apache-2.0
"""``delta-snapshot materialize``: a version as a plain checkpoint."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.cli.output import (
    EXIT_USAGE,
    open_run,
    print_json,
    progress_bar,
    reported,
    split_target,
)
from vllm_delta_snapshot.errors import ObjectNotFound
from vllm_delta_snapshot.materialize import materialize

__all__ = ["run"]


def run(target: str, out: Path, base: Path | None, *, as_json: bool) -> None:
    """Materialize and say where it is."""
    sync_dir, version = split_target(target)
    with reported(as_json=as_json), progress_bar("materializing", as_json=as_json) as bar:
        folder = open_run(sync_dir)
        if version is None:
            version = max(folder.versions(), default=0)
        name = base or Path(folder.read_run().base.name)
        if base is None and not name.is_dir():
            with reported(as_json=as_json, code=EXIT_USAGE):
                raise ObjectNotFound(
                    "the base checkpoint, where the trainer had it, is not on this machine",
                    file=str(name),
                    hint=f"Say where it is: delta-snapshot materialize {target} {out} --base FOLDER",
                )
        task = bar.add_task("", total=None)
        report = materialize(
            folder,
            Checkpoint(name),
            version,
            out,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if as_json:
        print_json({"ok": True, **asdict(report)})
    else:
        typer.echo(f"{report.folder}: version {report.version} of run {report.run_id}, digest {report.state_digest}")
