# SPDX-License-Identifier: Apache-2.0
"""Verbs that write or delete: ``materialize``, ``export``, ``compact``, ``anchor``, ``prune``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_delta_snapshot.cli.commands.options import AsJson, ExportFormat, Run
from vllm_delta_snapshot.cli.commands.root import app

__all__: list[str] = []


@app.command(short_help="Write a version as a whole checkpoint.")
def materialize(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="SYNC_DIR[@N]|FOLDER",
            help="The run and the version; the newest by default. Or, with --base, a SkyRL sync_dir, or delta folders "
            "of SkyRL or OpenRL in order.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder for the checkpoint.")],
    base: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|ORG/MODEL", help="The base checkpoint; of a run, by default where the trainer says it was."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a version as a plain Hugging Face checkpoint, bit for bit, for transformers and vLLM."""
    from vllm_delta_snapshot.cli import materialize as verb

    verb.run(targets, out, base, as_json=as_json)


@app.command(short_help="Write a version as a delta of OpenRL.")
def export(
    target: Annotated[
        str,
        typer.Argument(
            metavar="SYNC_DIR[@N]", help="The run, or the SkyRL sync_dir, and the version; the newest by default."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder for the delta.")],
    export_format: Annotated[
        ExportFormat, typer.Option("--format", help="OpenRL's sparse_delta version 2: absolute values, one file.")
    ] = ExportFormat.OPENRL_V2,
    after: Annotated[
        int | None,
        typer.Option("--from", min=0, metavar="M", help="Merge the versions after M; by default only the last one."),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|ORG/MODEL",
            help="The base checkpoint, where it is needed: for a SkyRL sync_dir, and for a run that holds differences "
            "(by default where the trainer says it was).",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write what a version changes as a delta folder of OpenRL, with absolute values."""
    from vllm_delta_snapshot.cli import export as verb

    verb.run(target, out, export_format.value, after, base, as_json=as_json)


@app.command(short_help="Merge the deltas between two versions.")
def compact(
    sync_dir: Run,
    start: Annotated[
        int | None, typer.Option("--from", min=0, metavar="M", help="Where to start; by default the newest anchor.")
    ] = None,
    to: Annotated[int | None, typer.Option(min=2, metavar="N", help="Where to end; by default the newest.")] = None,
    as_json: AsJson = False,
) -> None:
    """Merge the deltas between two versions into one, for engines that are far behind. Takes nothing away."""
    from vllm_delta_snapshot.cli import maintain as verb

    verb.run_compact(sync_dir, start, to, as_json=as_json)


@app.command(short_help="Publish a version as a whole checkpoint.")
def anchor(
    target: Annotated[
        str, typer.Argument(metavar="SYNC_DIR[@N]", help="The run and the version; the newest by default.")
    ],
    base: Annotated[
        str | None,
        typer.Option(metavar="FOLDER|ORG/MODEL", help="The base checkpoint; by default where the trainer says it was."),
    ] = None,
    scratch: Annotated[
        Path | None, typer.Option(help="A local folder with room for a checkpoint; by default the temp folder.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Publish a version as a whole checkpoint, from which late engines and trainers start."""
    from vllm_delta_snapshot.cli import maintain as verb

    verb.run_anchor(target, base, scratch, as_json=as_json)


@app.command(short_help="Delete what nobody needs any more.")
def prune(
    sync_dir: Run,
    keep_versions: Annotated[int, typer.Option(min=1, help="Keep the deltas of so many newest versions.")] = 100,
    keep_anchors: Annotated[int, typer.Option(min=1, help="Keep so many newest anchors.")] = 2,
    keep_anchor_every: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="Besides, keep anchors of versions that are multiples of K.")
    ] = None,
    ack_max_age: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="An older acknowledgement holds nothing back.")
    ] = 86400.0,
    drop_anchor: Annotated[
        list[int] | None, typer.Option(min=1, metavar="N", help="Also delete this anchor, a damaged one for instance.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without this only what would go is shown.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete what no anchor, no living sampler and no policy needs. Shows what would go, unless --yes is given."""
    from vllm_delta_snapshot.cli import maintain as verb
    from vllm_delta_snapshot.upkeep.retention import RetentionPolicy

    policy = RetentionPolicy(keep_versions, keep_anchors, keep_anchor_every, ack_max_age, tuple(drop_anchor or ()))
    verb.run_prune(sync_dir, policy, is_real=yes, as_json=as_json)
