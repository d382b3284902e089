# SPDX-License-Identifier: Apache-2.0
"""The verbs of ``delta-snapshot`` and their arguments. What each does lies in a module of its name, imported late."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_delta_snapshot._version import __version__

__all__ = ["app"]

app = typer.Typer(
    name="delta-snapshot",
    help="Look into runs of weight deltas, verify them, and turn them into checkpoints. "
    "(Weight snapshots; not vLLM's process snapshots.)",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object; see docs/cli.md for its fields.")]
Run = Annotated[str, typer.Argument(metavar="SYNC_DIR", help="The run's folder: /path or file:///path.")]


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version


@app.command()
def inspect(
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="A run (SYNC_DIR), one version (SYNC_DIR@N), or a local delta folder."),
    ],
    as_json: AsJson = False,
) -> None:
    """Show what a run, a version or a delta folder is. Also reads OpenRL's sparse_delta folders."""
    from vllm_delta_snapshot.cli import inspect as verb

    verb.run(target, as_json=as_json)


@app.command()
def log(sync_dir: Run, as_json: AsJson = False) -> None:
    """List the versions of a run, newest last: sizes, density, step and recorded metrics."""
    from vllm_delta_snapshot.cli import log as verb

    verb.run(sync_dir, as_json=as_json)


@app.command()
def verify(
    sync_dir: Annotated[
        str | None, typer.Argument(metavar="[SYNC_DIR]", help="The run's folder: /path or file:///path.")
    ] = None,
    server: Annotated[
        str | None, typer.Option(metavar="URL", help="Compare the live weights of this vLLM server instead.")
    ] = None,
    version: Annotated[
        int | None, typer.Option(min=0, help="With --server: the version; by default the one that the server has.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check every file, checksum and patch of a run, and that its chain holds; or all live weights of a server.

    Exits with 1 if anything is wrong. With --server the engine itself compares, on all its workers; generation stands
    still while it reads its weights once. The API key is taken from VLLM_API_KEY.
    """
    from vllm_delta_snapshot.cli import verify as verb

    if (sync_dir is None) == (server is None):
        raise typer.BadParameter("give either SYNC_DIR or --server URL")
    if version is not None and server is None:
        raise typer.BadParameter("--version goes with --server; a run is verified as a whole")
    if server is not None:
        verb.run_server(server, version, as_json=as_json)
    elif sync_dir is not None:
        verb.run(sync_dir, as_json=as_json)


@app.command()
def doctor(
    sync_dir: Annotated[str | None, typer.Option(metavar="SYNC_DIR", help="Also look at this run's folder.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Also start an engine on this model, and show how each tensor would be served.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="With --model: as in `vllm serve`.")] = None,
    quantization: Annotated[str | None, typer.Option(help="With --model: as in `vllm serve`.")] = None,
    gpu_memory_utilization: Annotated[float | None, typer.Option(help="With --model: as in `vllm serve`.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find out whether updates would work here. Exits with 1 if something is in the way."""
    from vllm_delta_snapshot.cli import doctor as verb

    options = {"dtype": dtype, "quantization": quantization, "gpu_memory_utilization": gpu_memory_utilization}
    verb.run(sync_dir, model, options, as_json=as_json)


@app.command()
def materialize(
    target: Annotated[
        str, typer.Argument(metavar="SYNC_DIR[@N]", help="The run and the version; the newest by default.")
    ],
    out: Annotated[Path, typer.Argument(help="A new folder for the checkpoint.")],
    base: Annotated[
        Path | None, typer.Option(help="The base checkpoint; by default where the trainer says it was.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a version as a plain Hugging Face checkpoint, bit for bit, for transformers and vLLM."""
    from vllm_delta_snapshot.cli import materialize as verb

    verb.run(target, out, base, as_json=as_json)
