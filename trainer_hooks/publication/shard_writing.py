# SPDX-License-Identifier: Apache-2.0
"""One publication of a model that several ranks hold together: each writes its part, rank 0 the table, and commits.

What ranks say to each other meanwhile goes over a channel of its own, so that their callers may talk at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from trainer_hooks.compare.diff import TensorDiff
from trainer_hooks.compare.shard_differ import ShardDiffer
from trainer_hooks.compare.tie_guard import check_moves
from trainer_hooks.publication.commit import commit
from trainer_hooks.publication.kept import KeptChanges
from trainer_hooks.publication.parts import digested, write_rank, write_table
from trainer_hooks.publication.publication import PublishReport
from trainer_hooks.publication.shard_published import ShardAttempt, ShardPublished
from trainer_hooks.publication.writing import Writing, WritingRules
from trainer_hooks.ranks import JSON, Ranks
from vllm_delta_snapshot.errors import NotPublished
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.digest import add_digests
from vllm_delta_snapshot.runs.delta_folder import DigestedChange, WriterNotes
from vllm_delta_snapshot.runs.own_run import OwnRun
from vllm_delta_snapshot.types import TensorSpec

__all__ = ["Place", "ShardWriting"]


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where ranks write, and how they agree on it.

    Attributes:
        ranks: the channel for what happens behind the caller.
        own: the run; rank 0 commits to it.
        specs: the tensors of the run, in its order.
        order: their places there, by name.
    """

    ranks: Ranks
    own: OwnRun
    specs: Sequence[TensorSpec]
    order: Mapping[str, int]


class ShardWriting(Writing):
    """See the module. Use it once, on every rank.

    Args:
        rules: what all have in common.
        place: where to write.
        published: what is compared with, and moves with the commit. Left alone by everybody else until the end.
        differ: the comparison.
        notes: what to record beside; rank 0's counts.
        publication_id: the publication's, the same on all ranks.
        started: when the publisher was called, in `time.monotonic` seconds.
    """

    def __init__(
        self,
        rules: WritingRules,
        place: Place,
        published: ShardPublished,
        differ: ShardDiffer,
        notes: WriterNotes,
        *,
        publication_id: str,
        started: float,
    ) -> None:
        self._lineage = published.head.lineage(rules.run_id, rules.total_elements)
        super().__init__(rules, differ, notes, version=self._lineage.version, started=started)
        self._place = place
        self._published = published
        self._shard_differ = differ
        self._id = publication_id
        self._folder = layout.delta_folder(self.version, publication_id)

    @property
    def _is_told_of(self) -> bool:
        return self._place.ranks.rank == 0

    def _write_and_commit(
        self, diffs: Iterable[TensorDiff], pool: ThreadPoolExecutor | None, check: Callable[[], None]
    ) -> PublishReport:
        def commit_all(parts: list[JSON]) -> JSON:
            check()
            return self._commit(parts)

        answer = self._place.ranks.round(lambda: self._write_part(diffs, pool, check), commit_all)
        self._published.adopt(answer.pop("state_digest"))
        total_s = time.monotonic() - self._started
        return PublishReport(**answer, total_s=total_s, blocked_s=self._blocked(total_s))

    def _write_part(
        self, diffs: Iterable[TensorDiff], pool: ThreadPoolExecutor | None, check: Callable[[], None]
    ) -> JSON:
        """Write what changed in this rank's shards."""
        kept = KeptChanges()
        moves: list[int] = []

        def counted() -> Iterator[DigestedChange]:
            for item in digested(self._rules.encoding, diffs, self._published.baseline):
                moves.append(item.move)
                yield item

        try:
            written = write_rank(
                self._place.own.store,
                self._folder,
                self._place.ranks.rank,
                counted(),
                self._place.order,
                keep=kept.add,
                pool=pool,
                max_file_bytes=self._rules.max_file_bytes,
            )
        except NotPublished as given_up:
            if isinstance(self._misread, Exception):
                raise self._misread from given_up  # the other ranks want to know why
            raise
        check()
        self._published.attempt = ShardAttempt(kept, self._shard_differ.fingerprints, add_digests(*moves))
        return written | {"diff_s": self._shard_differ.seconds, "tied": self._shard_differ.guard.moves}

    def _commit(self, parts: list[JSON]) -> JSON:
        """On rank 0: write the table of all parts, and commit."""
        check_moves(self._published.tie, [part["tied"] for part in parts])
        diff_s = max(part["diff_s"] for part in parts)
        record = write_table(
            self._place.own.store,
            self._folder,
            self._id,
            self._lineage,
            self._place.specs,
            parts,
            replace(self._notes, diff_s=diff_s),
            seconds=time.monotonic() - self._started,
            max_file_bytes=self._rules.max_file_bytes,
        )
        self._published.record = record
        commit(self._place.own, record)
        self._published.record = None
        return {
            "run_id": self._rules.run_id,
            "version": record.version,
            "changed_elements": record.changed_elements,
            "total_elements": self._rules.total_elements,
            "changed_tensors": len({entry[0] for part in parts for entry in part["entries"]}),
            "payload_bytes": record.payload_bytes,
            "checkpoint_bytes": self._rules.checkpoint_bytes,
            "folder": record.folder,
            "diff_s": diff_s,
            "state_digest": record.state_digest,
        }
