# SPDX-License-Identifier: Apache-2.0
"""One publication, from the diff to the moved baseline: all in the caller's thread, or all but the diff behind it.

Invariant: what runs behind the caller reads the differences that it is handed, and never the trainer's tensors.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

from trainer_hooks.background import Feed, Task
from trainer_hooks.diff import TensorDiff
from trainer_hooks.differ import Differ
from trainer_hooks.kept import KeptChanges
from trainer_hooks.observers import PublishObserver, tell
from trainer_hooks.publication import PublishReport
from trainer_hooks.publish import write_publication
from trainer_hooks.published import Attempt, Published
from vllm_delta_snapshot.delta_folder import DigestedChange, WriterNotes
from vllm_delta_snapshot.errors import DeltaSnapshotError, NotPublished
from vllm_delta_snapshot.format.choose import choose
from vllm_delta_snapshot.ordered import thread_pool
from vllm_delta_snapshot.store import Store

__all__ = ["Writing", "WritingRules", "default_buffer_bytes"]

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


class Writing:
    """See the module. Use it once.

    Args:
        rules: what all have in common.
        store: the run's store.
        published: what is compared with, and moves with the commit. Left alone by everybody else until the end.
        differ: the comparison.
        notes: what to record beside.
        started: when the publisher was called, in `time.monotonic` seconds.
    """

    def __init__(
        self,
        rules: WritingRules,
        store: Store,
        published: Published,
        differ: Differ,
        notes: WriterNotes,
        started: float,
    ) -> None:
        self._rules = rules
        self._store = store
        self._published = published
        self._differ = differ
        self._notes = notes
        self._started = started
        self._blocked_s: float | None = None
        self._feed = Feed(rules.buffer_bytes)
        self._lineage = published.lineage(rules.run_id, rules.total_elements)

    @property
    def version(self) -> int:
        """The version that it makes."""
        return self._lineage.version

    def here(self) -> PublishReport:
        """Do all of it in this thread. Blocks until the commit.

        Raises:
            DeltaSnapshotError: nothing was committed, or nobody knows (`Published.settle`).
        """
        with thread_pool(self._rules.threads) as pool:
            return self._write(self._differ.diffs(pool), pool, lambda: None)

    def begin(self) -> Task[PublishReport]:
        """Start the thread that does all but the diff; it waits for what `compare` hands it."""
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
            self._feed.give_up()
            self._tell_failed(error)
            raise

    def _write(
        self, diffs: Iterable[TensorDiff], pool: ThreadPoolExecutor | None, check: Callable[[], None]
    ) -> PublishReport:
        """Encode, write and commit, and tell observers what came of it.

        `check` raises when it is no longer wanted, at the latest before the commit.
        """
        try:
            report = self._write_and_commit(diffs, pool, check)
        except BaseException as error:
            self._tell_failed(error)
            raise
        tell(self._rules.observers, lambda observer: observer.published(report, self._notes.step, self._notes.metrics))
        return report

    def _tell_failed(self, error: BaseException) -> None:
        # One that was given up did not fail, and of a diff that failed the thread that waits for it knows no reason.
        if isinstance(error, DeltaSnapshotError) and not isinstance(error, NotPublished):
            tell(self._rules.observers, lambda observer: observer.failed(error))

    def _write_and_commit(
        self, diffs: Iterable[TensorDiff], pool: ThreadPoolExecutor | None, check: Callable[[], None]
    ) -> PublishReport:
        kept = KeptChanges()
        record = write_publication(
            self._store,
            self._lineage,
            (self._digested(diff) for diff in _until(check, diffs)),
            lambda: replace(self._notes, diff_s=self._differ.seconds),
            keep=kept.add,
            pool=pool,
            max_file_bytes=self._rules.max_file_bytes,
        )
        check()
        self._published.commit(self._store, Attempt(record, kept, self._differ.fingerprints))
        total_s = time.monotonic() - self._started
        report = PublishReport(
            run_id=self._rules.run_id,
            version=record.version,
            changed_elements=record.changed_elements,
            total_elements=self._rules.total_elements,
            changed_tensors=self._differ.changed_tensors,
            payload_bytes=record.payload_bytes,
            checkpoint_bytes=self._rules.checkpoint_bytes,
            folder=record.folder,
            diff_s=self._differ.seconds,
            total_s=total_s,
            blocked_s=total_s if self._blocked_s is None else self._blocked_s,
        )
        report.log()
        for told in self._rules.on_commit:
            try:
                told(report)
            except Exception:  # the version is out, whatever they make of it
                logger.exception("after version=%d", report.version)
        return report

    def _digested(self, diff: TensorDiff) -> DigestedChange:
        chosen = choose(self._rules.encoding, diff.spec, diff.positions, diff.old, diff.new)
        return DigestedChange(chosen.change, diff.old_digest, diff.new_digest, chosen.encoding)


def _until(check: Callable[[], None], diffs: Iterable[TensorDiff]) -> Iterator[TensorDiff]:
    for diff in diffs:
        check()
        yield diff
