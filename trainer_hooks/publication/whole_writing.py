# SPDX-License-Identifier: Apache-2.0
"""One publication of a model that one process has whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from trainer_hooks.compare.diff import TensorDiff
from trainer_hooks.compare.differ import Differ
from trainer_hooks.publication.commit import write_publication
from trainer_hooks.publication.kept import KeptChanges
from trainer_hooks.publication.publication import PublishReport
from trainer_hooks.publication.published import Attempt, Published
from trainer_hooks.publication.writing import Writing, WritingRules
from vllm_delta_snapshot.format.choose import choose
from vllm_delta_snapshot.runs.delta_folder import DigestedChange, WriterNotes
from vllm_delta_snapshot.runs.own_run import OwnRun

__all__ = ["WholeWriting"]


class WholeWriting(Writing):
    """See the module. Use it once.

    Args:
        rules: what all have in common.
        own: the run.
        published: what is compared with, and moves with the commit. Left alone by everybody else until the end.
        differ: the comparison.
        notes: what to record beside.
        started: when the publisher was called, in `time.monotonic` seconds.
    """

    def __init__(
        self,
        rules: WritingRules,
        own: OwnRun,
        published: Published,
        differ: Differ,
        notes: WriterNotes,
        *,
        started: float,
    ) -> None:
        self._lineage = published.head.lineage(rules.run_id, rules.total_elements)
        super().__init__(rules, differ, notes, version=self._lineage.version, started=started)
        self._own = own
        self._published = published
        self._whole_differ = differ

    def _write_and_commit(
        self, diffs: Iterable[TensorDiff], pool: ThreadPoolExecutor | None, check: Callable[[], None]
    ) -> PublishReport:
        kept = KeptChanges()
        differ = self._whole_differ
        record = write_publication(
            self._own.store,
            self._lineage,
            (self._digested(diff) for diff in diffs),
            lambda: replace(self._notes, diff_s=differ.seconds),
            keep=kept.add,
            pool=pool,
            max_file_bytes=self._rules.max_file_bytes,
        )
        check()
        self._published.commit(self._own, Attempt(record, kept, differ.fingerprints))
        total_s = time.monotonic() - self._started
        return PublishReport(
            run_id=self._rules.run_id,
            version=record.version,
            changed_elements=record.changed_elements,
            total_elements=self._rules.total_elements,
            changed_tensors=differ.changed_tensors,
            payload_bytes=record.payload_bytes,
            checkpoint_bytes=self._rules.checkpoint_bytes,
            folder=record.folder,
            diff_s=differ.seconds,
            total_s=total_s,
            blocked_s=self._blocked(total_s),
        )

    def _digested(self, diff: TensorDiff) -> DigestedChange:
        chosen = choose(self._rules.encoding, diff.spec, diff.positions, diff.old, diff.new)
        return DigestedChange(chosen.change, diff.old_digest, diff.new_digest, chosen.encoding)
