# SPDX-License-Identifier: Apache-2.0
"""Choose: which encoding is the smallest for a tensor's change, by what its positions and a sample of its values say.

A policy says what is allowed. `auto` allows differences; `absolute` does not, for receivers that cannot know the old
values. Every encoding's own name is a policy too, and forces it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.errors import UnsupportedFormat
from vllm_delta_snapshot.format.encodings import ENCODINGS, encoding_of
from vllm_delta_snapshot.types import Change, Positions, TensorDifference, TensorPatch, TensorSpec

__all__ = ["POLICIES", "choose", "encoding_for", "encodings_of"]

_ABSOLUTE: Final = ("raw", "packed", "bitmap", "dense")
_DIFFERENCE: Final = ("raw_difference", "difference", "bitmap_difference", "dense_difference")
_DENSE: Final = ("dense", "dense_difference")
_POLICIES: Final = {"auto": _ABSOLUTE + _DIFFERENCE, "absolute": _ABSOLUTE}

POLICIES: Final = (*_POLICIES, *ENCODINGS)
"""Every policy's name."""

_BITMAP_FROM: Final = 1 / 8
"""The density from which a bitmap is no larger than gaps, and faster."""

_SAMPLE: Final = 512


def encodings_of(policy: str) -> tuple[str, ...]:
    """Return the encodings that a policy may choose.

    Raises:
        UnsupportedFormat: there is no such policy.
    """
    if policy in _POLICIES:
        return _POLICIES[policy]
    if policy not in ENCODINGS:
        raise UnsupportedFormat("unknown encoding", expected=" ".join(POLICIES), found=policy)
    alike = _DIFFERENCE if encoding_of(policy).is_difference else _ABSOLUTE
    if policy in _DENSE:
        return alike  # where not all elements change, it has to be another
    # What is forced may still come out larger than raw, which is then taken.
    return tuple(dict.fromkeys((policy, alike[0])))


@dataclass(frozen=True, slots=True)
class Chosen:
    """A change in the form that its encoding writes."""

    change: Change
    encoding: str


def choose(policy: str, spec: TensorSpec, positions: Positions, old: Bits, new: Bits) -> Chosen:
    """Choose an encoding for one tensor's change.

    Args:
        policy: one of `POLICIES`.
        spec: the tensor.
        positions: where it changes, shape ``(k,)``.
        old: the bit patterns there before, shape ``(k,)``.
        new: after, shape ``(k,)``.

    Raises:
        UnsupportedFormat: there is no such policy.
    """
    if policy in _POLICIES:
        is_difference = policy == "auto" and _is_difference_smaller(old, new)
        name = _of_density(spec, positions.size, is_difference)
    else:
        is_difference = encoding_of(policy).is_difference
        name = policy
        if policy in _DENSE and positions.size != spec.numel:
            name = _of_density(spec, positions.size, is_difference)
    if is_difference:
        return Chosen(TensorDifference(spec, positions, new - old), name)
    return Chosen(TensorPatch(spec, positions, new), name)


def encoding_for(change: Change, allowed: Sequence[str]) -> str:
    """Choose an encoding for a change whose form is given, as merging leaves it.

    Args:
        change: the change.
        allowed: the encodings of the run.

    Returns:
        One that is allowed, if there is one for a change of this form.
    """
    is_difference = isinstance(change, TensorDifference)
    plain = "raw_difference" if is_difference else "raw"
    if isinstance(change, TensorDifference) and change.is_mixed:
        return plain
    compact = _of_density(change.spec, change.changed, is_difference)
    fallback = "difference" if is_difference else "packed"
    return next((name for name in (compact, fallback) if name in allowed), plain)


def _of_density(spec: TensorSpec, changed: int, is_difference: bool) -> str:
    if changed == spec.numel:
        return "dense_difference" if is_difference else "dense"
    if changed >= _BITMAP_FROM * spec.numel:
        return "bitmap_difference" if is_difference else "bitmap"
    return "difference" if is_difference else "packed"


def _is_difference_smaller(old: Bits, new: Bits) -> bool:
    step = max(1, new.size // _SAMPLE)
    new = new[::step]
    moves = new - old[::step]
    is_exception = (moves + moves.dtype.type(1)) & ~moves.dtype.type(2) != 0
    share = float(np.count_nonzero(is_exception)) / max(1, moves.size)
    if share < 0.5:
        return True
    # As planes compress: by the entropy of each byte. A difference costs its sign and its place besides.
    difference = 1 / 8 + share * (1 / 8 + _plane_bytes(moves[is_exception]))
    return difference < _plane_bytes(new)


def _plane_bytes(values: Bits) -> float:
    """Return the order-0 entropy of an array's byte planes, in bytes an element."""
    planes = np.ascontiguousarray(values).view(np.uint8).reshape(-1, values.dtype.itemsize)
    total = 0.0
    for number in range(planes.shape[1]):
        counts = np.bincount(planes[:, number], minlength=1)
        shares = counts[counts > 0] / max(1, planes.shape[0])
        total -= float(np.sum(shares * np.log2(shares))) / 8
    return total
