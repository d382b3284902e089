"""Children of this process, each for one action: what it costs to start is paid once for all of them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator

Action = Callable[[], object]


def forked(action: Action) -> int:
    """Run `action` in a child of its own; return its wait status."""
    return os.waitpid(_started(action), 0)[1]


def all_forked(actions: Iterable[Action]) -> Iterator[int]:
    """Run each action in a child of its own, as many at a time as there are cores; yield the wait statuses in order."""
    living: deque[int] = deque()
    for action in actions:
        if len(living) == len(os.sched_getaffinity(0)):
            yield os.waitpid(living.popleft(), 0)[1]
        living.append(_started(action))
    for child in living:
        yield os.waitpid(child, 0)[1]


def _started(action: Action) -> int:
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        except BaseException:  # noqa: BLE001
            os._exit(1)
    return child
