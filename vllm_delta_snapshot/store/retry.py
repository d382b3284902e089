# SPDX-License-Identifier: Apache-2.0
"""Do again what may pass, after a pause that doubles and is drawn by chance: many hosts must not come back at once."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import count
from typing import Final, TypeVar

from vllm_delta_snapshot.errors import StoreUnavailable
from vllm_delta_snapshot.util.traffic import count_retry

__all__ = ["again"]

T = TypeVar("T")

_CHANCE: Final = random.SystemRandom()  # of its own: a trainer's seeds must not be used up here
_LONGEST_S: Final = 10.0


def again(action: Callable[[], T], *, attempts: int, first_s: float, may_pass: type[Exception] = StoreUnavailable) -> T:
    """Return what `action` does: reads. Blocks between its attempts.

    Args:
        action: may be made several times.
        attempts: how often at most.
        first_s: the pause after the first failure is at most this long, after the next twice as long, and so on.
        may_pass: what is worth another attempt.

    Raises:
        Exception: what the last attempt raised.
    """
    for attempt in count():
        try:
            return action()
        except may_pass:
            if attempt + 1 >= attempts:
                raise
        count_retry("read")
        time.sleep(_CHANCE.uniform(0.0, min(_LONGEST_S, first_s * 2**attempt)))
    raise AssertionError("unreachable")
