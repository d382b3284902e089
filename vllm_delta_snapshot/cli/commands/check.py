# SPDX-License-Identifier: Apache-2.0
"""Verbs that answer a question: ``verify``, ``doctor``, ``plan``. Nothing is written to a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_delta_snapshot.cli.commands.options import AsJson
from vllm_delta_snapshot.cli.commands.root import app

__all__: list[str] = []


@app.command(short_help="Check all bytes of a run, or of a server.")
def verify(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SYNC_DIR|FOLDER",
            help="The run's folder: /path or file:///path. Or, with --base, a SkyRL sync_dir, or delta folders of "
            "SkyRL or OpenRL in order.",
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|ORG/MODEL",
            help="With --deep: the base checkpoint of the run; by default where the trainer says it was. With deltas "
            "of SkyRL or OpenRL: the checkpoint that they start from.",
        ),
    ] = None,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep",
            help="Also take a copy of the base through every version, recompute every digest, and compare anchors and "
            "merged deltas with it. Needs local disk for one checkpoint, for two if there are anchors.",
        ),
    ] = False,
    scratch: Annotated[
        Path | None, typer.Option(help="With --deep: a local folder with room; by default the temp folder.")
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

    Exits with 1 if anything is wrong. Deltas of SkyRL and OpenRL are checked against their base checkpoint, as far as
    their form allows, and it is said what was not checked. With --server the engine itself compares, on all its
    workers; generation stands still while it reads its weights once. The API key is taken from VLLM_API_KEY.
    """
    from vllm_delta_snapshot.cli import verify as verb

    if bool(targets) == (server is not None):
        raise typer.BadParameter("give either SYNC_DIR or --server URL")
    if version is not None and server is None:
        raise typer.BadParameter("--version goes with --server; a run is verified as a whole")
    if server is not None and (base is not None or deep or scratch is not None):
        raise typer.BadParameter("--server goes without --base, --deep, --scratch: a server has its own run")
    if server is not None:
        verb.run_server(server, version, as_json=as_json)
    elif targets:
        verb.run(targets, base, is_deep=deep, scratch=scratch, as_json=as_json)


@app.command(short_help="Say what is in the way of updates here.")
def doctor(
    sync_dir: Annotated[str | None, typer.Option(metavar="SYNC_DIR", help="Also look at this run's folder.")] = None,
    server: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Also ask this vLLM server whether it has the routes and the backend."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Also start an engine on this model, and show how each tensor would be served.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="With --model: as in `vllm serve`.")] = None,
    quantization: Annotated[str | None, typer.Option(help="With --model: as in `vllm serve`.")] = None,
    gpu_memory_utilization: Annotated[float | None, typer.Option(help="With --model: as in `vllm serve`.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find out whether updates would work here. Exits with 1 if something is in the way, 3 if the store is silent."""
    from vllm_delta_snapshot.cli import doctor as verb

    options = {"dtype": dtype, "quantization": quantization, "gpu_memory_utilization": gpu_memory_utilization}
    verb.run(sync_dir, server, model, options, as_json=as_json)


@app.command(short_help="Predict how long a version takes.")
def plan(
    params: Annotated[float, typer.Option(min=1, help="Parameters of the model, such as 70e9; in bf16.")],
    gbps: Annotated[
        float, typer.Option(min=1e-6, help="Gbit/s from the trainer to the store, and from the store to each host.")
    ],
    density: Annotated[float, typer.Option(min=1e-9, max=1.0, help="The share that changes per version.")] = 0.01,
    engines: Annotated[int, typer.Option(min=1, help="How many engines, each on a host of its own.")] = 1,
    store_gbps: Annotated[
        float | None, typer.Option(min=1e-6, help="What the store gives to all hosts together; by default no limit.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Trainer processes that share the diff.")] = 1,
    workers: Annotated[int, typer.Option(min=1, help="Workers of an engine that share its weights.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Predict how long a version takes from a step to served weights, and say which stage holds it up.

    With coefficients that `make bench-link` measured on a small CPU machine.
    """
    from vllm_delta_snapshot.cli import plan as verb
    from vllm_delta_snapshot.cli.planner import Setup

    verb.run(Setup(params, density, gbps, engines, store_gbps, ranks, workers), as_json=as_json)
