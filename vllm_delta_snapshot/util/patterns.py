# SPDX-License-Identifier: Apache-2.0
"""A few patterns that match some names and no others: what a user is told to give.

Whole subtrees first (``mtp.*``), then what differs in numbers alone (``model.layers.*.rotary_emb.inv_freq``). Every
pattern is tried on all names that it must not match before it is offered.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from fnmatch import translate
from typing import Final

__all__ = ["listed", "patterns_of"]

_SPECIAL: Final = re.compile(r"[*?[]")
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")
_LISTED: Final = 8


def patterns_of(names: Iterable[str], others: Collection[str]) -> list[str]:
    """Return patterns, as `fnmatch` takes them, that match all of some names and none of others."""
    taken = {prefix for other in others for prefix in _prefixes(other)}
    found = list(dict.fromkeys(_subtree(name, taken) for name in names))
    alike: dict[str, list[str]] = {}
    for pattern in found:
        alike.setdefault(_NUMBER.sub("*", pattern), []).append(pattern)
    chosen: list[str] = []
    for general, patterns in alike.items():
        matches = re.compile(translate(general)).match
        is_safe = len(patterns) > 1 and not any(matches(other) for other in others)
        chosen += [general] if is_safe else patterns
    return chosen


def listed(names: Collection[str], limit: int = _LISTED) -> str:
    """Return some names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(list(names)[:limit]) + more


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:length]) for length in range(1, len(parts)))


def _subtree(name: str, taken: Collection[str]) -> str:
    """Return the pattern of the largest subtree with this name and nothing else's; or the name alone."""
    for prefix in _prefixes(name):
        if prefix not in taken:
            return f"{_escaped(prefix)}.*"
    return _escaped(name)


def _escaped(text: str) -> str:
    return _SPECIAL.sub(lambda found: f"[{found.group()}]", text)
