# SPDX-License-Identifier: Apache-2.0
"""Merge: the changes of several versions -> one change a tensor, tensor by tensor.

Where several touch an element, the last absolute value wins and later differences add to it. Differences that add up to
nothing are dropped. Two ways, the cheaper one is taken (docs/design.md, "Merge"): sorting costs by the changes, going
through the tensor in cache-sized windows costs by its elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.types import Change, Positions, TensorDifference, TensorPatch, TensorSpec, position_dtype

__all__ = ["FOLD_CHANGES", "fold", "merge", "merge_by_scratch", "merge_by_sort"]

FOLD_CHANGES: Final = 1 << 24
"""As many changes are held at most beside what versions come to: 100 MB of bf16."""

_WINDOW: Final = 1 << 17
_SCRATCH_FROM: Final = 1 / 8
"""Changes an element, over all versions, from which windows are cheaper than sorting."""


def merge(versions: Iterable[Sequence[Change]]) -> Iterator[Change]:
    """Merge changes.

    Args:
        versions: the changes of each version, oldest first.

    Yields:
        One change for every tensor that any version touched, in order of first appearance. Applying them equals
        applying the versions one by one. A tensor touched once keeps its arrays.
    """
    by_name: dict[str, list[Change]] = {}
    for changes in versions:
        for change in changes:
            by_name.setdefault(change.spec.name, []).append(change)
    for changes in by_name.values():
        if len(changes) == 1:
            yield changes[0]
            continue
        is_alike = len({type(change) for change in changes}) == 1
        of_one_kind = is_alike and all(_absolute(change) is None for change in changes)
        total = sum(change.changed for change in changes)
        is_dense = total >= _SCRATCH_FROM * changes[0].spec.numel
        yield merge_by_scratch(changes) if is_dense or not of_one_kind else merge_by_sort(changes)


def fold(versions: Iterable[Sequence[Change]], *, most: int | None = None) -> list[Sequence[Change]]:
    """Take versions one by one and merge them on the way, so that memory does not grow with how many there are.

    Args:
        versions: the changes of each version, oldest first; best made when they are asked for.
        most: how many changes may wait to be merged; by default `FOLD_CHANGES`.

    Returns:
        Few versions that come to the same.
    """
    most = FOLD_CHANGES if most is None else most
    merged: list[Sequence[Change]] = []
    waiting: list[Sequence[Change]] = []
    count = 0
    for changes in versions:
        waiting.append(changes)
        count += sum(change.changed for change in changes)
        if count >= most and len(merged) + len(waiting) > 1:
            merged, waiting, count = [list(merge([*merged, *waiting]))], [], 0
    return [*merged, *waiting]


def merge_by_sort(changes: Sequence[Change]) -> Change:
    """Merge one tensor's changes, all absolute or all differences; costs by the changes."""
    positions = np.concatenate([change.positions for change in changes])
    values = np.concatenate([change.values for change in changes])
    # A stable sort keeps equal positions in version order, so the last of each group is the newest. On runs that are
    # sorted already it is a merge.
    order = np.argsort(positions, kind="stable")
    positions, values = positions[order], values[order]
    is_last = np.ones(positions.size, dtype=bool)
    np.not_equal(positions[1:], positions[:-1], out=is_last[:-1])
    spec = changes[0].spec
    if isinstance(changes[0], TensorPatch):
        return TensorPatch(spec, positions[is_last], values[is_last])
    if not positions.size:
        return TensorDifference(spec, positions, values)
    starts = np.flatnonzero(np.concatenate([[True], is_last[:-1]]))
    sums = np.add.reduceat(values, starts, dtype=values.dtype)
    is_move = sums != 0
    return TensorDifference(spec, positions[is_last][is_move], sums[is_move])


def merge_by_scratch(changes: Sequence[Change]) -> Change:
    """Merge one tensor's changes, of either kind or both; costs by its elements."""
    spec = changes[0].spec
    scratch = _Scratch(spec)
    cuts = [np.searchsorted(change.positions, np.arange(0, spec.numel + _WINDOW, _WINDOW)) for change in changes]
    for number in range(cuts[0].size - 1):
        spans = [(int(cut[number]), int(cut[number + 1])) for cut in cuts]
        if any(first < last for first, last in spans):
            scratch.window(number * _WINDOW, changes, spans)
    return scratch.result(is_patch=all(isinstance(change, TensorPatch) for change in changes))


class _Scratch:
    """One window of a tensor at a time: what its elements come to, and what was found so far."""

    def __init__(self, spec: TensorSpec) -> None:
        size = min(_WINDOW, spec.numel)
        self._spec = spec
        self._values = np.zeros(size, spec.element.bits)
        self._is_touched = np.zeros(size, np.bool_)
        self._is_absolute = np.zeros(size, np.bool_)
        self._positions: list[Positions] = []
        self._found: list[Bits] = []
        self._absolute: list[NDArray[np.bool_]] = []

    def window(self, start: int, changes: Sequence[Change], spans: Sequence[tuple[int, int]]) -> None:
        """Apply the changes of one window in turn, and note what they come to."""
        for array in (self._values, self._is_touched, self._is_absolute):
            array.fill(0)
        for change, (first, last) in zip(changes, spans, strict=True):
            if first < last:
                self._apply(change, first, last, start)
        touched = np.flatnonzero(self._is_touched)
        values, is_absolute = self._values[touched], self._is_absolute[touched]
        is_change = is_absolute | (values != 0)
        self._positions.append((touched[is_change] + start).astype(position_dtype(self._spec.numel)))
        self._found.append(values[is_change])
        self._absolute.append(is_absolute[is_change])

    def result(self, *, is_patch: bool) -> Change:
        """Return the merged change."""
        positions = np.concatenate([np.empty(0, position_dtype(self._spec.numel)), *self._positions])
        values = cast("Bits", np.concatenate([np.empty(0, self._spec.element.bits), *self._found]))
        if is_patch:
            return TensorPatch(self._spec, positions, values)
        is_absolute = np.concatenate([np.empty(0, np.bool_), *self._absolute])
        if is_absolute.all() and is_absolute.size:
            return TensorPatch(self._spec, positions, values)
        return TensorDifference(self._spec, positions, values, is_absolute if is_absolute.any() else None)

    def _apply(self, change: Change, first: int, last: int, start: int) -> None:
        at, values = change.positions[first:last] - start, change.values[first:last]
        self._is_touched[at] = True
        if isinstance(change, TensorPatch):
            self._values[at] = values
            self._is_absolute[at] = True
            return
        absolute = _absolute(change)
        if absolute is None:
            self._values[at] += values
            return
        is_absolute = absolute[first:last]
        self._values[at] = np.where(is_absolute, values, self._values[at] + values)
        self._is_absolute[at] |= is_absolute


def _absolute(change: Change) -> NDArray[np.bool_] | None:
    return change.absolute if isinstance(change, TensorDifference) else None
