# SPDX-License-Identifier: Apache-2.0
"""All pictures of a run, one after the other: each is drawn when it is asked for, so one is in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from vllm_delta_snapshot.report.figures.costs import draw_sizes, draw_times, draw_touched
from vllm_delta_snapshot.report.figures.density import draw_density, draw_layers
from vllm_delta_snapshot.report.figures.style import Theme
from vllm_delta_snapshot.report.history import RunHistory
from vllm_delta_snapshot.report.touched import TouchedWeights

__all__ = ["Picture", "draw_pictures"]


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A picture.

    Attributes:
        name: its file name, without an ending.
        alt: what it shows, for those who do not see it.
        figure: the figure.
    """

    name: str
    alt: str
    figure: Figure


def draw_pictures(
    history: RunHistory, theme: Theme, *, metrics: Sequence[str], touched: TouchedWeights | None = None
) -> Iterator[Picture]:
    """Draw the pictures of a run that has versions; of one that has none there are none.

    Args:
        history: the run.
        theme: the colours; its settings must hold meanwhile (`themed`).
        metrics: which recorded metrics to show below the density.
        touched: the weights that were touched, if they were counted.
    """
    if not history.versions:
        return
    drawn: list[tuple[str, str, Callable[[], Figure]]] = [
        ("density", "Mutation density per step", lambda: draw_density(history, theme, metrics)),
        ("layers", "Mutation density by layer and version", lambda: draw_layers(history, theme)),
        ("bytes", "Bytes per version against a full checkpoint", lambda: draw_sizes(history, theme)),
        ("times", "Where the time of every version went", lambda: draw_times(history, theme)),
    ]
    if touched is not None and touched.versions:
        alt = "Share of the weights touched so far"
        drawn.append(("touched", alt, lambda: draw_touched(history, touched, theme)))
    for name, alt, draw in drawn:
        yield Picture(name, alt, draw())
