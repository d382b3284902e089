# SPDX-License-Identifier: Apache-2.0
"""Numbers and names for people. Pure. Names come from a run: whoever may write into the store chose them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["counted", "cut", "human_bytes", "human_seconds", "percent", "plain_number", "printable", "sparkline"]

_BLOCKS: Final = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


def printable(text: str) -> str:
    """Return a text in which what cannot be printed, line breaks included, is a question mark."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def cut(text: str, most: int) -> str:
    """Return a text of at most `most` letters: the middle of a longer one is left out."""
    if len(text) <= most:
        return text
    head = (most - 1) * 2 // 3
    return f"{text[:head]}\u2026{text[len(text) - (most - 1 - head) :]}"


def counted(number: int, noun: str) -> str:
    """Return a number and what it counts."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def human_bytes(num_bytes: float) -> str:
    """Return a size for people, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} TB"


def human_seconds(seconds: float) -> str:
    """Return a time for people."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def percent(share: float) -> str:
    """Return a share, 0 to 1, in percent with three digits."""
    return f"{plain_number(float(f'{100 * share:.3g}'))} %"


def plain_number(value: float) -> str:
    """Return a number without an exponent where it is of everyday size."""
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        return f"{value:,.10g}"
    return f"{value:g}"


def sparkline(values: Sequence[float], most: int = 60) -> str:
    """Return values as a line of blocks from zero up to the highest one.

    Args:
        values: not negative.
        most: how long the line may be; where values share a block it is as high as the highest of them.
    """
    size = max(1, -(-len(values) // most))
    highest = [max(values[start : start + size]) for start in range(0, len(values), size)]
    top = max(highest, default=0.0)
    if top <= 0:
        return _BLOCKS[0] * len(highest)
    return "".join(_BLOCKS[min(7, int(8 * value / top))] for value in highest)
