# SPDX-License-Identifier: Apache-2.0
"""Runs: which positions of a full tensor a shard holds, and in which order.

A shard's elements, flat, are some runs of consecutive positions of the full tensor, one after the other: one run for a
slice of rows, one a row for a slice of columns. Positions increase strictly, so the order of a shard is the order of
the tensor. Pure: no torch, no communication; memory goes with the number of runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

__all__ = ["Cut", "Runs"]

Indices = NDArray[np.int64]


class Runs:
    """See the module.

    Args:
        starts: the first position of each run, increasing.
        lengths: how long each is; empty ones are dropped.
    """

    def __init__(self, starts: Indices, lengths: Indices) -> None:
        is_run = lengths > 0
        self._starts = starts[is_run]
        self._offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths[is_run], dtype=np.int64)])

    @classmethod
    def interval(cls, start: int, stop: int) -> Runs:
        """Return the positions from `start` to before `stop`."""
        return cls(np.array([start], np.int64), np.array([max(0, stop - start)], np.int64))

    @classmethod
    def box(cls, shape: Sequence[int], indices: Sequence[Indices]) -> Runs:
        """Return the elements of a tensor at all combinations of these indices.

        Args:
            shape: the full tensor's.
            indices: for each dimension, those that the shard has, increasing.
        """
        inner, last = 1, len(shape) - 1
        while last >= 0 and indices[last].size == shape[last]:
            inner *= shape[last]
            last -= 1
        if last < 0:
            return cls.interval(0, inner)
        cuts = np.flatnonzero(np.diff(indices[last]) != 1) + 1
        pieces = np.split(indices[last], cuts)
        starts = np.array([piece[0] * inner for piece in pieces if piece.size], np.int64)
        lengths = np.array([piece.size * inner for piece in pieces if piece.size], np.int64)
        outer = np.zeros(1, np.int64)
        for dim in range(last):
            outer = (outer[:, None] + indices[dim] * math.prod(shape[dim + 1 :])).reshape(-1)
        return cls((outer[:, None] + starts).reshape(-1), np.tile(lengths, outer.size))

    @property
    def size(self) -> int:
        """How many elements there are."""
        return int(self._offsets[-1])

    @property
    def start(self) -> int | None:
        """The first position if all follow it without a gap, else ``None``; 0 if there are none."""
        if self._starts.size > 1:
            return None
        return int(self._starts[0]) if self._starts.size else 0

    @property
    def identity(self) -> str:
        """16 hexadecimal digits that are equal for equal positions, and else differ but for a chance near 2**-64."""
        return xxhash.xxh3_64_hexdigest(self._starts.tobytes() + self._offsets.tobytes())

    def positions(self, first: int, last: int) -> Indices:
        """Return the positions of the elements from `first` to before `last` of the shard."""
        i = int(np.searchsorted(self._offsets, first, side="right")) - 1
        j = int(np.searchsorted(self._offsets, last, side="left"))
        ends = np.clip(self._offsets[i : j + 1], first, last)
        found: Indices = np.repeat(self._starts[i:j] - self._offsets[i:j], np.diff(ends))
        found += np.arange(first, last)
        return found

    def to_full(self, elements: Indices) -> Indices:
        """Return the positions of some of the shard's elements, given by their place in it."""
        run = np.searchsorted(self._offsets, elements, side="right") - 1
        found: Indices = elements + (self._starts - self._offsets[:-1])[run]
        return found

    def to_local(self, positions: NDArray[np.signedinteger]) -> tuple[Indices, NDArray[np.bool_]]:
        """Say which positions the shard has, and where.

        Returns:
            The places in the shard of those that it has, in order, and for each position whether it has it.
        """
        if not self._starts.size:
            return np.empty(0, np.int64), np.zeros(positions.size, np.bool_)
        wide = positions.astype(np.int64, copy=False)
        run = np.searchsorted(self._starts, wide, side="right") - 1
        inside = wide - self._starts[run]
        is_held = (run >= 0) & (inside < np.diff(self._offsets)[run])
        found: Indices = (inside + self._offsets[run])[is_held]
        return found, is_held

    def cut(self, start: int, stop: int) -> Cut:
        """Return the part with positions from `start` to before `stop`, counted from `start`."""
        ends = self._starts + np.diff(self._offsets)
        i = int(np.searchsorted(ends, start, side="right"))
        j = max(i, int(np.searchsorted(self._starts, stop, side="left")))
        starts = np.maximum(self._starts[i:j], start)
        runs = Runs(starts - start, np.minimum(ends[i:j], stop) - starts)
        first = int(self._offsets[i] + (starts[0] - self._starts[i])) if j > i else 0
        return Cut(first, runs)


class Cut:
    """A part of a shard.

    Attributes:
        first: where in the shard it begins.
        runs: its positions.
    """

    __slots__ = ("first", "runs")

    def __init__(self, first: int, runs: Runs) -> None:
        self.first = first
        self.runs = runs
