# SPDX-License-Identifier: Apache-2.0
"""The picture: mutation density and mean reward, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

INK, BLUE, GREEN = "#222222", "#1f5fa8", "#2a7f4f"
MOST_LABELS = 12


def draw(path: Path, densities: Sequence[float], rewards: Sequence[float], *, title: str) -> None:
    """Write the picture.

    Args:
        path: a png.
        densities: changed elements / all elements of the deltas that made versions 1, 2, ...
        rewards: mean reward of what versions 0, 1, 2, ... sampled; one more than densities.
        title: what was trained.
    """
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(7.2, 6.4), sharex=True, layout="constrained")
    percent = [100 * density for density in densities]
    bars = upper.bar(range(1, len(percent) + 1), percent, color=BLUE, width=0.6)
    upper.set_ylabel("changed weights (%)")
    upper.set_ylim(0, 1.15 * max(percent, default=0) or 1)
    upper.set_title("Mutation density: share of the bf16 weights that a step changes", loc="left", fontsize=11)
    lower.plot(range(len(rewards)), rewards, color=GREEN, marker="o", linewidth=2)
    lower.set_ylabel("mean reward")
    lower.set_ylim(0, 1)
    lower.set_xlabel("version of the weights (0: the base checkpoint)")
    lower.set_title("Reward of what the live vLLM server samples with that version", loc="left", fontsize=11)
    if len(percent) <= MOST_LABELS:
        upper.bar_label(bars, [f"{value:.2f}" if value < 10 else f"{value:.0f}" for value in percent], padding=2)
        for version, reward in enumerate(rewards):
            lower.annotate(f"{reward:.2f}", (version, reward), (0, 7), textcoords="offset points", ha="center")
    for axes in (upper, lower):
        _plain(axes)
    figure.suptitle(title, fontsize=13, color=INK, x=0.01, ha="left")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
