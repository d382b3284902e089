# SPDX-License-Identifier: Apache-2.0
"""Work on a few items at a time on threads, results in order: memory stays bounded by what is under way."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

__all__ = ["JOIN", "Join", "ordered_map", "thread_pool"]

T = TypeVar("T")
R = TypeVar("R")


class Join:
    """Stands between items: what was taken before it is at its end before anything behind it is taken."""


JOIN: Final = Join()


@contextlib.contextmanager
def thread_pool(threads: int) -> Iterator[ThreadPoolExecutor | None]:
    """Give a pool of threads; ``None`` for a single one, since the caller's own thread does as well."""
    if threads <= 1:
        yield None
        return
    with ThreadPoolExecutor(threads) as pool:
        yield pool


def ordered_map(
    function: Callable[[T], R], items: Iterable[T | Join], pool: ThreadPoolExecutor | None, *, ahead: int = 4
) -> Iterator[R]:
    """Yield ``function(item)`` for every item, in their order.

    Args:
        function: runs on the pool's threads.
        items: taken one by one, at most `ahead` before the one whose result is waited for, and none over a `JOIN`.
        pool: ``None`` to work in the caller's thread.
        ahead: how many items may be under way.

    Raises:
        Exception: what `items` raised, or the first in order that `function` did. What has begun is waited for; what
            has not, never begins.
    """
    if pool is None:
        yield from (function(item) for item in items if not isinstance(item, Join))
        return
    under_way: deque[Future[R]] = deque()
    try:
        for item in items:
            is_end = isinstance(item, Join)
            if not isinstance(item, Join):
                under_way.append(pool.submit(function, item))
            while under_way and (is_end or len(under_way) >= ahead):
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        for future in reversed(under_way):  # the last first, or waiting for one lets the next begin
            future.cancel() or future.exception()
