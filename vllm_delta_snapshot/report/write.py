# SPDX-License-Identifier: Apache-2.0
"""Write a report: pictures as PNG and SVG with their numbers as CSV into a folder, or all of it into one page.

Files of an earlier report are replaced, each as a whole; other files stay. Needs matplotlib (extra ``[plot]``).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from vllm_delta_snapshot.errors import ObjectNotFound, StageError
from vllm_delta_snapshot.report.figures import DARK, LIGHT, Theme, draw_pictures, picture_bytes
from vllm_delta_snapshot.report.figures.style import themed
from vllm_delta_snapshot.report.history import RunHistory
from vllm_delta_snapshot.report.page import PagePicture, page_bytes
from vllm_delta_snapshot.report.tables import csv_bytes, layer_rows, touched_rows, version_rows
from vllm_delta_snapshot.report.touched import TouchedWeights

__all__ = ["MOST_METRICS", "choose_metrics", "write_page", "write_pictures"]

MOST_METRICS: Final = 4
"""Panels below the density: more would leave none of them readable."""

Progress = Callable[[str], None]
"""Called with the name of every picture that was drawn."""


def choose_metrics(history: RunHistory, asked: Sequence[str]) -> list[str]:
    """Return the metrics to show: those asked for, or else the reward, or else the one that most versions have.

    Raises:
        ObjectNotFound: one that was asked for was never recorded.
    """
    recorded = history.metric_names()
    for name in asked:
        if name not in recorded:
            raise ObjectNotFound(
                "no version has such a metric",
                expected=", ".join(recorded[:20]) or "nothing: the trainer recorded none",
                found=name,
                hint="A trainer records them with publish(metrics={...}).",
            )
    if asked:
        return list(dict.fromkeys(asked))[:MOST_METRICS]
    rewards = sorted((name for name in recorded if "reward" in name.lower()), key=lambda name: (len(name), name))
    return (rewards or recorded)[:1]


def write_pictures(
    history: RunHistory,
    out: Path,
    *,
    metrics: Sequence[str],
    touched: TouchedWeights | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Write every picture as PNG and SVG, and the tables. Blocks; a run of 5,000 versions takes some seconds.

    Args:
        history: the run.
        out: the folder; made if it is not there.
        metrics: which recorded metrics to show (`choose_metrics`).
        touched: the weights that were touched, if they were counted.
        progress: told after every picture.

    Returns:
        What was written, in order.

    Raises:
        StageError: a file cannot be written.
    """
    tables = {"versions.csv": version_rows(history), "layers.csv": layer_rows(history)}
    if touched is not None:
        tables["touched.csv"] = touched_rows(history, touched)
    written = [_write(out / name, csv_bytes(rows)) for name, rows in tables.items()]
    with themed(LIGHT):
        for picture in draw_pictures(history, LIGHT, metrics=metrics, touched=touched):
            written.append(_write(out / f"{picture.name}.png", picture_bytes(picture.figure, "png")))
            written.append(_write(out / f"{picture.name}.svg", picture_bytes(picture.figure, "svg")))
            if progress:
                progress(picture.name)
    return written


def write_page(
    history: RunHistory,
    path: Path,
    *,
    metrics: Sequence[str],
    touched: TouchedWeights | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write the report as one HTML file. Blocks. Arguments and errors as of `write_pictures`."""
    drawn: dict[str, list[bytes]] = {}
    alts: dict[str, str] = {}
    for theme in (LIGHT, DARK):
        for name, alt, svg in _svgs(history, theme, metrics, touched):
            drawn.setdefault(name, []).append(svg)
            alts[name] = alt
            if progress:
                progress(name)
    pictures = [PagePicture(alts[name], *both) for name, both in drawn.items()]
    return _write(path, page_bytes(history, pictures, touched=touched))


def _svgs(
    history: RunHistory, theme: Theme, metrics: Sequence[str], touched: TouchedWeights | None
) -> Iterator[tuple[str, str, bytes]]:
    with themed(theme):
        for picture in draw_pictures(history, theme, metrics=metrics, touched=touched):
            yield picture.name, picture.alt, picture_bytes(picture.figure, "svg")


def _write(path: Path, data: bytes) -> Path:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(data)
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise StageError("cannot be written", file=str(path), found=error, hint="Choose another place.") from error
    return path
