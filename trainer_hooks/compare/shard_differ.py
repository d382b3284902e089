# SPDX-License-Identifier: Apache-2.0
"""One pass over one rank's shards: each compared with its baseline, positions in the full tensors.

As `trainer_hooks.compare.differ`, whose threads and pieces it uses.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from trainer_hooks.compare.audit import Turns, unseen
from trainer_hooks.compare.device_diff import DeviceDiff
from trainer_hooks.compare.diff import PIECE_ELEMENTS, Piece, TensorDiff
from trainer_hooks.compare.differ import diff_pieces
from trainer_hooks.compare.shard_baseline import HeldSegment, ShardBaseline
from trainer_hooks.compare.tie_guard import TieGuard
from trainer_hooks.source.castable import check_dtype
from trainer_hooks.source.items import refuse_unreadable
from trainer_hooks.source.shards import Shard, ShardSource
from vllm_delta_snapshot.checkpoint.tied import Tie
from vllm_delta_snapshot.errors import SourceError
from vllm_delta_snapshot.util.ordered import JOIN, Join

__all__ = ["ShardDiffer", "ShardFingerprints", "pieces_of"]

ShardFingerprints = dict[int, Hashable]
"""By the number of a shard, its fingerprint when it was last published."""


class ShardDiffer:
    """See the module. Use it once.

    Args:
        source: the weights.
        owned: the shards that this rank publishes, by number; not those that it only keeps.
        baseline: what was published of them.
        known: the fingerprints of the last publication. One that turns out to be wrong is taken out.
        device_diff: where to compare what lies on an accelerator; by default as ``auto``.
        turns: which pieces are audited; by default none.
        tie: tied weights that must stay equal.

    Attributes:
        fingerprints: those of this pass, once it is at its end.
        guard: what was seen of tied weights, in this rank's shards.
        seconds: how long the consumer of `diffs` waited for it.
    """

    def __init__(
        self,
        source: ShardSource,
        owned: Mapping[int, Shard],
        baseline: ShardBaseline,
        known: ShardFingerprints,
        device_diff: DeviceDiff | None = None,
        turns: Turns | None = None,
        tie: Tie | None = None,
    ) -> None:
        self._source = source
        self._owned = owned
        self._baseline = baseline
        self._known = known
        self._device_diff = device_diff
        self._turns = turns
        self._believed: dict[str, int] = {}  # tensors that are said to be unchanged, and a shard of each
        self.fingerprints: ShardFingerprints = {}
        self.guard = TieGuard(tie)
        self.seconds = 0.0

    def diffs(self, pool: ThreadPoolExecutor | None) -> Iterator[TensorDiff]:
        """Yield what differs, segment by segment, in the order of the source.

        Args:
            pool: threads to compare on; ``None`` for the caller's.

        Raises:
            SourceError: a shard is missing, doubled or does not fit. What was yielded must not be published.
            VerifyError: an audited piece is not what was found, or has changed although that was ruled out. The same.
        """
        started = time.monotonic()
        is_audited = None if self._turns is None else self._turns.is_due
        for diff in diff_pieces(self._pieces(), pool, device_diff=self._device_diff, is_audited=is_audited):
            if diff.spec.name in self._believed:
                self._known.pop(self._believed[diff.spec.name], None)
                raise unseen(diff.spec.name)
            self.guard.see(diff)
            self.seconds += time.monotonic() - started
            yield diff
            started = time.monotonic()
        self.seconds += time.monotonic() - started

    def _pieces(self) -> Iterator[Piece | Join]:
        missing = set(self._owned)
        for read in self._source.read(self._owned.keys()):
            if read.number not in self._owned:
                continue
            if read.number not in missing:
                raise SourceError("a shard comes twice", tensor=self._owned[read.number].key)
            missing.remove(read.number)
            if read.fingerprint is not None:
                self.fingerprints[read.number] = read.fingerprint
                if self._known.get(read.number) == read.fingerprint:
                    specs = [held.spec for held in self._baseline.of(read.number)]
                    if self._turns is None or not self._turns.is_any_due(specs):
                        continue
                    self._believed |= {spec.name: read.number for spec in specs}
            yield from pieces_of(self._owned[read.number], self._baseline.of(read.number), read.load())
            if not read.stays:
                yield JOIN
        if missing:
            raise SourceError("a shard is missing", tensor=", ".join(self._owned[n].key for n in sorted(missing)[:8]))


def pieces_of(shard: Shard, segments: Sequence[HeldSegment], flat: torch.Tensor) -> Iterator[Piece]:
    """Cut a shard's elements into pieces, segment by segment.

    Raises:
        SourceError: it has another size than in the plan, or a dtype that does not fit.
    """
    if tuple(flat.shape) != (shard.runs.size,):
        raise SourceError(
            "the shard has another size than when the publisher was started",
            tensor=shard.key,
            expected=f"{shard.runs.size} elements",
            found=f"shape {list(flat.shape)}",
        )
    refuse_unreadable(shard.key, flat)
    flat = flat.resolve_neg()  # a lazily negated tensor has no bits to look at
    for held in segments:
        check_dtype(held.spec, flat.dtype)
        runs, size = held.segment.runs, held.bits.size
        current = flat[held.segment.first : held.segment.first + size]
        is_one = runs.start is not None
        for first in range(0, size, PIECE_ELEMENTS):
            last = first + PIECE_ELEMENTS
            yield Piece(
                held.spec,
                first + (runs.start or 0),
                held.bits[first:last],
                current[first:last],
                last >= size,
                None if is_one else runs.to_full,
            )
