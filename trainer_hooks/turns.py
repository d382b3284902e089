# SPDX-License-Identifier: Apache-2.0
"""One publication after the other: a turn comes when the one before has ended, and what became of it is known.

Invariant: while a publication is under way nobody else looks at the baseline or asks for a commit. What one failed of
is told once: by its handle to who waits, else by the next turn, which then is not taken.
"""

from __future__ import annotations

from collections.abc import Callable

from trainer_hooks.background import Task
from trainer_hooks.publication import Publication, PublishReport
from trainer_hooks.published import Published
from trainer_hooks.resume import PublishedState
from trainer_hooks.writing import Writing
from vllm_delta_snapshot.store import Store

__all__ = ["Turns"]


class Turns:
    """See the module. Belongs to the publisher's thread.

    Args:
        published: what moves with every turn.
        reopen: opens the run again, where a move to a version was broken off.
    """

    def __init__(self, published: Published, reopen: Callable[[], PublishedState]) -> None:
        self._published = published
        self._reopen = reopen
        self._task: Task[PublishReport] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a publication is under way. Does not block."""
        return self._task is not None and not self._task.join(0)

    def take(self, writing: Writing, *, is_asynchronous: bool) -> Publication:
        """Begin a publication, after `settle`. Blocks until its diff is made, or until its commit.

        Raises:
            DeltaSnapshotError: the diff failed; or, if it is not asynchronous, anything else.
        """
        if not is_asynchronous:
            return Publication(writing.version, writing.here())
        self._task = task = writing.begin()
        try:
            writing.compare()
        except BaseException:
            task.hush()  # it ends by itself, of the same
            raise
        return Publication(writing.version, task)

    def settle(self, store: Store) -> None:
        """Wait for the publication before, find out what became of it, and raise what nobody was told yet. Blocks."""
        error = None
        if self._task is not None:
            self._task.join()
            error = self._task.hush()
            self._task = None
        try:
            is_committed = self._published.settle(store, self._reopen)
        except Exception as unsettled:
            if error is None or error is unsettled:
                raise
            raise unsettled from error
        if error is not None and not is_committed:
            raise error

    def drain(self, store: Store, timeout_s: float | None) -> None:
        """Wait until nothing is under way, and raise what nobody was told yet. Blocks.

        Raises:
            NotPublished: something still is after this time.
        """
        if self._task is not None:
            self._task.expect_end(timeout_s)
            if not self._task.is_told:
                self.settle(store)

    def abandon(self) -> None:
        """Have what is under way stop before its commit; does not wait for that."""
        if self._task is not None:
            self._task.abandon()
