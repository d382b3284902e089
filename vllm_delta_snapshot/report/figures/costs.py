# SPDX-License-Identifier: Apache-2.0
"""What versions cost: bytes against a full checkpoint, seconds stage by stage, and which weights are touched at all."""

from __future__ import annotations

from typing import Final

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from numpy.typing import NDArray

from vllm_delta_snapshot.report.binning import bin_columns, bin_size, bin_starts
from vllm_delta_snapshot.report.figures.lines import along_versions, draw_line, mark_gaps, note
from vllm_delta_snapshot.report.figures.style import Theme, new_figure, plain_axes, titled
from vllm_delta_snapshot.report.history import RunHistory
from vllm_delta_snapshot.report.text import counted, human_bytes, human_seconds, percent
from vllm_delta_snapshot.report.touched import TouchedWeights

__all__ = ["draw_sizes", "draw_times", "draw_touched"]

_MOST_BARS: Final = 100

Numbers = NDArray[np.float64]


def draw_sizes(history: RunHistory, theme: Theme) -> Figure:
    """Draw the bytes of every version, and those of a full checkpoint."""
    figure, (axes,) = new_figure()
    sizes = np.array([facts.record.payload_bytes for facts in history.versions], np.float64)
    along = along_versions(history)
    binned = draw_line(axes, along, np.maximum(1.0, sizes), theme.blue)
    if history.anchors:
        at, anchors = zip(*((anchor.version, anchor.payload_bytes) for anchor in history.anchors), strict=True)
        axes.plot(at, anchors, color=theme.orange, linestyle="", marker="D", markersize=5)
    axes.axhline(history.checkpoint_bytes, color=theme.orange, linewidth=1.6, linestyle="--")
    full = f"full checkpoint, {human_bytes(history.checkpoint_bytes)}"
    axes.annotate(
        full, (0.995, history.checkpoint_bytes), (0, -4), xycoords=("axes fraction", "data"),
        textcoords="offset points", ha="right", va="top", color=theme.orange,
    )  # fmt: skip
    axes.set_yscale("log")
    low, high = min(sizes.min(), history.checkpoint_bytes), max(sizes.max(), history.checkpoint_bytes)
    axes.set_ylim(10 ** np.floor(np.log10(max(1.0, low) * 0.999)), high * 2)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,), numticks=8))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: human_bytes(value).replace(".00", "")))
    axes.yaxis.set_minor_formatter(NullFormatter())
    mark_gaps(axes, along, theme)
    plain_axes(axes)
    axes.set_ylabel("bytes of a version, log scale")
    axes.set_xlabel("version")
    ratio = history.checkpoint_bytes / max(1.0, float(np.median(sizes)))
    told = f"median {human_bytes(float(np.median(sizes)))}, 1/{ratio:,.0f} of a full checkpoint"
    told += f"; diamonds: {counted(len(history.anchors), 'anchor')}" if history.anchors else ""
    titled(axes, theme, "Bytes per version, against sending the whole checkpoint", told + note(binned))
    return figure


def draw_times(history: RunHistory, theme: Theme) -> Figure:
    """Draw where the seconds of every version went, one above the other.

    Engines acknowledge only what they took last, so where versions share a bar it shows the trainer alone.
    """
    figure, (axes,) = new_figure()
    along = along_versions(history)
    starts = bin_starts(along.at.size, _MOST_BARS, along.breaks)
    size = bin_size(along.at.size, _MOST_BARS)
    ends = np.append(starts[1:], along.at.size)
    left, right = along.at[starts] - 0.5, along.at[ends - 1] + 0.5
    below = np.zeros(starts.size)
    for name, color, seconds in _stages(history, theme)[: 4 if size == 1 else 2]:
        mean = bin_columns(seconds[None], starts)[0]
        if np.isnan(mean).all():
            continue
        heights = np.nan_to_num(mean)
        middle, width = (left + right) / 2, 0.8 * (right - left)
        axes.bar(middle, heights, bottom=below, width=width, color=color, label=name)
        below = below + heights
    axes.set_ylim(0, 1.18 * float(below.max(initial=0.0)) or 1)
    if along.at.size == 1:
        axes.set_xlim(along.at[0] - 1.5, along.at[0] + 1.5)
    mark_gaps(axes, along, theme)
    plain_axes(axes)
    if below.any():
        axes.legend(loc="upper right", ncols=4, frameon=False, fontsize=9)
    axes.set_ylabel("seconds")
    axes.set_xlabel("version")
    titled(axes, theme, "Where the time went", _told_of_times(history, size))
    return figure


def draw_touched(history: RunHistory, touched: TouchedWeights, theme: Theme) -> Figure:
    """Draw which share of the weights any version has changed so far."""
    figure, (axes,) = new_figure()
    versions = np.array([touched.after, *touched.versions], np.float64)
    shares = np.array([0, *touched.elements], np.float64) / max(1, history.total_elements)
    marker = "o" if versions.size <= 60 else None
    axes.fill_between(versions, 100 * shares, color=theme.blue, alpha=0.25, linewidth=0)
    axes.plot(versions, 100 * shares, color=theme.blue, linewidth=1.6, marker=marker, markersize=4)
    axes.set_ylim(0, 1.1 * 100 * float(shares.max()) or 1)
    plain_axes(axes)
    axes.set_ylabel("weights touched so far (%)")
    axes.set_xlabel("version" if touched.after else "version (0: the base checkpoint)")
    never = max(0.0, 1 - float(shares[-1]))
    told = f"{percent(never)} of the weights were never changed up to version {int(versions[-1])}"
    if touched.after:
        told += f", counted after version {touched.after}: earlier deltas were pruned"
    if touched.versions and touched.versions[-1] < history.newest:
        told += ", where the chain breaks"
    titled(axes, theme, "Weights that any version has touched so far", told)
    return figure


def _stages(history: RunHistory, theme: Theme) -> list[tuple[str, str, Numbers]]:
    """Return name, colour and seconds of every version for each stage: the trainer's two, and the engines' two."""
    pauses, stagings = history.pauses(), history.stagings()
    return [
        ("diff", theme.blue, np.array([facts.diff_s for facts in history.versions], np.float64)),
        ("encode and upload", theme.orange, np.array([facts.upload_s for facts in history.versions], np.float64)),
        ("fetch and stage", theme.purple, np.array([stagings.get(f.version) for f in history.versions], np.float64)),
        ("pause", theme.green, np.array([pauses.get(f.version) for f in history.versions], np.float64)),
    ]


def _told_of_times(history: RunHistory, size: int) -> str:
    diffs = [facts.diff_s for facts in history.versions if facts.diff_s is not None]
    parts = [f"median diff {human_seconds(float(np.median(diffs)))}"] if diffs else []
    pauses = history.pauses()
    if size > 1:
        parts.append(f"a bar is the mean of {size} versions")
    if pauses and size > 1:
        newest = max(pauses)
        parts.append(f"the engines' last pause: {human_seconds(pauses[newest])} (version {newest})")
    elif pauses:
        parts.append(f"engines: the {counted(len(pauses), 'version')} that they acknowledged last, the slowest one")
    else:
        parts.append("no acknowledgements, so nothing of the engines")
    return "; ".join(parts)
