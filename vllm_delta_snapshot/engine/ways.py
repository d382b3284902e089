# SPDX-License-Identifier: Apache-2.0
"""The ways in which new values reach live weights; chosen for each tensor when the engine is initialized."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["Choice", "TensorWay", "Way", "summary_of", "table_of"]

Way = Literal["scatter", "loader"]
"""How plain weights are written: `scatter`, element by element to their places; `loader`, vLLM's patch loader."""

TensorWay = Literal["scatter", "loader", "reload", "skip", "refused"]


@dataclass(frozen=True, slots=True)
class Choice:
    """How one tensor is served.

    Attributes:
        way: `scatter` or `loader` (see `Way`); `reload`: its layer is reloaded whole from the mirror; `skip`: updates
            leave it out, as the user said; `refused`: not at all.
        reason: why not `scatter`; empty if it is.
    """

    way: TensorWay
    reason: str = ""


def summary_of(choices: Mapping[str, Choice]) -> str:
    """Return one line: ``scatter=270 reload=2``."""
    counts = Counter(choice.way for choice in choices.values())
    return " ".join(f"{way}={counts[way]}" for way in ("scatter", "loader", "reload", "skip", "refused") if counts[way])


def table_of(choices: Mapping[str, Choice]) -> list[tuple[str, str, int, str]]:
    """Return rows of way, reason, number of tensors and an example, the most frequent first."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, choice in choices.items():
        groups.setdefault((choice.way, choice.reason), []).append(name)
    rows = [(way, reason, len(names), names[0]) for (way, reason), names in groups.items()]
    return sorted(rows, key=lambda row: -row[2])
