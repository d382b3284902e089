"""Distances in units of the last place, held against the list of all values in order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.tensors import rng_of
from vllm_delta_snapshot.audit.ulp import Distance, distance, distance_of_difference
from vllm_delta_snapshot.dtypes import dtype_of
from vllm_delta_snapshot.types import TensorDifference, TensorSpec

SMALL = ["BF16", "F16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"]


def all_values(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return every bit pattern of a type, and its value by torch, which knows nothing of ours."""
    element = dtype_of(dtype)
    bits = np.arange(1 << (8 * element.itemsize), dtype=element.bits)
    integer = {1: torch.uint8, 2: torch.int16}[element.itemsize]
    tensor = torch.from_numpy(bits.view({1: np.uint8, 2: np.int16}[element.itemsize]).copy()).view(integer)
    return bits, tensor.view(getattr(torch, element.torch_name)).double().numpy()


@pytest.mark.parametrize("dtype", SMALL)
def test_distance_counts_the_values_between(dtype: str):
    bits, values = all_values(dtype)
    is_nan = np.isnan(values)
    ranks = np.full(bits.size, -1)
    ranks[~is_nan] = np.unique(values[~is_nan], return_inverse=True)[1]  # -0.0 and 0.0 have one rank
    rng = rng_of("ulp", dtype)
    a, b = rng.integers(0, bits.size, (2, 3000))
    keep = ~(is_nan[a] | is_nan[b])
    for one, other in zip(a[keep][:200], b[keep][:200], strict=True):
        expected = abs(int(ranks[one]) - int(ranks[other]))
        assert distance(dtype, bits[[one]], bits[[other]]) == Distance(expected, 0)
    assert distance(dtype, bits[a], bits[b]) == Distance(int(abs(ranks[a] - ranks[b])[keep].max()), int((~keep).sum()))


@pytest.mark.parametrize(("dtype", "number"), [("F32", np.float32), ("F64", np.float64)])
def test_distance_of_wide_floats(dtype: str, number: type):
    one = number(1.0)
    width = dtype_of(dtype).bits

    def apart(a: np.floating, b: np.floating) -> int | None:
        return distance(dtype, np.array([a], number).view(width), np.array([b], number).view(width)).max_ulp

    assert apart(one, np.nextafter(one, number(2))) == 1
    assert apart(number(0.0), number(-0.0)) == 0
    tiny = np.nextafter(number(0), number(1))
    assert apart(-tiny, tiny) == 2
    assert apart(number(-np.inf), number(np.inf)) == 2 * (0x7F80 << 16 if dtype == "F32" else 0x7FF0 << 48)
    assert apart(number(np.nan), one) is None


@pytest.mark.parametrize("dtype", ["I64", "U8", "BOOL", "C64"])
def test_other_types_have_no_distance(dtype: str):
    bits = np.array([1], dtype_of(dtype).bits)
    assert distance(dtype, bits, bits + bits) == Distance(None, 0)


def difference(dtype: str, old: list[int], new: list[int], absolute: list[bool] | None = None) -> TensorDifference:
    bits = dtype_of(dtype).bits
    values = np.array(new, bits) - np.array(old, bits)
    positions = np.arange(len(old), dtype=np.int32)
    flags = None if absolute is None else np.array(absolute)
    return TensorDifference(TensorSpec("t", (len(old),), dtype), positions, values, flags)


def test_small_differences_are_distances_and_large_ones_need_the_values():
    assert distance_of_difference(difference("BF16", [10, 20], [11, 17])) == Distance(3, None)
    assert distance_of_difference(difference("BF16", [0x8005], [0x8001])) == Distance(4, None)
    assert distance_of_difference(difference("BF16", [0x7F80 - 127], [0x7F80])) == Distance(127, None)
    # The least that lies between numbers of different signs: infinity and -0.0.
    assert distance_of_difference(difference("BF16", [0x7F80], [0x8000])) is None
    assert distance_of_difference(difference("BF16", [0], [0x8000])) is None
    assert distance_of_difference(difference("F8_E4M3FNUZ", [1], [2])) is None
    assert distance_of_difference(difference("BF16", [1], [2], [True])) is None
    assert distance_of_difference(difference("I64", [1], [1 << 40])) == Distance(None, 0)
    assert distance_of_difference(difference("BF16", [], [])) == Distance(0, None)
