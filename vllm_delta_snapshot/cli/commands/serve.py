# SPDX-License-Identifier: Apache-2.0
"""Verbs that act on servers: ``sync``, ``follow``, ``repair``."""

from __future__ import annotations

from typing import Annotated

import typer

from vllm_delta_snapshot.cli.commands.options import AsJson, Pause, Policy, Run
from vllm_delta_snapshot.cli.commands.root import app

__all__: list[str] = []

_SWITCH_RUN = "Move a server that follows another run of the same base to this one."


@app.command(short_help="Bring servers to a version.")
def sync(
    sync_dir: Run,
    server: Annotated[list[str], typer.Option(metavar="URL", help="A server; may be given several times.")],
    version: Annotated[int | None, typer.Option(min=0, help="The version; by default the newest.")] = None,
    pause_mode: Annotated[Pause, typer.Option(help="What the pause does with running requests.")] = Pause.KEEP,
    timeout: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="How long staging may take.")] = 300.0,
    allow_rollback: Annotated[bool, typer.Option(help="VERSION may be earlier than what a server has.")] = False,
    switch_run: Annotated[bool, typer.Option(help=_SWITCH_RUN)] = False,
    as_json: AsJson = False,
) -> None:
    """Bring vLLM servers to a version, side by side. Exits with 1 if one of them failed."""
    from vllm_delta_snapshot.cli import sync as verb

    verb.run(
        sync_dir,
        version,
        server,
        pause_mode=pause_mode.value,
        timeout_s=timeout,
        allow_rollback=allow_rollback,
        switch_run=switch_run,
        as_json=as_json,
    )


@app.command(short_help="Keep a server at the versions of a run.")
def follow(
    sync_dir: Annotated[str, typer.Option(metavar="SYNC_DIR", help="The run's folder, as the server reaches it.")],
    server: Annotated[str, typer.Option(metavar="URL", help="The server beside it.")] = "http://127.0.0.1:8000",
    policy: Annotated[Policy, typer.Option(help="Go to the newest version, or take each one.")] = Policy.NEWEST,
    min_interval: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="At most one update in this time.")
    ] = 0.0,
    max_lag: Annotated[int, typer.Option(min=0, help="So many versions behind still counts as ready.")] = 1,
    pause_mode: Annotated[Pause, typer.Option(help="What the pause does with running requests.")] = Pause.KEEP,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where /healthz, /status and /metrics are; '' for nowhere.")
    ] = "127.0.0.1:9470",
    sampler: Annotated[
        str | None, typer.Option(help="Its name in acknowledgements; by default host name and the server's port.")
    ] = None,
    switch_run: Annotated[bool, typer.Option(help=_SWITCH_RUN)] = False,
    ack: Annotated[bool, typer.Option(help="Write acknowledgements into the store.")] = True,
    timeout: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="How long staging may take.")] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Keep a vLLM server at the versions of a run until SIGTERM. Store and server are all it talks to."""
    from vllm_delta_snapshot.cli import follow as verb
    from vllm_delta_snapshot.drive.follow import FollowConfig

    config = FollowConfig(
        sync_dir=sync_dir,
        policy=policy.value,
        min_interval_s=min_interval,
        max_lag=max_lag,
        pause_mode=pause_mode.value,
        stage_timeout_s=timeout,
        switch_run=switch_run,
    )
    verb.run(config, server, listen=listen or None, sampler=sampler, acknowledges=ack, as_json=as_json)


@app.command(short_help="Write over weights that are wrong.")
def repair(
    server: Annotated[str, typer.Option(metavar="URL", help="The server, e.g. http://127.0.0.1:8000.")],
    timeout: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long making a mirror may take.")
    ] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Write over a server's weights that are not those of its version, because something else changed them."""
    from vllm_delta_snapshot.cli import repair as verb

    verb.run(server, timeout, as_json=as_json)
