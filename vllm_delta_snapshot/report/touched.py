# SPDX-License-Identifier: Apache-2.0
"""Touched: which share of the weights any version has changed so far.

Needs the positions, so it reads every payload once, version by version: one decoded version is in memory at a time, and
one bit a weight (1/16 of a bf16 checkpoint) for the tensors that were touched. A weight that went back to an earlier
value counts as touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from vllm_delta_snapshot.report.history import RunHistory, VersionFacts
from vllm_delta_snapshot.runs.replay import opened_version
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.types import Positions

__all__ = ["TouchedWeights", "count_touched"]

Progress = Callable[[int, int, int], None]
"""Called with (versions read, versions in all, bytes read so far)."""

_ONES: Final = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)


@dataclass(frozen=True, slots=True)
class TouchedWeights:
    """How many weights were touched.

    Attributes:
        versions: the versions, ascending and without a gap.
        elements: the weights that any of these versions up to each of them has changed.
        after: the version after which was counted: 0, or the last one whose delta was pruned.
    """

    versions: Sequence[int]
    elements: Sequence[int]
    after: int = 0


class _Bitmap:
    """One bit an element, and how many are set."""

    def __init__(self, numel: int) -> None:
        self._bytes = np.zeros(-(-numel // 8), np.uint8)

    def add(self, positions: Positions) -> int:
        """Set bits at strictly increasing positions; return how many were not set."""
        if not positions.size:
            return 0
        places = positions >> 3
        bits = np.left_shift(1, positions & 7).astype(np.uint8)
        starts = np.flatnonzero(np.concatenate([[True], places[1:] != places[:-1]]))
        at = places[starts]
        before = self._bytes[at]
        after = before | np.bitwise_or.reduceat(bits, starts)
        self._bytes[at] = after
        return int(_ONES[after ^ before].sum(dtype=np.int64))


def count_touched(folder: RunFolder, history: RunHistory, *, progress: Progress | None = None) -> TouchedWeights:
    """Count the weights touched so far, for every version up to the first gap or damaged one. Blocks.

    Versions whose deltas were pruned cannot be counted: then it begins behind them.

    Args:
        folder: the run.
        history: its history.
        progress: told after every version.

    Raises:
        CorruptFile, UnsupportedFormat, StageError: a payload is damaged.
        StoreUnavailable: the store went away.
    """
    specs = folder.read_run().specs()
    unbroken = _unbroken(history)
    bitmaps: dict[str, _Bitmap] = {}
    total, read = 0, 0
    elements: list[int] = []
    for done, facts in enumerate(unbroken, start=1):
        with opened_version(folder, facts.record, specs) as (_, changes):
            for change in changes:
                if change.spec.name not in bitmaps:
                    bitmaps[change.spec.name] = _Bitmap(change.spec.numel)
                total += bitmaps[change.spec.name].add(change.positions)
        elements.append(total)
        read += facts.record.payload_bytes
        if progress:
            progress(done, len(unbroken), read)
    return TouchedWeights([facts.version for facts in unbroken], elements, history.pruned)


def _unbroken(history: RunHistory) -> Sequence[VersionFacts]:
    broken = min((problem.version for problem in history.problems), default=None)
    counted = (facts for facts in history.versions if not facts.is_pruned)
    return [facts for facts in counted if broken is None or facts.version < broken]
