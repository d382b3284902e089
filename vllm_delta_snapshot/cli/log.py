# SPDX-License-Identifier: Apache-2.0
"""``delta-snapshot log``: the versions of a run, one a line, and where their chain does not hold."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import typer

from vllm_delta_snapshot.cli.output import (
    EXIT_PROBLEM,
    human_bytes,
    open_run,
    print_json,
    print_table,
    progress_bar,
    reported,
)
from vllm_delta_snapshot.report.history import RunHistory, VersionFacts, read_history
from vllm_delta_snapshot.report.text import counted, percent, printable, sparkline

__all__ = ["run"]


def run(sync_dir: str, *, as_json: bool) -> None:
    """List the versions; exit with 1 if the chain is broken."""
    with reported(as_json=as_json):
        folder = open_run(sync_dir)
        with progress_bar("reading", as_json=as_json) as bar:
            task = bar.add_task("", total=None)
            history = read_history(folder, progress=lambda done, total: bar.update(task, completed=done, total=total))
    if as_json:
        print_json(_as_json(history))
    else:
        _print(history)
    if history.problems:
        raise typer.Exit(EXIT_PROBLEM)


def _as_json(history: RunHistory) -> dict[str, Any]:
    anchors = _anchors(history)
    return {
        "ok": not history.problems,
        "run_id": history.run_id,
        "base": history.base,
        "checkpoint_bytes": history.checkpoint_bytes,
        "newest_version": history.newest,
        "payload_bytes": history.payload_bytes,
        "gaps": [list(gap) for gap in history.gaps],
        "anchors": sorted(anchors),
        "merged": [[record.base_version, record.version] for record in history.merged],
        "pruned_up_to": history.pruned,
        "versions": [_describe(facts, history.total_elements, anchors) for facts in history.versions],
        "problems": [{"version": problem.version, **problem.error.to_fields()} for problem in history.problems],
    }


def _anchors(history: RunHistory) -> set[int]:
    return {anchor.version for anchor in history.anchors}


def _describe(facts: VersionFacts, total_elements: int, anchors: Collection[int]) -> dict[str, Any]:
    record = facts.record
    return {
        "version": record.version,
        "base_version": record.base_version,
        "kind": record.kind,
        "step": facts.step,
        "changed_elements": record.changed_elements,
        "total_elements": total_elements,
        "changed_tensors": facts.changed_tensors,
        "payload_bytes": record.payload_bytes,
        "state_digest": record.state_digest,
        "created_at": record.created_at,
        "diff_s": facts.diff_s,
        "upload_s": facts.upload_s,
        "metrics": dict(facts.metrics),
        "is_pruned": facts.is_pruned,
        "is_anchor": facts.version in anchors,
    }


def _print(history: RunHistory) -> None:
    typer.echo(
        f"run {history.run_id}, base {printable(history.base)}, checkpoint {human_bytes(history.checkpoint_bytes)}"
    )
    if history.merged:
        merged = (f"{record.base_version} to {record.version}" for record in history.merged)
        typer.echo("merged deltas: " + ", ".join(merged))
    if history.versions:
        density = history.densities()
        full = history.checkpoint_bytes * len(history.versions)
        typer.echo(
            f"{counted(len(history.versions), 'version')} up to {history.newest}, "
            f"{human_bytes(history.payload_bytes)} in all, "
            f"{percent(history.payload_bytes / max(1, full))} of as many checkpoints"
        )
        typer.echo(f"density {sparkline(density.tolist())}  0 to {percent(float(density.max()))}")
    typer.echo()
    broken = {problem.version for problem in history.problems}
    print_table(
        ("version", "step", "changed", "density", "bytes", "of full", "created", "kept", "metrics"),
        list(_rows(history, broken)),
    )
    if history.problems:
        typer.echo("\nthe chain is broken:")
    for problem in history.problems:
        typer.echo(f"version {problem.version}: {printable(str(problem.error))}")


def _rows(history: RunHistory, broken: set[int]) -> Iterator[list[object]]:
    """Yield a line for every version, and one for every version or gap of which there is nothing to show."""
    known = {facts.version: facts for facts in history.versions}
    anchors = _anchors(history)
    first_missing = dict(history.gaps)
    for number in sorted({*known, *broken, *first_missing}):
        if number in first_missing:
            last = first_missing[number]
            yield [number if last == number else f"{number} to {last}", *[""] * 6, "MISSING", ""]
        elif number in known:
            yield _row(known[number], history, "BROKEN" if number in broken else _kept(known[number], anchors))
        else:
            yield [number, *[""] * 6, "DAMAGED", ""]


def _kept(facts: VersionFacts, anchors: Collection[int]) -> str:
    """Say in what forms a version is there: as a delta, as a whole checkpoint, both, or as a record only."""
    forms = [*["delta"] * (not facts.is_pruned), *["anchor"] * (facts.version in anchors)]
    return " + ".join(forms) or "record"


def _row(facts: VersionFacts, history: RunHistory, kept: str) -> list[object]:
    record = facts.record
    return [
        record.version,
        "" if facts.step is None else facts.step,
        f"{record.changed_elements:,}",
        f"{100 * record.changed_elements / max(1, history.total_elements):.3f} %",
        human_bytes(record.payload_bytes),
        f"{100 * record.payload_bytes / max(1, history.checkpoint_bytes):.2f} %",
        record.created_at[:19],
        kept,
        " ".join(f"{name}={value:.4g}" for name, value in facts.metrics.items()),
    ]
