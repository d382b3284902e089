# SPDX-License-Identifier: Apache-2.0
"""The baseline of one rank: the elements that it publishes, as they were last published, and no others.

As `trainer_hooks.compare.baseline`: it moves only by `advance`, when a publication is committed. Read from the base
checkpoint through its mapped files, by the positions that are held.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from trainer_hooks.compare.pinned import HostMemory
from trainer_hooks.source.shards import Segment, Shard
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.format.digest import add_digests, patch_digest, slice_digest
from vllm_delta_snapshot.types import Change, TensorDifference, TensorSpec

__all__ = ["HeldSegment", "ShardBaseline"]

_CHUNK: Final = 1 << 20
_PLAIN: Final = HostMemory(is_pinned=False)


@dataclass(frozen=True, slots=True, eq=False)
class HeldSegment:
    """A segment of a shard, and its published bits.

    Attributes:
        spec: the whole tensor.
        segment: where its elements lie.
        bits: the elements, flat, shape ``(segment.runs.size,)``.
    """

    spec: TensorSpec
    segment: Segment
    bits: Bits

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor."""
        return self.bits.size == self.spec.numel

    def digest(self) -> int:
        """Return the part that the elements have in the digest of the tensor."""
        runs = self.segment.runs
        if runs.start is not None:
            return slice_digest(self.spec, runs.start, self.bits)
        parts = (
            patch_digest(self.spec, runs.positions(first, last), self.bits[first:last])
            for first, last in _chunks(self.bits.size)
        )
        return add_digests(*parts)


class ShardBaseline:
    """See the module.

    Args:
        base: the checkpoint to start from.
        shards: those that this rank publishes, by their numbers in its plan.
        memory: where to keep them; by default plain memory.
    """

    def __init__(self, base: Checkpoint, shards: Mapping[int, Shard], memory: HostMemory | None = None) -> None:
        memory = memory or _PLAIN
        self._held = {
            number: [
                HeldSegment(base.specs[segment.name], segment, _read(base, segment, memory))
                for segment in shard.segments
            ]
            for number, shard in shards.items()
        }
        self._by_name: dict[str, list[HeldSegment]] = {}
        for held in self:
            self._by_name.setdefault(held.spec.name, []).append(held)

    def __iter__(self) -> Iterator[HeldSegment]:
        return (held for segments in self._held.values() for held in segments)

    def of(self, number: int) -> Sequence[HeldSegment]:
        """Return the segments of one shard."""
        return self._held[number]

    def is_split(self, name: str) -> bool:
        """Say whether others hold parts of a tensor too, or this rank holds it in several."""
        held = self._by_name[name]
        return len(held) > 1 or not held[0].is_whole

    @property
    def elements(self) -> int:
        """How many elements this rank publishes."""
        return sum(held.bits.size for held in self)

    @property
    def num_bytes(self) -> int:
        """The bytes of these."""
        return sum(held.bits.nbytes for held in self)

    def reload(self, checkpoint: Checkpoint) -> None:
        """Take all elements from a checkpoint instead, in place."""
        for held in self:
            held.bits[...] = _read(checkpoint, held.segment, _PLAIN)

    def digest(self) -> int:
        """Return the part that the elements have in the state digest. Reads all of them."""
        return add_digests(*(held.digest() for held in self))

    def advance(self, changes: Iterable[Change]) -> None:
        """Write committed changes, as far as this rank holds them: those of others pass by."""
        for change in changes:
            for held in self._by_name.get(change.spec.name, ()):
                at, is_held = held.segment.runs.to_local(change.positions)
                values = change.values[is_held]
                if not isinstance(change, TensorDifference):
                    held.bits[at] = values
                elif change.absolute is None:
                    held.bits[at] += values
                else:
                    held.bits[at] = np.where(change.absolute[is_held], values, held.bits[at] + values)


def _read(base: Checkpoint, segment: Segment, memory: HostMemory) -> Bits:
    bits, runs = base.bits(segment.name), segment.runs
    if runs.start is not None:
        return memory.copy_of(bits[runs.start : runs.start + runs.size])
    found = memory.empty(runs.size, bits.dtype)
    for first, last in _chunks(runs.size):
        bits.take(runs.positions(first, last), out=found[first:last], mode="clip")
    return found


def _chunks(size: int) -> Iterator[tuple[int, int]]:
    for first in range(0, size, _CHUNK):
        yield first, min(size, first + _CHUNK)
