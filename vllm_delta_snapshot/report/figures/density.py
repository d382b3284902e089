# SPDX-License-Identifier: Apache-2.0
"""Mutation density per step, and below it what the trainer recorded: by layer and step as a heat map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vllm_delta_snapshot.report.binning import bin_columns, bin_size, bin_starts
from vllm_delta_snapshot.report.figures.lines import (
    MOST_BARS,
    MOST_POINTS,
    Along,
    along_steps,
    along_versions,
    draw_bars,
    draw_line,
    mark_gaps,
    note,
)
from vllm_delta_snapshot.report.figures.style import Theme, label, new_figure, plain_axes, titled
from vllm_delta_snapshot.report.history import RunHistory
from vllm_delta_snapshot.report.text import counted, percent, plain_number

__all__ = ["draw_density", "draw_layers"]

_EVERYDAY: Final = (1e-100, 1e100)
"""Within these, axes and their margins are finite."""
_UNEVEN: Final = 20
"""From so many times the median on, the highest value would press all others to the ground: then the scale is log."""
_MOST_ROWS: Final = 120
_MOST_LABELS: Final = 36

Numbers = NDArray[np.float64]


def draw_density(history: RunHistory, theme: Theme, metrics: Sequence[str]) -> Figure:
    """Draw the density of every version, and recorded metrics below it.

    Args:
        history: the run.
        theme: the colours.
        metrics: the names of the metrics.
    """
    along = along_steps(history)
    figure, (upper, *lower) = new_figure(1 + len(metrics), height=3.4 if not metrics else 3.0)
    _density_panel(upper, history, along, theme)
    for axes, name in zip(lower, metrics, strict=True):
        _metric_panel(axes, history, along, theme, name)
    (lower or [upper])[-1].set_xlabel(along.name)
    return figure


def draw_layers(history: RunHistory, theme: Theme) -> Figure:
    """Draw the density by layer and version."""
    matrix, edges, size = _columns(history)
    rows = bin_starts(matrix.shape[0], _MOST_ROWS)
    matrix = bin_columns(matrix.T, rows).T
    known = matrix[np.isfinite(matrix)]
    is_log = _is_uneven(known)
    least = float(known[known > 0].min(initial=np.inf))
    norm = LogNorm(least, known.max()) if is_log else Normalize(0, known.max(initial=0.0) or 1.0)
    figure, (axes,) = new_figure(height=2.2 + 0.13 * min(rows.size, _MOST_LABELS))
    colours = colormaps[theme.colormap].with_extremes(bad=theme.missing, under=theme.paper)
    # A layer that did not change at all has no logarithm: it has the colour of the paper.
    shown = np.where(matrix == 0, least / 2, matrix) if is_log else matrix
    mesh = axes.pcolormesh(edges, np.arange(rows.size + 1), shown, norm=norm, cmap=colours, rasterized=True)
    axes.invert_yaxis()
    plain_axes(axes)
    axes.grid(visible=False)
    labelled = bin_starts(rows.size, _MOST_LABELS)
    axes.set_yticks(labelled + 0.5, [label(history.layers[rows[place]].name, 34) for place in labelled], fontsize=8)
    axes.set_xlabel("version")
    scale = "log scale; paper colour: nothing changed" if is_log else "scale from zero"
    figure.colorbar(mesh, ax=axes, pad=0.01).set_label("changed weights (%)")
    parts = [f"{len(history.layers)} layers by name, {scale}"]
    parts += [f"a column is the mean of {size} versions"] if size > 1 else []
    parts += [f"a row is the mean of {rows[1]} layers"] if rows.size < len(history.layers) else []
    titled(axes, theme, "Mutation density by layer", "; ".join(parts) + ("; grey: missing" if history.gaps else ""))
    return figure


def _density_panel(axes: Axes, history: RunHistory, along: Along, theme: Theme) -> None:
    density = history.densities()
    percents = 100 * density
    is_log = density.size > MOST_BARS and density.min() > 0 and _is_uneven(percents)
    if density.size <= MOST_BARS:
        draw_bars(axes, along.at, percents, theme.blue)
        said = ""
    else:
        binned = draw_line(axes, along, percents, theme.blue)
        said = note(binned)
        if is_log:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda value, _: plain_number(value))
        else:
            axes.set_ylim(0, 1.08 * percents.max() or 1)
    mark_gaps(axes, along, theme)
    axes.set_ylabel("changed weights (%)" + (", log scale" if is_log else ""))
    plain_axes(axes)
    highest = history.versions[int(density.argmax())].version
    told = f"median {percent(float(np.median(density)))}, highest {percent(float(density.max()))} (version {highest})"
    titled(axes, theme, "Mutation density: share of the weights that a version changes", told + said)


def _metric_panel(axes: Axes, history: RunHistory, along: Along, theme: Theme, name: str) -> None:
    values = history.metric(name)
    known = values[~np.isnan(values)]
    drawn, unit = _drawable(values)
    binned = draw_line(axes, along, drawn, theme.green)
    mark_gaps(axes, along, theme)
    plain_axes(axes)
    axes.set_ylabel(label(name, 24) + unit)
    told = f"as recorded by the trainer, with {counted(known.size, 'version')}; last {known[-1]:.4g}"
    titled(axes, theme, label(name, 80), told + note(binned))


def _drawable(values: Numbers) -> tuple[Numbers, str]:
    """Return values that axes can hold, and what to say of their unit: any finite number is drawn, in powers of ten."""
    largest = float(np.nanmax(np.abs(values), initial=0.0))
    if largest == 0 or _EVERYDAY[0] <= largest <= _EVERYDAY[1]:
        return values, ""
    power = int(np.floor(np.log10(largest)))
    half = power // 2  # 10**-power alone may be infinite or zero
    return values / 10.0**half / 10.0 ** (power - half), f" (1e{power})"


def _columns(history: RunHistory) -> tuple[Numbers, Numbers, int]:
    """Return columns of densities in percent, where each begins and the last one ends, and the versions of a column.

    A gap is a column of its own, of which nothing is known.
    """
    matrix = history.layer_densities()
    along = along_versions(history)
    starts = bin_starts(along.at.size, MOST_POINTS, along.breaks)
    holes = np.searchsorted(starts, along.breaks)
    begins = np.insert(along.at[starts] - 0.5, holes, [along.at[place - 1] + 0.5 for place in along.breaks])
    columns = np.insert(100 * bin_columns(matrix, starts), holes, np.nan, axis=1)
    return columns, np.append(begins, along.at[-1] + 0.5), bin_size(along.at.size, MOST_POINTS)


def _is_uneven(values: Numbers) -> bool:
    positive = values[values > 0]
    return bool(positive.size) and float(positive.max()) > _UNEVEN * float(np.median(positive))
