# SPDX-License-Identifier: Apache-2.0
"""Threads for the short bursts of memory work in a pause, on all the cores that the process was given.

vLLM pins a CPU worker's main thread to one core, and threads started later inherit that. So the cores are looked up
when this module is imported, which the plugin does before vLLM pins anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Final, TypeVar

import torch

__all__ = ["run_each", "run_in_parts"]

T = TypeVar("T")
Item = TypeVar("Item")

_CORES: Final = os.sched_getaffinity(0)
_MOST: Final = 8


def run_in_parts(work: Callable[[int, int], T], size: int, *, least: int) -> list[T]:
    """Call ``work(first, last)`` on consecutive parts of ``range(size)``, on as many threads as torch uses. Blocks.

    Args:
        work: frees the GIL most of the time.
        size: how much there is.
        least: not worth a thread of its own below this.
    """
    count = max(1, min(torch.get_num_threads(), len(_CORES), _MOST, size // least))
    if count == 1:
        return [work(0, size)]
    ends = [size * part // count for part in range(count + 1)]
    results: Iterable[T] = _pool().map(work, ends[:-1], ends[1:])
    return list(results)


def run_each(work: Callable[[Item], T], items: Sequence[Item]) -> list[T]:
    """Call ``work(item)`` for every item, on as many threads as torch uses, in this order. Blocks."""
    count = max(1, min(torch.get_num_threads(), len(_CORES), _MOST, len(items)))

    def share(first: int) -> list[T]:
        return [work(item) for item in items[first::count]]

    shares = [share(0)] if count == 1 else list(_pool().map(share, range(count)))
    return [shares[place % count][place // count] for place in range(len(items))]


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MOST, "delta-snapshot", initializer=_use_all_cores)


def _use_all_cores() -> None:
    os.sched_setaffinity(0, _CORES)
