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


def draw(path: Path, densities: Sequence[float], rewards: Sequence[float], *, title: str) -> None:
    """Write the picture.

    Args:
        path: a png.
        densities: changed elements / all elements, of the delta of each step.
        rewards: mean reward of the rollouts of each step, sampled before its update; one more at the end is the
            reward of the final weights.
        title: what was trained.
    """
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(7.2, 6.4), sharex=True, layout="constrained")
    steps = range(1, len(densities) + 1)
    upper.bar(steps, [100 * density for density in densities], color=BLUE, width=0.6)
    for step, density in zip(steps, densities, strict=True):
        upper.annotate(f"{100 * density:.2g} %", (step, 100 * density), (0, 3), textcoords="offset points", ha="center")
    upper.set_ylabel("weights that changed (%)")
    upper.set_title("Mutation density: share of the bf16 weights that one step changes", loc="left", fontsize=10)
    upper.margins(y=0.15)
    lower.plot(range(1, len(rewards) + 1), rewards, color=GREEN, marker="o", linewidth=2)
    lower.set_ylabel("mean reward")
    lower.set_ylim(0, 1)
    lower.set_xlabel("step")
    lower.set_title("Reward of the live server's completions", loc="left", fontsize=10)
    for axes in (upper, lower):
        _plain(axes)
    figure.suptitle(title, fontsize=12, color=INK, x=0.01, ha="left")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
