# SPDX-License-Identifier: Apache-2.0
"""Who may use a publisher: the process that made it, and in it one call at a time.

What a publisher knows is true in one place only. A process that was forked off has a copy of it, of a thread that does
not run there, and of connections that belong to its parent; two calls at once would compare with a baseline that the
other one moves. Both are refused before anything is touched, with what to do instead. Calls one after the other may
come from any threads.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from vllm_delta_snapshot.errors import NotPublished

__all__ = ["Use", "not_to_be_copied"]

T = TypeVar("T")


class Use:
    """See the module. Made with what it guards, in the process that may use it."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._free = threading.Lock()
        self._thread: threading.Thread | None = None
        self._call = "a call"
        self._is_lent = False

    @property
    def is_here(self) -> bool:
        """Whether this is the process that may use it."""
        return os.getpid() == self._process

    def check_process(self, call: str) -> None:
        """Check that this is the process that may use it.

        Args:
            call: what is about to be done, for the message.

        Raises:
            NotPublished: it is another one.
        """
        if not self.is_here:
            raise NotPublished(
                f"{call}() was called in process {os.getpid()}, which was forked off after the publisher was made",
                expected=f"process {self._process}",
                hint="Publish there. If this process is the trainer now, end that publisher, and make a new one here: "
                "it continues the run.",
            )

    @contextlib.contextmanager
    def taken(self, call: str) -> Iterator[None]:
        """Keep every other call out meanwhile.

        Args:
            call: what is done, for messages.

        Raises:
            NotPublished: another call is under way, or this is another process.
        """
        self.check_process(call)
        if not self._free.acquire(blocking=False):
            if self._is_lent and self._thread is threading.current_thread():
                yield
                return
            raise self._busy(call)
        try:
            self._thread, self._call = threading.current_thread(), call
            yield
        finally:
            self._thread = None
            self._free.release()

    def lend(self, work: Callable[[], T]) -> T:
        """Do something, in a call that is under way, that may call again from the same thread."""
        self._is_lent = True
        try:
            return work()
        finally:
            self._is_lent = False

    def _busy(self, call: str) -> NotPublished:
        # It may end at this very moment: what is said then is what was so.
        thread = self._thread
        return NotPublished(
            f"{call}() was called while {self._call}() is under way",
            found="in the same thread: by a signal handler, an observer or the source"
            if thread is threading.current_thread()
            else f"in thread {thread.name}"
            if thread is not None
            else None,
            hint="Call one after the other. If that call was broken off by an interrupt and never ends, make a new "
            "publisher: it continues the run.",
        )


def not_to_be_copied(what: str) -> NotPublished:
    """Return the error for something of this process that is pickled or copied."""
    return NotPublished(
        f"{what} cannot be copied or pickled: it belongs to one process",
        hint="Send the version number or state_dict() instead. A process that is to publish makes a publisher of its "
        "own, when this one is closed.",
    )
