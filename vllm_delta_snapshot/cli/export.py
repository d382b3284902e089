# SPDX-License-Identifier: Apache-2.0
"""``delta-snapshot export``: what a version changes, as a folder that another tool reads."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from vllm_delta_snapshot.cli.output import human_bytes, print_json, progress_bar, reported
from vllm_delta_snapshot.cli.targets import base_of_chain, base_of_run, find_foreign, open_run_at
from vllm_delta_snapshot.interop.chain import FolderKind, ForeignChain
from vllm_delta_snapshot.interop.export import ExportReport, export_chain, export_run

__all__ = ["run"]


def run(target: str, out: Path, format_name: str, after: int | None, base: str | None, *, as_json: bool) -> None:
    """Export and say what was written. There is one format so far: ``openrl-v2``."""
    command = f"delta-snapshot export {target} {out}" + (f" --from {after}" if after is not None else "")
    with reported(as_json=as_json), progress_bar("exporting", as_json=as_json) as bar:
        chain = find_foreign([target])
        task = bar.add_task("", total=None)
        if chain is not None:
            report = _export_chain(chain, out, after, base, command=command, as_json=as_json)
        else:
            folder, version = open_run_at(target)
            report = export_run(
                folder,
                out,
                after=max(0, version - 1) if after is None else after,
                version=version,
                find_base=lambda: base_of_run(folder, base, command=command, as_json=as_json),
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
    if as_json:
        print_json({"ok": True, "format": format_name, **asdict(report)})
    else:
        _print(report, format_name)


def _export_chain(
    chain: ForeignChain, out: Path, after: int | None, base: str | None, *, command: str, as_json: bool
) -> ExportReport:
    if chain.kind is FolderKind.OPENRL:
        raise typer.BadParameter("this is OpenRL's form already")
    checkpoint = base_of_chain(base, command=command, as_json=as_json)
    version = chain.version or 0
    return export_chain(chain, checkpoint, out, after=max(0, version - 1) if after is None else after)


def _print(report: ExportReport, format_name: str) -> None:
    typer.echo(
        f"{report.folder}: {format_name}, version {report.base_version} to {report.version}, "
        f"{report.changed_elements:,} elements in {report.changed_tensors} tensors, {human_bytes(report.payload_bytes)}"
    )
