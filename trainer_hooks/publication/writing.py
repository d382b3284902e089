# SPDX-License-Identifier: Apache-2.0
"""One publication, from the diff to the moved baseline: all in the caller's thread, or all but the diff behind it.

What is written, and who commits it, is the subclass's. Invariant: what runs behind the caller reads the differences
that it is handed, and never the trainer's tensors.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol

from trainer_hooks.compare.diff import TensorDiff
from trainer_hooks.publication.background import Feed, Task
from trainer_hooks.publication.observers import PublishObserver, tell
from trainer_hooks.publication.publication import PublishReport
from vllm_delta_snapshot.errors import DeltaSnapshotError, NotPublished
from vllm_delta_snapshot.runs.delta_folder import WriterNotes
from vllm_delta_snapshot.util.ordered import thread_pool

__all__ = ["Comparison", "Writing", "WritingRules", "default_buffer_bytes"]

logger = logging.getLogger(__name__)

_LEAST_BUFFER_BYTES: Final = 256 << 20
_BUFFER_SHARE: Final = 8
"""1/8 of the checkpoint takes a bf16 diff of 3 % whole: 8 bytes a change beside 2 bytes an element."""


@dataclass(frozen=True, slots=True)
class WritingRules:
    """What all publications of a run have in common.

    Attributes:
        run_id: the run.
        encoding: the policy, see `choose`.
        total_elements: elements of the checkpoint.
        checkpoint_bytes: its bytes.
        max_file_bytes: soft limit of a payload file.
        threads: how many threads compare, and how many encode.
        buffer_bytes: how many bytes of changes may wait to be encoded.
        exit_timeout_s: how long the interpreter, when it ends, waits for a publication.
        on_commit: told of every version that was committed, in the thread that did; what they raise is logged.
        observers: told of every version that was committed and of every failure.
    """

    run_id: str
    encoding: str
    total_elements: int
    checkpoint_bytes: int
    max_file_bytes: int
    threads: int
    buffer_bytes: int
    exit_timeout_s: float
    on_commit: tuple[Callable[[PublishReport], object], ...] = ()
    observers: tuple[PublishObserver, ...] = ()


def default_buffer_bytes(checkpoint_bytes: int) -> int:
    """Return how many bytes of changes may wait, where nobody says."""
    return max(_LEAST_BUFFER_BYTES, checkpoint_bytes // _BUFFER_SHARE)


class Comparison(Protocol):
    """A pass over what is published: `Differ`, or of one rank of several `ShardDiffer`.

    Attributes:
        seconds: how long the consumer of `diffs` waited for it.
    """

    seconds: float

    def diffs(self, pool: ThreadPoolExecutor | None) -> Iterator[TensorDiff]:
        """Yield what differs; on threads of the pool, if there is one."""
        ...


class Writing(ABC):
    """See the module. Use it once.

    Args:
        rules: what all have in common.
        differ: the comparison.
        notes: what to record beside.
        version: the version that it makes.
        started: when the publisher was called, in `time.monotonic` seconds.
    """

    def __init__(
        self, rules: WritingRules, differ: Comparison, notes: WriterNotes, *, version: int, started: float
    ) -> None:
        self._rules = rules
        self._differ = differ
        self._notes = notes
        self.version = version
        self._started = started
        self._blocked_s: float | None = None
        self._feed = Feed(rules.buffer_bytes)
        self._misread: BaseException | None = None

    def here(self) -> PublishReport:
        """Do all of it in this thread. Blocks until the commit.

        Raises:
            DeltaSnapshotError: nothing was committed, or nobody knows (`Published.settle`).
        """
        with thread_pool(self._rules.threads) as pool:
            return self._write(self._differ.diffs(pool), pool, lambda: None)

    def task(self) -> Task[PublishReport]:
        """Return the thread, not yet started, that does all but the diff; it waits for what `compare` hands it."""
        feed = self._feed

        def write(task: Task[PublishReport]) -> PublishReport:
            try:
                with thread_pool(self._rules.threads) as pool:
                    return self._write(feed.read(), pool, task.check)
            finally:
                feed.leave()

        name = f"publication of version {self.version}"
        return Task(write, name=name, exit_timeout_s=self._rules.exit_timeout_s)

    def compare(self) -> None:
        """Compare, and hand over what differs. Blocks until the weights may be changed again.

        Raises:
            SourceError: the weights do not fit; nothing will be committed.
        """
        try:
            with thread_pool(self._rules.threads) as pool:
                for diff in self._differ.diffs(pool):
                    if not self._feed.put(diff):
                        break  # the thread has failed already; the next call says of what
            self._blocked_s = time.monotonic() - self._started
            self._feed.close()
        except BaseException as error:
            self._misread = error
            self._feed.give_up()
            self._tell_failed(error)
            raise

    def give_up(self) -> None:
        """Have nothing of it published, whatever `compare` has come to. May be repeated."""
        self._feed.give_up()

    def _write(
        self, diffs: Iterable[TensorDiff], pool: ThreadPoolExecutor | None, check: Callable[[], None]
    ) -> PublishReport:
        """Encode, write and commit, and tell observers what came of it.

        `check` raises when it is no longer wanted, at the latest before the commit.
        """
        try:
            report = self._write_and_commit(_until(check, diffs), pool, check)
        except BaseException as error:
            self._tell_failed(error)
            raise
        if self._is_told_of:
            self._tell(report)
        return report

    @abstractmethod
    def _write_and_commit(
        self, diffs: Iterable[TensorDiff], pool: ThreadPoolExecutor | None, check: Callable[[], None]
    ) -> PublishReport:
        """Encode, write, commit, and move the baseline."""

    @property
    def _is_told_of(self) -> bool:
        """Whether this process is the one to tell of what was published."""
        return True

    def _tell(self, report: PublishReport) -> None:
        report.log()
        for told in self._rules.on_commit:
            try:
                told(report)
            except Exception:  # the version is out, whatever they make of it
                logger.exception("after version=%d", report.version)
        tell(self._rules.observers, lambda observer: observer.published(report, self._notes.step, self._notes.metrics))

    def _tell_failed(self, error: BaseException) -> None:
        # One that was given up did not fail, and of a diff that failed the thread that waits for it knows no reason.
        if self._is_told_of and isinstance(error, DeltaSnapshotError) and not isinstance(error, NotPublished):
            tell(self._rules.observers, lambda observer: observer.failed(error))

    def _blocked(self, total_s: float) -> float:
        """Return for how many seconds the caller was held up: all of them, if it made the commit itself."""
        return total_s if self._blocked_s is None else self._blocked_s


def _until(check: Callable[[], None], diffs: Iterable[TensorDiff]) -> Iterator[TensorDiff]:
    for diff in diffs:
        check()
        yield diff
