# SPDX-License-Identifier: Apache-2.0
"""One number a version, drawn as bars where there are few versions and as a line where there are many.

Bars begin at zero. Where several versions share a point, the line is their mean and a band reaches from the lowest to
the highest. A line breaks where versions are missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from vllm_delta_snapshot.report.binning import Binned, bin_values
from vllm_delta_snapshot.report.figures.style import Theme
from vllm_delta_snapshot.report.history import RunHistory

__all__ = ["Along", "along_steps", "along_versions", "draw_bars", "draw_line", "mark_gaps", "note"]

MOST_BARS: Final = 40
MOST_POINTS: Final = 400
_MOST_LABELS: Final = 12
_MOST_MARKERS: Final = 60
_MOST_GAPS: Final = 50

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Along:
    """What lies on the x axis.

    Attributes:
        at: where every version lies, ascending, shape ``(versions,)``.
        name: what it is.
        breaks: where versions are missing: the place of the first one behind each gap. None, if there are too many.
    """

    at: Numbers
    name: str
    breaks: tuple[int, ...] = ()


def along_versions(history: RunHistory) -> Along:
    """Put versions on the x axis."""
    versions = [facts.version for facts in history.versions]
    return Along(np.array(versions, np.float64), "version", _breaks(versions))


def along_steps(history: RunHistory) -> Along:
    """Put optimizer steps on the x axis if every version has one and they rise; else versions."""
    steps = [facts.step for facts in history.versions]
    known = [step for step in steps if step is not None]
    if known and len(known) == len(steps) and all(a < b for a, b in pairwise(known)):
        return Along(np.array(known, np.float64), "optimizer step", along_versions(history).breaks)
    return along_versions(history)


def draw_bars(axes: Axes, at: Numbers, values: Numbers, color: str) -> None:
    """Draw a bar from zero for every value, with its number where there is room."""
    bars = axes.bar(at, np.nan_to_num(values), width=_bar_width(at), color=color)
    if values.size <= _MOST_LABELS:
        numbers = ["" if np.isnan(value) else f"{value:#.3g}".rstrip(".") for value in values]
        axes.bar_label(bars, numbers, padding=2, fontsize=9)
    top = float(np.nanmax(values, initial=0.0))
    axes.set_ylim(0, 1.15 * top or 1)
    if at.size == 1:
        axes.set_xlim(at[0] - 1.5, at[0] + 1.5)


def draw_line(axes: Axes, along: Along, values: Numbers, color: str) -> Binned:
    """Draw a line; return what was drawn."""
    binned = bin_values(along.at, values, MOST_POINTS, along.breaks)
    marker = "o" if binned.at.size <= _MOST_MARKERS else None
    if binned.size > 1:
        axes.fill_between(binned.at, binned.low, binned.high, color=color, alpha=0.25, linewidth=0)
    axes.plot(binned.at, binned.mean, color=color, linewidth=1.6, marker=marker, markersize=4)
    return binned


def note(binned: Binned) -> str:
    """Say that versions share a point, if they do."""
    return f"; line: mean of {binned.size} versions, band: lowest to highest" if binned.size > 1 else ""


def mark_gaps(axes: Axes, along: Along, theme: Theme) -> None:
    """Shade where versions are missing."""
    for place in along.breaks:
        first, last = along.at[place - 1] + 0.5, along.at[place] - 0.5
        axes.axvspan(first, last, color=theme.missing, alpha=0.5, linewidth=0, zorder=0)


def _breaks(versions: Sequence[int]) -> tuple[int, ...]:
    found = [place for place in range(1, len(versions)) if versions[place] > versions[place - 1] + 1]
    return tuple(found) if len(found) <= _MOST_GAPS else ()


def _bar_width(at: Numbers) -> float:
    return 0.7 * float(np.diff(at).min()) if at.size > 1 else 0.4
