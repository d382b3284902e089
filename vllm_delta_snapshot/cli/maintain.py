# SPDX-License-Identifier: Apache-2.0
"""``delta-snapshot compact``, ``anchor`` and ``prune``: what shortens the way of a late engine, and what gives room."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path

import typer

from vllm_delta_snapshot.cli.output import human_bytes, open_run, print_json, progress_bar, reported
from vllm_delta_snapshot.cli.targets import base_or_anchor, open_run_at
from vllm_delta_snapshot.upkeep.anchor import write_anchor
from vllm_delta_snapshot.upkeep.compact import compact
from vllm_delta_snapshot.upkeep.retention import PrunePlan, RetentionPolicy, plan_pruning, prune

__all__ = ["run_anchor", "run_compact", "run_prune"]


def run_compact(sync_dir: str, start: int | None, to: int | None, *, as_json: bool) -> None:
    """Merge versions and say what came of it."""
    with reported(as_json=as_json), progress_bar("merging", as_json=as_json) as bar:
        bar.add_task("", total=None)
        folder = open_run(sync_dir)
        newest = folder.newest() if to is None else to
        if start is None:
            start = max((version for version in folder.shortcuts().anchors if version < newest), default=0)
        report = compact(folder, start, newest)
    if as_json:
        print_json({"ok": True, **asdict(report)})
    elif report.existed:
        typer.echo(f"{report.folder}: there already, {human_bytes(report.payload_bytes)}")
    else:
        share = 100 * report.payload_bytes / max(1, report.merged_bytes)
        typer.echo(
            f"{report.folder}: versions {report.base_version} to {report.version} in one delta, "
            f"{human_bytes(report.payload_bytes)}, {share:.0f} % of the {report.deltas} that it is made of"
        )


def run_anchor(target: str, base: str | None, scratch: Path | None, *, as_json: bool) -> None:
    """Write an anchor and say where it is."""
    with reported(as_json=as_json), progress_bar("uploading", as_json=as_json, unit="bytes") as bar:
        folder, version = open_run_at(target)
        command = f"delta-snapshot anchor {shlex.quote(target)}"
        checkpoint = base_or_anchor(folder, version, base, command=command, as_json=as_json)
        task = bar.add_task("", total=None)
        report = write_anchor(
            folder,
            checkpoint,
            version,
            scratch=scratch,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if as_json:
        print_json({"ok": True, **asdict(report)})
    else:
        state = "there already, " if report.existed else ""
        typer.echo(f"{report.folder}: {state}version {report.version}, {human_bytes(report.payload_bytes)}")


def run_prune(sync_dir: str, policy: RetentionPolicy, *, is_real: bool, as_json: bool) -> None:
    """Show what would go, or delete it."""
    with reported(as_json=as_json):
        folder = open_run(sync_dir)
        plan = plan_pruning(folder, policy)
        deleted = prune(folder, plan) if is_real else 0
    if as_json:
        print_json({"ok": True, "is_done": is_real, "deleted_objects": deleted, **asdict(plan)})
    else:
        _print_plan(sync_dir, plan, is_real=is_real, deleted=deleted)


def _print_plan(sync_dir: str, plan: PrunePlan, *, is_real: bool, deleted: int) -> None:
    verb = "deleted" if is_real else "would delete"
    if plan.is_empty:
        gone = f", deltas up to {plan.was_pruned} are gone already" if plan.was_pruned else ""
        typer.echo(f"nothing to delete; newest version {plan.newest}{gone}")
    if plan.up_to > plan.was_pruned:
        typer.echo(f"{verb} the deltas of versions {plan.was_pruned + 1} to {plan.up_to}; newest is {plan.newest}")
    for version in plan.anchors:
        typer.echo(f"{verb} the anchor of version {version}")
    for base, version in plan.merged:
        typer.echo(f"{verb} the merged delta from version {base} to {version}")
    if plan.folders:
        typer.echo(f"{verb} {len(plan.folders)} folders of deltas, those of interrupted publications among them")
    for reason in plan.held_by:
        typer.echo(f"kept more than asked: {reason}")
    if is_real:
        typer.echo(f"{deleted} objects deleted")
    elif not plan.is_empty:
        typer.echo(
            f"Nothing was deleted. To do it, add --yes: delta-snapshot prune {shlex.quote(sync_dir)} ... --yes",
            err=True,
        )
