# SPDX-License-Identifier: Apache-2.0
"""Sharded sources: the parts of the checkpoint's tensors that one rank holds, and where in the tensors they lie.

A source is asked once for its plan, before any weight is read, and then for a pass over its weights at each
publication. Which rank publishes what is decided between the two (`owners`): a source names all that its rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from trainer_hooks.source.fit import misfit_of
from trainer_hooks.source.items import all_exist, refuse_unreadable
from trainer_hooks.source.overlap import refuse_lent
from trainer_hooks.source.shares import Runs
from vllm_delta_snapshot.errors import SourceError
from vllm_delta_snapshot.types import TensorSpec

__all__ = ["PartialSource", "PartialTensor", "Segment", "Shard", "ShardPlan", "ShardRead", "ShardSource", "completed"]


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The elements of a shard that belong to one tensor of the checkpoint.

    Attributes:
        name: the tensor's checkpoint name.
        first: where in the shard, flat, they begin.
        runs: their positions in the tensor.
    """

    name: str
    first: int
    runs: Runs


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """What a rank holds of something: of a parameter, or of a tensor of the checkpoint.

    Attributes:
        key: what it is a shard of; the same on all ranks that hold a part of it.
        numel: elements of the whole.
        runs: the positions in the whole. Shards of one key on two ranks have no position in common, or are equal.
        segments: the tensors of the checkpoint that it has elements of, in order.
    """

    key: str
    numel: int
    runs: Runs
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ShardPlan:
    """What one rank holds.

    Attributes:
        shards: its shards, none of them empty.
        names: the checkpoint's tensors that it knows of, also those of which it holds nothing.
        misfits: what does not fit the base checkpoint, a line each.
    """

    shards: tuple[Shard, ...]
    names: frozenset[str]
    misfits: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ShardRead:
    """A shard in a pass over the weights.

    Attributes:
        number: which of the plan's it is.
        load: returns its elements, flat, on any device; called at most once.
        fingerprint: equal fingerprints promise equal values, and what is unchanged by it is not read; ``None`` makes no
            promise.
        stays: whether the elements stay as they are while later shards are asked for. If not, they are read before the
            source is asked for the next.
    """

    number: int
    load: Callable[[], torch.Tensor]
    fingerprint: Hashable | None = None
    stays: bool = False


def completed(plan: ShardPlan, copies: Mapping[str, str], kept: Collection[TensorSpec]) -> ShardPlan:
    """Return a plan with what the source has not: copies of what it has, and tensors that it never yields.

    Args:
        plan: the source's.
        copies: by tensor that the source has, the one that is its copy: its elements are those of the other.
        kept: tensors to add behind, each one shard.
    """
    shards = [
        replace(
            shard,
            segments=tuple(
                of
                for segment in shard.segments
                for of in (segment, *(replace(segment, name=copies[n]) for n in (segment.name,) if n in copies))
            ),
        )
        for shard in plan.shards
    ]
    for spec in kept:
        runs = Runs.interval(0, spec.numel)
        shards.append(Shard(spec.name, spec.numel, runs, (Segment(spec.name, 0, runs),)))
    return replace(plan, shards=tuple(shards))


@runtime_checkable
class ShardSource(Protocol):
    """Anything that yields one rank's part of the weights, again and again."""

    def plan(self, specs: Mapping[str, TensorSpec]) -> ShardPlan:
        """Say what this rank holds; called once, on every rank.

        Args:
            specs: the tensors of the base checkpoint.

        Raises:
            SourceError: that cannot be told, or cannot be published by shards.
        """
        ...

    def read(self, owned: Collection[int]) -> Iterator[ShardRead]:
        """Yield a fresh pass over some shards of the plan, each once. It may yield others too, which are not read.

        Raises:
            SourceError: the weights cannot be read, or are not those of the plan any more.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PartialTensor:
    """A box of a checkpoint's tensor.

    Attributes:
        name: the checkpoint name.
        tensor: its elements.
        offsets: where in the full tensor it begins, for each dimension; ``None`` if it is the full one.
    """

    name: str
    tensor: torch.Tensor
    offsets: tuple[int, ...] | None = None


Partials = Iterable[PartialTensor | tuple[str, torch.Tensor]]


class PartialSource:
    """Tensors, or boxes of them, under their checkpoint names, from anything that can be iterated again and again.

    For exporters such as Megatron's. Every rank iterates its own; where several have the same box one of them
    publishes it. Starting iterates once to learn the boxes; every later pass must have the same ones, in any order. The
    tensors of a list or a tuple stay as they are; of anything else each is read before the next is
    asked for, since it may lie in the same memory.

    Args:
        partials: a function that returns a fresh iterable of `PartialTensor`, or of (checkpoint name, full tensor).
    """

    def __init__(self, partials: Callable[[], Partials]) -> None:
        self._partials = partials
        self._specs: Mapping[str, TensorSpec] = {}
        self._numbers: dict[tuple[str, str], int] = {}

    def plan(self, specs: Mapping[str, TensorSpec]) -> ShardPlan:
        """See `ShardSource.plan`."""
        self._specs, self._numbers = specs, {}
        shards: list[Shard] = []
        names: set[str] = set()
        misfits: list[str] = []
        for partial, _ in self._pass():
            spec = specs.get(partial.name)
            refuse_unreadable(partial.name, partial.tensor)
            if spec is None:
                misfits.append(f"{partial.name} is not in the base checkpoint")
                continue
            names.add(spec.name)
            problem = misfit_of(spec, None, partial.tensor.dtype) or _outside(spec, partial)
            if problem:
                misfits.append(problem)
                continue
            runs = _box(spec, partial)
            if (spec.name, runs.identity) in self._numbers:
                misfits.append(f"{spec.name} comes twice with the same elements")
            elif runs.size:
                self._numbers[spec.name, runs.identity] = len(shards)
                shards.append(Shard(spec.name, spec.numel, runs, (Segment(spec.name, 0, runs),)))
        return ShardPlan(tuple(shards), frozenset(names), tuple(misfits))

    def read(self, owned: Collection[int]) -> Iterator[ShardRead]:
        """See `ShardSource.read`. Iterates to the end, whatever is owned: an exporter may be collective."""
        del owned
        for partial, stays in self._pass():
            refuse_unreadable(partial.name, partial.tensor)
            spec = self._specs.get(partial.name)
            runs = None if spec is None or _outside(spec, partial) else _box(spec, partial)
            if runs is not None and not runs.size:
                continue
            number = None if runs is None else self._numbers.get((partial.name, runs.identity))
            if number is None:
                raise SourceError(
                    "the exporter yields other boxes than when the publisher was started",
                    tensor=partial.name,
                    found=f"shape {list(partial.tensor.shape)} at {partial.offsets}",
                    hint="Start a new publisher after a change of the parallel layout.",
                )
            yield ShardRead(number, _constant(partial.tensor), stays=stays)

    def _pass(self) -> Iterator[tuple[PartialTensor, bool]]:
        """Yield the boxes, and whether they stay while later ones are asked for."""
        given = self._partials()
        if not all_exist(given):
            for item in given:
                yield _partial(item), False
            return
        partials = [_partial(item) for item in given]
        refuse_lent(((of.name, of.tensor) for of in partials), None)
        for partial in partials:
            yield partial, True


def _partial(item: PartialTensor | tuple[str, torch.Tensor]) -> PartialTensor:
    return item if isinstance(item, PartialTensor) else PartialTensor(*item)


def _constant(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor.detach().reshape(-1)


def _outside(spec: TensorSpec, partial: PartialTensor) -> str | None:
    shape = tuple(partial.tensor.shape)
    offsets = (0,) * len(shape) if partial.offsets is None else partial.offsets
    fits = len(shape) == len(spec.shape) == len(offsets)
    fits = fits and all(at >= 0 and at + n <= size for at, n, size in zip(offsets, shape, spec.shape, strict=True))
    if fits and (partial.offsets is not None or shape == spec.shape):
        return None
    return f"{spec.name} is {spec} in the base checkpoint, but has the shape {list(shape)} at {list(offsets)} here"


def _box(spec: TensorSpec, partial: PartialTensor) -> Runs:
    offsets = (0,) * len(spec.shape) if partial.offsets is None else partial.offsets
    sides = zip(offsets, partial.tensor.shape, strict=True)
    return Runs.box(spec.shape, [np.arange(at, at + size, dtype=np.int64) for at, size in sides])
