# SPDX-License-Identifier: Apache-2.0
"""Verbs that show what is there: ``inspect``, ``log``, ``plot``, ``diff``. Nothing is written to a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_delta_snapshot.cli.commands.options import AsJson, Run
from vllm_delta_snapshot.cli.commands.root import app

__all__: list[str] = []


@app.command(short_help="Show what a run, a version or a delta is.")
def inspect(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A run or a SkyRL sync_dir (SYNC_DIR), one version (SYNC_DIR@N), or a local delta folder.",
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Show what a run, a version or a delta folder is. Also reads what OpenRL and SkyRL wrote."""
    from vllm_delta_snapshot.cli import inspect as verb

    verb.run(target, as_json=as_json)


@app.command(short_help="List the versions of a run, newest last.")
def log(sync_dir: Run, as_json: AsJson = False) -> None:
    """List the versions of a run, newest last: sizes, density, step and recorded metrics.

    What is missing or damaged is listed too; then it exits with 1.
    """
    from vllm_delta_snapshot.cli import log as verb

    verb.run(sync_dir, as_json=as_json)


@app.command(short_help="Draw pictures of a run. Needs matplotlib.")
def plot(
    sync_dir: Run,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FOLDER", help="For PNG, SVG and the numbers as CSV.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="One HTML page with all pictures and tables, for a browser.")
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Show this recorded metric; may be given several times. Default: the reward."
        ),
    ] = None,
    touched: Annotated[
        bool,
        typer.Option(
            "--touched",
            help="Also count which weights were never changed. Reads every payload; takes a bit of memory a weight.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Draw pictures of a run: density by step and by layer, bytes, and where the time went. Needs matplotlib."""
    from vllm_delta_snapshot.cli import plot as verb

    if out is None and html is None:
        raise typer.BadParameter("say where to: -o FOLDER, --html FILE, or both")
    verb.run(sync_dir, out, html, metric or (), with_touched=touched, as_json=as_json)


@app.command(short_help="Say which tensors differ.")
def diff(
    a: Annotated[
        str, typer.Argument(metavar="A", help="A version (SYNC_DIR@N; the newest by default) or a checkpoint folder.")
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="Likewise.")],
    base: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|ORG/MODEL", help="The base checkpoint of the run; by default where the trainer says it was."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say which tensors differ between two versions or checkpoints: how many elements, and how far.

    Exits with 0 if none does, with 1 if one does, and with 2 or 3 if they cannot be compared. Of two versions of one
    run only what changed between them is read; to compare a version with a checkpoint, it is written out in the temp
    folder.
    """
    from vllm_delta_snapshot.cli import diff as verb

    verb.run(a, b, base, as_json=as_json)
