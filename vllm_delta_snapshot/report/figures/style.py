# SPDX-License-Identifier: Apache-2.0
"""What all pictures share: two themes, axes, labels, and how a picture becomes bytes.

Text that comes from a run is shown as it is: never as markup, cut where it is too long, without what cannot be printed.
No window and no global state: figures are made by themselves, and settings hold while one is drawn.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from vllm_delta_snapshot.report.text import cut, plain_number, printable

__all__ = ["DARK", "LIGHT", "Theme", "label", "new_figure", "picture_bytes", "plain_axes", "themed", "titled"]

WIDTH: Final = 9.0
"""Inches. A picture is read at this width: labels are 9 points or more."""
_DPI: Final = 140


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours, told apart also by those who see few of them."""

    name: Literal["light", "dark"]
    paper: str
    ink: str
    faint: str
    grid: str
    blue: str
    green: str
    orange: str
    purple: str
    missing: str
    colormap: str


LIGHT: Final = Theme(
    "light",
    "#ffffff",
    "#1c1f23",
    "#5b6470",
    "#dfe3e8",
    "#1f5fa8",
    "#1f7a4d",
    "#c8611a",
    "#7b4ba0",
    "#c9ced6",
    "viridis",
)
DARK: Final = Theme(
    "dark", "#14171b", "#e6e9ee", "#9aa4b1", "#2c333c", "#6aa9ec", "#63c493", "#f0a05a", "#b892de", "#4a525d", "viridis"
)


@contextlib.contextmanager
def themed(theme: Theme) -> Iterator[None]:
    """Let figures that are made and drawn meanwhile have a theme's colours."""
    settings = {
        "text.parse_math": False,  # a name with dollar signs is no formula
        "font.size": 10,
        "text.color": theme.ink,
        "axes.labelcolor": theme.ink,
        "axes.edgecolor": theme.faint,
        "axes.facecolor": theme.paper,
        "figure.facecolor": theme.paper,
        "savefig.facecolor": theme.paper,
        "xtick.color": theme.ink,
        "ytick.color": theme.ink,
        "grid.color": theme.grid,
        "svg.hashsalt": "vllm-delta-snapshot",  # the same run makes the same file
    }
    with mpl.rc_context(settings), warnings.catch_warnings():
        # A name may have letters that the font lacks: boxes are shown for them.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def new_figure(rows: int = 1, *, height: float = 3.6) -> tuple[Figure, list[Axes]]:
    """Return a figure with `rows` panels one below the other, of `height` inches each, on one x axis."""
    figure = Figure(figsize=(WIDTH, height * rows), layout="constrained")
    panels = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
    return figure, list(panels)


def titled(axes: Axes, theme: Theme, title: str, subtitle: str) -> None:
    """Write what a panel shows, and below it what to know about it."""
    axes.set_title(label(title, 100), loc="left", fontsize=12, pad=22)
    told = axes.annotate(
        subtitle, (0, 1), (0, 7), xycoords="axes fraction", textcoords="offset points", fontsize=9, color=theme.faint
    )
    told.set_in_layout(False)  # the title has room for it, and a long one must not squeeze the panel


def plain_axes(axes: Axes, *, whole_x: bool = True) -> None:
    """Take away what is not needed to read a panel."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", linewidth=0.8)
    axes.set_axisbelow(True)
    if whole_x:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    if axes.get_yscale() == "linear":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: plain_number(value)))


def label(text: str, most: int = 48) -> str:
    """Return a run's text for a picture: one line, printable, not too long."""
    return cut(printable(text), most)


def picture_bytes(figure: Figure, form: Literal["png", "svg"]) -> bytes:
    """Draw a figure. Call it while its theme holds (`themed`)."""
    written = io.BytesIO()
    metadata = {"Date": None} if form == "svg" else None
    figure.savefig(written, format=form, dpi=_DPI, metadata=metadata)
    figure.set_layout_engine("none")  # it stays as it is laid out now: doing that again takes as long as drawing
    return written.getvalue()
