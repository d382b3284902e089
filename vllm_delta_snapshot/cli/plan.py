# SPDX-License-Identifier: Apache-2.0
"""``delta-snapshot plan``: how long a version would take from a trainer to its engines, and what holds it up."""

from __future__ import annotations

from dataclasses import asdict

import typer

from vllm_delta_snapshot.cli.output import human_bytes, print_json, reported
from vllm_delta_snapshot.cli.planner import Plan, Setup, measured_coefficients, plan

__all__ = ["run"]

_WHAT = {
    "diff": "trainer: compare all weights with the baseline",
    "encode": "trainer: digest, encode and write the changes",
    "upload": "trainer to store",
    "fetch": "store to every host",
    "stage": "host: decode, check, map",
    "prepare": "engine: gather and prove old values (generation stands still)",
    "pause": "engine: write and read back (paused)",
}


def run(setup: Setup, *, as_json: bool) -> None:
    """Predict and print."""
    with reported(as_json=as_json):
        coefficients = measured_coefficients()
    planned = plan(setup, coefficients)
    if as_json:
        fields = {"ok": True, "setup": asdict(setup), "measured_on": coefficients.machine, **asdict(planned)}
        print_json(fields)
        return
    for line in _lines(planned):
        typer.echo(line)
    typer.echo(f"With coefficients measured on: {coefficients.machine}.", err=True)
    typer.echo("Faster machines and GPUs scale the stages of trainer, host and engine; links are as given.", err=True)


def _lines(planned: Plan) -> list[str]:
    smaller = planned.checkpoint_bytes / planned.payload_bytes
    payload, checkpoint = human_bytes(planned.payload_bytes), human_bytes(planned.checkpoint_bytes)
    lines = [f"{'payload':<10}  {payload:>9}  of {checkpoint} (1/{smaller:.0f})"]
    for stage, seconds in planned.seconds.items():
        mark = "  <- bottleneck" if stage == planned.bottleneck else ""
        lines.append(f"{stage:<10}  {_time(seconds):>9}  {_WHAT[stage]}{mark}")
    lines.append(f"{'in all':<10}  {_time(planned.total_s):>9}  from the step's end to served weights")
    lines.append(f"{'instead of':<10}  {_time(planned.checkpoint_s):>9}  for full checkpoints on the same links alone")
    return lines


def _time(seconds: float) -> str:
    return (
        f"{1000 * seconds:.0f} ms"
        if seconds < 1
        else f"{seconds:.1f} s"
        if seconds < 600
        else f"{seconds / 60:.0f} min"
    )
