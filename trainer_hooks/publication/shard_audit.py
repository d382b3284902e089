# SPDX-License-Identifier: Apache-2.0
"""Audit over ranks: each digests all that it holds, rank 0 adds up. What is proven, and how: `compare.audit`.

A rank also digests the shards that another one publishes: copies of a shard that differ would be published as whatever
their owner has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from trainer_hooks.compare.audit import digest_pieces, lost_published, unlike_published
from trainer_hooks.compare.device_diff import DeviceDiff
from trainer_hooks.compare.diff import Piece
from trainer_hooks.compare.shard_baseline import HeldSegment, ShardBaseline
from trainer_hooks.compare.shard_differ import pieces_of
from trainer_hooks.publication.published import Head
from trainer_hooks.ranks import JSON
from trainer_hooks.source.shards import Segment, Shard, ShardSource
from vllm_delta_snapshot.errors import SourceError, VerifyError
from vllm_delta_snapshot.format.digest import add_digests, format_digest
from vllm_delta_snapshot.types import TensorSpec
from vllm_delta_snapshot.util.ordered import JOIN, Join

__all__ = ["ShardAudit", "check_audited"]


class ShardAudit:
    """One rank's part. Use it once.

    Args:
        source: the weights.
        shards: all that this rank holds, by number.
        baseline: what was published of those that it owns.
        owned: which these are.
        specs: the tensors of the run.
        kept: of those that it owns, the numbers of those that the source has not; they count as they were published.
    """

    def __init__(
        self,
        source: ShardSource,
        shards: Sequence[Shard],
        owned: Mapping[int, Shard],
        baseline: ShardBaseline,
        specs: Mapping[str, TensorSpec],
        kept: Collection[int] = (),
    ) -> None:
        self._source = source
        self._shards = shards
        self._owned = owned
        self._baseline = baseline
        self._specs = specs
        self._kept = frozenset(kept)
        self._numbers: deque[int] = deque()  # of the shards whose pieces are under way

    def run(self, pool: ThreadPoolExecutor | None, device_diff: DeviceDiff) -> JSON:
        """Digest what this rank holds; return what rank 0 needs of it. Blocks.

        Raises:
            SourceError: a shard is missing, doubled or does not fit.
        """
        current = published = elements = 0
        held = [0] * len(self._shards)
        wrong: dict[str, None] = {}
        for of in digest_pieces(self._pieces(), pool, device_diff):
            number = self._numbers.popleft()
            elements += of.piece.baseline.size
            held[number] = add_digests(held[number], of.current)
            if number in self._owned:
                current, published = add_digests(current, of.current), add_digests(published, of.published)
                if of.current != of.published:
                    wrong[of.piece.spec.name] = None
        for number in self._kept:
            for of_kept in self._baseline.of(number):
                digest = of_kept.digest()
                current, published = add_digests(current, digest), add_digests(published, digest)
                elements += of_kept.bits.size
        copies = [[of.key, of.runs.identity, digest] for of, digest in zip(self._shards, held, strict=True)]
        return {
            "current": current,
            "published": published,
            "elements": elements,
            "wrong": list(wrong),
            "copies": copies,
        }

    def _pieces(self) -> Iterator[Piece | Join]:
        missing = set(range(len(self._shards))) - self._kept
        for read in self._source.read(tuple(missing)):
            if read.number not in missing:
                raise SourceError("a shard comes twice", tensor=self._shards[read.number].key)
            missing.remove(read.number)
            shard = self._shards[read.number]
            is_owned = read.number in self._owned
            segments = self._baseline.of(read.number) if is_owned else [self._blank(of) for of in shard.segments]
            for piece in pieces_of(shard, segments, read.load()):
                self._numbers.append(read.number)
                yield piece
            if not read.stays:
                yield JOIN
        if missing:
            raise SourceError("a shard is missing", tensor=", ".join(self._shards[n].key for n in sorted(missing)[:8]))

    def _blank(self, segment: Segment) -> HeldSegment:
        """Return a segment of which nobody knows here what was published; takes no memory."""
        spec = self._specs[segment.name]
        return HeldSegment(spec, segment, np.broadcast_to(np.zeros(1, spec.element.bits), segment.runs.size))


def check_audited(parts: Sequence[JSON], head: Head) -> int:
    """On rank 0: say whether all is as published; return how many elements were read.

    Args:
        parts: what each rank's `ShardAudit.run` returned.
        head: the newest version.

    Raises:
        VerifyError: it is not.
    """
    holders: dict[tuple[str, str], dict[int, int]] = {}
    for rank, part in enumerate(parts):
        for key, identity, digest in part["copies"]:
            holders.setdefault((key, identity), {})[rank] = digest
    apart = {key: digests for (key, _), digests in holders.items() if len(set(digests.values())) > 1}
    if apart:
        key, digests = next(iter(apart.items()))
        raise VerifyError(
            "ranks hold different values of what should be copies, and one of them is published",
            tensor=", ".join(list(apart)[:5]),
            found=f"{len(apart)} such shards; of {key}: "
            + ", ".join(f"rank {rank} {format_digest(digest)}" for rank, digest in list(digests.items())[:4]),
            hint="Make them equal (broadcast), before the next publication.",
        )
    wrong = list(dict.fromkeys(name for part in parts for name in part["wrong"]))
    if wrong:
        raise unlike_published(head.version, wrong)
    for kind in ("published", "current"):
        digest = format_digest(add_digests(*(part[kind] for part in parts)))
        if digest != head.state_digest:
            raise lost_published(head.version, head.state_digest, digest)
    return sum(part["elements"] for part in parts)
