# SPDX-License-Identifier: Apache-2.0
"""The part of a publication that runs behind the training step: a thread for it, and the way of the diff into it.

Invariant: the thread is given arrays that nobody else writes, never the trainer's tensors; and it is bounded, in number
(a publisher has one at a time) and in memory (`Feed`). What it failed of is kept until somebody asked.

When the interpreter ends, whatever still runs is waited for, each for as long as its publisher said, and then given up:
a version is visible whole or not at all, so there is nothing to clean up. A process that was forked off waits for none.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, TypeVar

from trainer_hooks.compare.diff import TensorDiff
from vllm_delta_snapshot.errors import NotPublished

__all__ = ["Feed", "Task"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TICK_S: Final = 0.5
"""How soon a waiter looks by itself, where an interrupted one took the wake-up with it."""


class Task(Generic[T]):
    """One piece of work on a thread of its own; `start` begins it.

    Whether it has ended is the task's own to say. An interrupt of `Thread.join` may have Python 3.11 take a running
    thread for one that has ended, and in a forked process no thread runs. What the interrupted thread left held keeps
    nobody waiting: the flag is what counts, the lock only wakes.

    Args:
        work: what to do; it is given the task, to ask `check` before what cannot be undone.
        name: for the thread, and for messages.
        exit_timeout_s: how long the interpreter, when it ends, waits for it.
    """

    def __init__(self, work: Callable[[Task[T]], T], *, name: str, exit_timeout_s: float) -> None:
        self.name = name
        self.exit_timeout_s = exit_timeout_s
        self._process = os.getpid()
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._is_told = False
        self._is_abandoned = threading.Event()
        self._has_ended = False
        self._until_end = threading.Lock()
        self._until_end.acquire()
        self._may_begin = threading.Lock()  # who takes it first says whether the work is done at all
        # A daemon: what is given up must not keep the interpreter from ending.
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)

    def start(self) -> None:
        """Begin.

        Raises:
            BaseException: there is no thread to be had, or an interrupt came; what has not begun then never does.
        """
        _RUNNING.add(self)
        try:
            self._thread.start()
        except BaseException as error:
            self.forbid(error)
            raise

    def forbid(self, why: BaseException | None = None) -> None:
        """Have it never begin, if it has not; then it has ended."""
        if self._may_begin.acquire(blocking=False):
            self._finish(why or NotPublished(f"{self.name} was interrupted before it began"))

    def _run(self, work: Callable[[Task[T]], T]) -> None:
        if not self._may_begin.acquire(blocking=False):
            return
        failure: BaseException | None = None
        try:
            self._results.append(work(self))
        except BaseException as error:  # noqa: BLE001 - it is raised again, in the thread that asks
            failure = error
            if not isinstance(error, NotPublished):
                logger.warning("%s failed; the next one carries its changes: %s", self.name, error)
            _forget_frames(error)
        finally:
            self._finish(failure)

    def _finish(self, error: BaseException | None) -> None:
        self._error = error
        _RUNNING.discard(self)
        self._has_ended = True  # last: who sees it sees all that came of it
        self._until_end.release()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the end, whatever it is; say whether it came. Blocks. May be interrupted, and called again.

        Raises:
            NotPublished: this process was forked off the one where it runs, and cannot know.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._has_ended:
            if os.getpid() != self._process:
                raise NotPublished(
                    f"{self.name} runs in the process that this one was forked from",
                    expected=f"process {self._process}",
                    found=f"process {os.getpid()}",
                    hint="Wait for it there; or read the store, which has the version once it exists.",
                )
            left = _TICK_S if until is None else min(_TICK_S, until - time.monotonic())
            if left <= 0:
                return self._has_ended
            if self._until_end.acquire(timeout=left):
                self._until_end.release()
        return True

    def expect_end(self, timeout_s: float | None) -> None:
        """Wait for the end, whatever it is. Blocks.

        Raises:
            NotPublished: it did not come in time.
        """
        if not self.join(timeout_s):
            raise NotPublished(
                f"{self.name} did not end within {timeout_s:g} s",
                hint="Nothing is lost: should it fail, a later publication of the run carries its changes.",
            )

    def result(self, timeout_s: float | None = None) -> T:
        """Return what came of it. Blocks.

        Raises:
            NotPublished: it did not end in time.
            BaseException: what the work raised.
        """
        self.expect_end(timeout_s)
        if self._results:
            return self._results[0]
        self._is_told = True
        assert self._error is not None  # noqa: S101 - it has ended, and not well
        raise self._error

    @property
    def is_told(self) -> bool:
        """Whether there is nothing left to tell: it ended well, or somebody knows of what it failed."""
        return self._is_told or self._error is None

    @property
    def untold(self) -> BaseException | None:
        """What it failed of, if nobody has been told yet."""
        return None if self._is_told else self._error

    def hush(self) -> BaseException | None:
        """Return what it failed of, if nobody has been told yet; now somebody is."""
        error = self.untold
        self._is_told = True
        return error

    def abandon(self) -> None:
        """Have it stop at the next `check`; does not wait for that."""
        self._is_abandoned.set()

    def check(self) -> None:
        """Go on only if nobody has given up on it.

        Raises:
            NotPublished: somebody has.
        """
        if self._is_abandoned.is_set():
            raise NotPublished(f"{self.name} was abandoned before its commit")


class Feed:
    """Differences on their way from the diff to the thread that writes them, at most so many bytes at a time.

    The reader begins when the diff is whole, so that it does not compete with it for cores; or when there is no more
    room, and then the diff waits for the reader.

    Args:
        budget_bytes: how many bytes may wait; a single difference may be larger, and then waits alone.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._waiting: deque[TensorDiff] = deque()
        self._bytes = 0
        self._is_open = False  # the reader may begin before it is whole
        self._is_whole = False
        self._is_read = True  # there is, or will be, somebody who reads
        self._is_given_up = False
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    def put(self, diff: TensorDiff) -> bool:
        """Hand a difference over; say whether anybody wants more. Blocks while there is no room."""
        size = _bytes_of(diff)
        with self._changed:
            while self._is_read and self._waiting and self._bytes + size > self._budget:
                self._is_open = True
                self._changed.notify_all()
                self._changed.wait()
            if self._is_read:
                self._waiting.append(diff)
                self._bytes += size
                self._changed.notify_all()
            return self._is_read

    def close(self) -> None:
        """Say that the diff is whole."""
        with self._changed:
            self._is_whole = True
            self._changed.notify_all()

    def give_up(self) -> None:
        """Say that the diff failed, and what came of it must not be published. Only from outside of other calls.

        If it failed by an interrupt, this came perhaps between taking the lock and the block that gives it back.
        """
        with contextlib.suppress(RuntimeError):  # that it is not held
            while True:
                self._lock.release()
        with self._changed:
            self._is_given_up = True
            self._changed.notify_all()

    def read(self) -> Iterator[TensorDiff]:
        """Yield the differences in order. Blocks until there are some.

        Raises:
            NotPublished: the diff failed.
        """
        while True:
            with self._changed:
                self._changed.wait_for(self._is_readable)
                if self._is_given_up:
                    raise NotPublished("the diff failed")
                if not self._waiting:
                    return
                diff = self._waiting.popleft()
                self._bytes -= _bytes_of(diff)
                self._changed.notify_all()
            yield diff
            del diff  # or it would live until the next one is there

    def _is_readable(self) -> bool:
        return self._is_given_up or self._is_whole or (self._is_open and bool(self._waiting))

    def leave(self) -> None:
        """Say that nobody reads any more."""
        with self._changed:
            self._is_read = False
            self._waiting.clear()
            self._changed.notify_all()


def _bytes_of(diff: TensorDiff) -> int:
    return diff.positions.nbytes + diff.old.nbytes + diff.new.nbytes


def _forget_frames(error: BaseException | None) -> None:
    """Let go of what the frames of a traceback hold: an error may be kept long, a publication's changes must not be."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


_RUNNING: Final[set[Task[Any]]] = set()
# A process that is forked off has copies of what runs in its parent, and waits for none of it.
os.register_at_fork(after_in_child=_RUNNING.clear)


def _drain() -> None:
    """Wait for what runs when the interpreter ends."""
    for task in list(_RUNNING):
        if not task.join(task.exit_timeout_s):
            task.abandon()
            logger.error(
                "%s was given up after %g s, as the interpreter ends; the next trainer's first version carries it",
                task.name,
                task.exit_timeout_s,
            )


# Pools of threads take no more work as soon as the interpreter begins to end, which is before `atexit`. Only what is
# registered here, after theirs, runs before that; the registry is not public, and pools themselves depend on it.
importlib.import_module("concurrent.futures.thread")
getattr(threading, "_register_atexit", atexit.register)(_drain)
