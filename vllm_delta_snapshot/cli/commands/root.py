# SPDX-License-Identifier: Apache-2.0
"""The command ``delta-snapshot`` itself. Its verbs add themselves to `app`."""

from __future__ import annotations

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
    # Where --help is not given, typer (seen in 0.29) has pydantic convert the default of its own, which is not False.
    context_settings={"default_map": {"help": False}},
    rich_markup_mode=None,  # drawing boxes takes longer than all else that --help does
    pretty_exceptions_enable=False,
)


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
