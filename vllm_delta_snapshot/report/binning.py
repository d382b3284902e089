# SPDX-License-Identifier: Apache-2.0
"""Binning: thousands of versions on as many columns as a picture has, without hiding what is rare. Pure.

Consecutive versions share a bin. A bin tells mean, lowest and highest value, so that a spike of one version is still
there; a picture says how many versions a bin has.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

__all__ = ["Binned", "bin_columns", "bin_size", "bin_starts", "bin_values"]

Numbers = NDArray[np.float64]

_LARGEST = 1e290


@dataclass(frozen=True, slots=True, eq=False)
class Binned:
    """Values by bin, each of shape ``(bins,)``; NaN for a bin in which nothing is known.

    Attributes:
        at: where the middle of each bin lies.
        mean: the mean of what is known.
        low: the lowest.
        high: the highest.
        size: how many values a bin has, but for the last before a break.
    """

    at: Numbers
    mean: Numbers
    low: Numbers
    high: Numbers
    size: int


def bin_size(count: int, most: int) -> int:
    """Return how many values share a bin, where there are to be about `most` bins."""
    return max(1, -(-count // most))


def bin_starts(count: int, most: int, breaks: Sequence[int] = ()) -> NDArray[np.int64]:
    """Return where each bin begins: of one size, but for the last before a break and the last of all.

    Args:
        count: how many values there are.
        most: how many bins there may be, but for one more at each break.
        breaks: where a bin must begin, ascending.
    """
    size = bin_size(count, most)
    edges = [0, *breaks, count]
    parts = [np.arange(a, b, size, dtype=np.int64) for a, b in pairwise(edges)]
    return np.concatenate(parts)


def bin_values(at: Numbers, values: Numbers, most: int, breaks: Sequence[int] = ()) -> Binned:
    """Put values into bins, with a bin of nothing at each break.

    Args:
        at: where each value lies, ascending, shape ``(n,)``.
        values: the values, NaN where unknown, shape ``(n,)``.
        most: how many bins there may be, but for one more at each break.
        breaks: where values are missing between those before and those from there on, ascending.
    """
    starts = bin_starts(values.size, most, breaks)
    if not starts.size:
        return Binned(at, values, values, values, 1)
    ends = np.append(starts[1:], values.size)
    middle = (at[starts] + at[ends - 1]) / 2
    low, high = _extremes(values, starts)
    mean = bin_columns(values[None], starts)[0]
    holes = np.searchsorted(starts, breaks)
    between = [(at[place - 1] + at[place]) / 2 for place in breaks]
    mean, low, high = (np.insert(found, holes, np.nan) for found in (mean, low, high))
    return Binned(np.insert(middle, holes, between), mean, low, high, bin_size(values.size, most))


def bin_columns(matrix: Numbers, starts: NDArray[np.int64]) -> Numbers:
    """Return the mean of what is known in each bin of columns.

    Args:
        matrix: shape ``(rows, n)``, NaN where unknown.
        starts: where each bin begins, shape ``(bins,)``.
    """
    known = ~np.isnan(matrix)
    scale = max(1.0, float(np.max(np.abs(matrix), where=known, initial=0.0)) / _LARGEST)  # sums must stay finite
    sums = np.add.reduceat(np.where(known, matrix / scale, 0.0), starts, axis=1)
    counts = np.add.reduceat(known.astype(np.float64), starts, axis=1)
    means: Numbers = np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
    return means * scale


def _extremes(values: Numbers, starts: NDArray[np.int64]) -> tuple[Numbers, Numbers]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a bin of unknown values alone
        return np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)
