# SPDX-License-Identifier: Apache-2.0
"""What this process has moved and tried again, counted: for metrics and progress bars.

Counts only grow, from the start of the process on. Nothing depends on them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily

__all__ = ["COPIED", "FETCHED", "WRITTEN", "CountedFamily", "count_bytes", "count_retry", "moved_bytes", "retries"]

FETCHED: Final = "fetched"
"""Payload of deltas and anchors, from a store."""
WRITTEN: Final = "written"
"""The same, into a store."""
COPIED: Final = "copied"
"""Read or copied on the local disk: checkpoints."""

_lock: Final = threading.Lock()
_bytes: Final[Counter[str]] = Counter()
_retries: Final[Counter[str]] = Counter()


def count_bytes(kind: str, num_bytes: int) -> None:
    """Count bytes that were moved.

    Args:
        kind: `FETCHED`, `WRITTEN` or `COPIED`.
        num_bytes: how many.
    """
    with _lock:
        _bytes[kind] += num_bytes


def count_retry(operation: str) -> None:
    """Count that something is tried again.

    Args:
        operation: what; few and fixed, since it becomes a label.
    """
    with _lock:
        _retries[operation] += 1


def moved_bytes(*kinds: str) -> int:
    """Return how many bytes of some kinds were moved so far; of all, if none is named."""
    with _lock:
        return sum(_bytes[kind] for kind in kinds) if kinds else sum(_bytes.values())


def retries() -> dict[str, int]:
    """Return how often what was tried again so far, by operation."""
    with _lock:
        return dict(_retries)


class CountedFamily:
    """A Prometheus counter whose values are looked up when they are asked for. To be registered in a registry.

    Args:
        name: of the metric, without ``_total``.
        what: its description.
        read: returns the values, by the value of the label; by ``""`` if there is no label.
        label: the label's name, if there is one.
    """

    def __init__(self, name: str, what: str, read: Callable[[], Mapping[str, float]], label: str | None = None) -> None:
        self._name, self._what, self._read = name, what, read
        self._labelnames = () if label is None else (label,)

    def describe(self) -> Iterator[CounterMetricFamily]:
        """Yield the family without values."""
        yield self._family()

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the family with its values."""
        family = self._family()
        for value, amount in sorted(self._read().items()):
            family.add_metric([value] if self._labelnames else [], amount)
        yield family

    def _family(self) -> CounterMetricFamily:
        from prometheus_client.core import CounterMetricFamily

        return CounterMetricFamily(self._name, self._what, labels=self._labelnames)
