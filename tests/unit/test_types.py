"""Tensor descriptions, the width of positions, and differences that become patches."""

import numpy as np
import pytest

from tests.support.tensors import random_bits
from vllm_delta_snapshot.errors import UnsupportedFormat
from vllm_delta_snapshot.types import TensorDifference, TensorPatch, TensorSpec, position_dtype


@pytest.mark.parametrize(
    ("numel", "expected"),
    [
        (0, np.int32),
        (1, np.int32),
        (2**31 - 1, np.int32),
        (2**31, np.int32),
        (2**31 + 1, np.int64),
        (2_800_000_000, np.int64),
        (2**62, np.int64),
    ],
)
def test_position_dtype_holds_the_last_position(numel: int, expected: type):
    dtype = position_dtype(numel)
    assert dtype == expected
    assert numel - 1 <= np.iinfo(dtype).max


@pytest.mark.parametrize(("shape", "numel"), [((), 1), ((0,), 0), ((3, 0, 2), 0), ((5,), 5), ((2, 3, 4), 24)])
def test_spec_numel_is_the_product_of_its_shape(shape: tuple[int, ...], numel: int):
    assert TensorSpec("w", shape, "BF16").numel == numel


def test_spec_num_bytes_of_a_huge_tensor_does_not_wrap():
    assert TensorSpec("w", (2**31, 2**20), "F32").num_bytes == 2**53


def test_spec_element_of_an_unknown_code_is_refused():
    with pytest.raises(UnsupportedFormat, match="F4"):
        _ = TensorSpec("w", (1,), "F4").element


def test_spec_text_names_type_and_shape():
    assert str(TensorSpec("w", (2, 3), "BF16")) == "BF16[2,3]"


def test_patch_changed_counts_positions():
    patch = TensorPatch(TensorSpec("w", (9,), "U8"), np.array([1, 5], np.int32), np.array([7, 8], np.uint8))
    assert patch.changed == 2


SPEC = TensorSpec("w", (9,), "U8")


def difference(values: list[int], absolute: list[bool] | None = None) -> TensorDifference:
    mask = None if absolute is None else np.array(absolute, np.bool_)
    return TensorDifference(SPEC, np.arange(len(values), dtype=np.int32), np.array(values, np.uint8), mask)


def test_difference_changed_counts_positions():
    assert difference([1, 255, 0]).changed == 3


def test_difference_is_added_to_the_old_values_and_wraps():
    patch = difference([1, 255, 0, 200]).resolve(np.array([255, 0, 7, 100], np.uint8))
    assert (patch.spec, patch.values.tolist(), patch.values.dtype) == (SPEC, [0, 255, 7, 44], np.uint8)


def test_absolute_values_among_differences_replace_the_old_ones():
    patch = difference([5, 5, 5], [True, False, True]).resolve(np.array([250, 250, 251], np.uint8))
    assert patch.values.tolist() == [5, 255, 5]


def test_difference_leaves_its_own_and_the_old_values_alone():
    change, old = difference([5, 5], [True, False]), np.array([1, 2], np.uint8)
    change.resolve(old)
    assert (change.values.tolist(), old.tolist()) == ([5, 5], [1, 2])


@pytest.mark.parametrize("code", ["U8", "BF16", "F32", "F64"])
def test_difference_of_any_two_values_leads_from_one_to_the_other(code: str):
    spec = TensorSpec("w", (500,), code)
    old, new = random_bits(code, 500, "old"), random_bits(code, 500, "new")
    patch = TensorDifference(spec, np.arange(500, dtype=np.int32), new - old).resolve(old)
    assert patch.values.tolist() == new.tolist()
