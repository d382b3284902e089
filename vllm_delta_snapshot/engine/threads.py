# SPDX-License-Identifier: Apache-2.0
"""Threads for the short bursts of memory work in a pause, on all the cores that the process was given.

vLLM pins a CPU worker's main thread to one core, and threads started later inherit that. So the cores are looked up
when this module is imported, which the plugin does before vLLM pins anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Final, TypeVar

import torch

__all__ = ["run_each"]

T = TypeVar("T")
Item = TypeVar("Item")

_CORES: Final = os.sched_getaffinity(0)
_MOST: Final = 8


def run_each(work: Callable[[Item], T], items: Sequence[Item]) -> list[T]:
    """Call ``work(item)`` for every item, on as many threads as torch uses, in this order. Blocks."""
    if len(items) < 2 or min(torch.get_num_threads(), len(_CORES)) == 1:
        return [work(item) for item in items]
    return list(_pool(min(torch.get_num_threads(), len(_CORES), _MOST)).map(work, items))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "delta-snapshot", initializer=_use_all_cores)


def _use_all_cores() -> None:
    os.sched_setaffinity(0, _CORES)
