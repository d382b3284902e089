# SPDX-License-Identifier: Apache-2.0
"""The ways in which new values reach live weights; chosen for each tensor when the engine is initialized."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from vllm_delta_snapshot.errors import TensorRefused
from vllm_delta_snapshot.util.patterns import patterns_of

__all__ = ["Choice", "TensorWay", "Way", "refuse_tensors", "summary_of", "table_of"]

Way = Literal["scatter", "loader"]
"""How plain weights are written: `scatter`, element by element to their places; `loader`, vLLM's patch loader."""

TensorWay = Literal["scatter", "loader", "reload", "unread", "skip", "refused"]


@dataclass(frozen=True, slots=True)
class Choice:
    """How one tensor is served.

    Attributes:
        way: `scatter` or `loader` (see `Way`); `reload`: its layer is reloaded whole from the mirror; `unread`: the
            model never reads it, so updates leave it out; `skip`: they do because the user said so; `refused`: there
            is none.
        reason: why not `scatter`; empty if it is.
    """

    way: TensorWay
    reason: str = ""


def summary_of(choices: Mapping[str, Choice]) -> str:
    """Return one line: ``scatter=270 reload=2``."""
    counts = Counter(choice.way for choice in choices.values())
    return " ".join(f"{way}={counts[way]}" for way in get_args(TensorWay) if counts[way])


def table_of(choices: Mapping[str, Choice]) -> list[tuple[str, str, int, str]]:
    """Return rows of way, reason, number of tensors and an example, the most frequent first."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, choice in choices.items():
        groups.setdefault((choice.way, choice.reason), []).append(name)
    rows = [(way, reason, len(names), names[0]) for (way, reason), names in groups.items()]
    return sorted(rows, key=lambda row: -row[2])


def refuse_tensors(choices: Mapping[str, Choice]) -> None:
    """Check that no tensor is left without a way.

    Raises:
        TensorRefused: names those that are.
    """
    refused = {name: choice.reason for name, choice in choices.items() if choice.way == "refused"}
    if refused:
        listed = "; ".join(f"{name}: {reason}" for name, reason in list(refused.items())[:5])
        more = f"; and {len(refused) - 5} more" if len(refused) > 5 else ""
        patterns = patterns_of(refused, [name for name in choices if name not in refused])
        raise TensorRefused(
            f"{len(refused)} tensors of the checkpoint have no exact place in this engine",
            tensor=listed + more,
            hint="If the engine rightly has no use for them, and may keep serving without what trainers make of them, "
            f'name them in init_info: {{"skip": {json.dumps(patterns)}}}.',
        )
