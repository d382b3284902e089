# SPDX-License-Identifier: Apache-2.0
"""``delta-snapshot plot``: pictures of a run, the numbers behind them, and all of it as one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from vllm_delta_snapshot.cli.output import EXIT_PROBLEM, open_run, print_json, progress_bar, reported
from vllm_delta_snapshot.errors import CompatibilityError
from vllm_delta_snapshot.report.history import RunHistory, read_history
from vllm_delta_snapshot.report.text import printable
from vllm_delta_snapshot.report.touched import TouchedWeights, count_touched
from vllm_delta_snapshot.runs.run_folder import RunFolder

__all__ = ["run"]


def run(
    sync_dir: str, out: Path | None, page: Path | None, metrics: Sequence[str], *, with_touched: bool, as_json: bool
) -> None:
    """Draw, write, and say what was written. Exits with 1 if the chain is broken; all is drawn all the same."""
    with reported(as_json=as_json):
        try:
            from vllm_delta_snapshot.report import write
        except ImportError as error:
            raise CompatibilityError(
                "pictures need matplotlib", found=error, hint="pip install 'vllm-delta-snapshot[plot]'"
            ) from error
        folder = open_run(sync_dir)
        history = _read(folder, as_json=as_json)
        chosen = write.choose_metrics(history, metrics)
        touched = _count(folder, history, as_json=as_json) if with_touched else None
        files: list[Path] = []
        with progress_bar("drawing", as_json=as_json, unit="pictures") as bar:
            pictures = (5 if touched else 4) * bool(history.versions)
            task = bar.add_task("", total=pictures * (bool(out) + 2 * bool(page)))
            if out is not None:
                files += write.write_pictures(
                    history, out, metrics=chosen, touched=touched, progress=lambda _: bar.advance(task)
                )
            if page is not None:
                files.append(
                    write.write_page(
                        history, page, metrics=chosen, touched=touched, progress=lambda _: bar.advance(task)
                    )
                )
    if as_json:
        print_json(_as_json(history, files, chosen, touched))
    else:
        for path in files:
            typer.echo(path)
    for problem in history.problems:
        typer.echo(f"version {problem.version}: {printable(str(problem.error))}", err=True)
    if history.problems:
        raise typer.Exit(EXIT_PROBLEM)


def _read(folder: RunFolder, *, as_json: bool) -> RunHistory:
    with progress_bar("reading", as_json=as_json) as bar:
        task = bar.add_task("", total=None)
        return read_history(folder, progress=lambda done, total: bar.update(task, completed=done, total=total))


def _count(folder: RunFolder, history: RunHistory, *, as_json: bool) -> TouchedWeights:
    with progress_bar("counting touched weights", as_json=as_json) as bar:
        task = bar.add_task("", total=None)
        return count_touched(
            folder, history, progress=lambda done, total, _: bar.update(task, completed=done, total=total)
        )


def _as_json(
    history: RunHistory, files: Sequence[Path], metrics: Sequence[str], touched: TouchedWeights | None
) -> dict[str, object]:
    counted = touched is not None and bool(touched.versions)
    return {
        "ok": not history.problems,
        "run_id": history.run_id,
        "num_versions": len(history.versions),
        "newest_version": history.newest,
        "files": [str(path) for path in files],
        "shown_metrics": list(metrics),
        "touched_elements": touched.elements[-1] if touched is not None and counted else None,
        "total_elements": history.total_elements,
        "problems": [{"version": problem.version, **problem.error.to_fields()} for problem in history.problems],
    }
