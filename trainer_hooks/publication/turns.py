# SPDX-License-Identifier: Apache-2.0
"""One publication after the other: a turn comes when the one before has ended, and what became of it is known.

Invariant: while a publication is under way nobody else looks at the baseline or asks for a commit. What one failed of
is told once: by its handle to who waits, else by the next turn, which then is not taken.
"""

from __future__ import annotations

from collections.abc import Callable

from trainer_hooks.publication.background import Task
from trainer_hooks.publication.publication import Publication, PublishReport
from trainer_hooks.publication.writing import Writing

__all__ = ["Turns"]


class Turns:
    """See the module. Belongs to who calls the publisher.

    An interrupt may come anywhere. So what is begun is noted before it begins, and what an interrupt left half begun is
    ended by whoever comes next.
    """

    def __init__(self) -> None:
        self._task: Task[PublishReport] | None = None
        self._begun: Writing | None = None  # whose diff is being made

    @property
    def is_busy(self) -> bool:
        """Whether a publication is under way. Does not block."""
        self._mend()
        return self._task is not None and not self._task.join(0)

    def take(self, writing: Writing, *, is_asynchronous: bool) -> Publication:
        """Begin a publication, after `ended` or `settle`. Blocks until its diff is made, or until its commit.

        Raises:
            DeltaSnapshotError: the diff failed; or, if it is not asynchronous, anything else.
        """
        if not is_asynchronous:
            return Publication(writing.version, writing.here())
        self._begun = writing
        self._task = task = writing.task()
        try:
            task.start()
            writing.compare()
        except BaseException:
            self._mend()
            task.hush()  # it ends by itself, of the same
            raise
        self._begun = None
        return Publication(writing.version, task)

    def _mend(self) -> None:
        """End what was interrupted before its diff was whole: nothing of it is published."""
        if self._begun is not None:
            self._begun.give_up()
            if self._task is not None:
                self._task.forbid()
            self._begun = None

    def ended(self) -> BaseException | None:
        """Wait for the publication before, and forget it; return what nobody was told yet, but now is. Blocks."""
        self._mend()
        if self._task is None:
            return None
        self._task.join()
        error = self._task.hush()
        self._task = None
        return error

    def settle(self, find_out: Callable[[], bool]) -> None:
        """Wait for the publication before, find out what became of it, and raise what nobody was told yet. Blocks.

        Args:
            find_out: says whether an earlier commit, whose answer never came, was made. If it is interrupted, the next
                call asks again.
        """
        self._mend()
        error = None
        if self._task is not None:
            self._task.join()
            error = self._task.untold
        try:
            is_committed = find_out()
        except Exception as unsettled:
            self.ended()
            if error is None or error is unsettled:
                raise
            raise unsettled from error
        self.ended()
        if error is not None and not is_committed:
            raise error

    def drain(self, find_out: Callable[[], bool], timeout_s: float | None) -> None:
        """Wait until nothing is under way, and raise what nobody was told yet. Blocks.

        Raises:
            NotPublished: something still is after this time.
        """
        self._mend()
        if self._task is not None:
            self._task.expect_end(timeout_s)
            if not self._task.is_told:
                self.settle(find_out)

    def abandon(self) -> None:
        """Have what is under way stop before its commit; does not wait for that."""
        self._mend()
        if self._task is not None:
            self._task.abandon()
