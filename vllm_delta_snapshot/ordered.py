# SPDX-License-Identifier: Apache-2.0
"""Work on a few items at a time on threads, results in order: memory stays bounded by what is under way."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["ordered_map", "thread_pool"]

T = TypeVar("T")
R = TypeVar("R")


@contextlib.contextmanager
def thread_pool(threads: int) -> Iterator[ThreadPoolExecutor | None]:
    """Give a pool of threads; ``None`` for a single one, since the caller's own thread does as well."""
    if threads <= 1:
        yield None
        return
    with ThreadPoolExecutor(threads) as pool:
        yield pool


def ordered_map(
    function: Callable[[T], R], items: Iterable[T], pool: ThreadPoolExecutor | None, *, ahead: int = 4
) -> Iterator[R]:
    """Yield ``function(item)`` for every item, in their order.

    Args:
        function: runs on the pool's threads.
        items: taken one by one, at most `ahead` before the one whose result is waited for.
        pool: ``None`` to work in the caller's thread.
        ahead: how many items may be under way.

    Raises:
        Exception: what `items` raised, or the first in order that `function` did. What has begun is waited for; what
            has not, never begins.
    """
    if pool is None:
        yield from map(function, items)
        return
    under_way: deque[Future[R]] = deque()
    try:
        for item in items:
            under_way.append(pool.submit(function, item))
            if len(under_way) >= ahead:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        for future in reversed(under_way):  # the last first, or waiting for one lets the next begin
            future.cancel() or future.exception()
