"""Tensor descriptions and the width of positions."""

import numpy as np
import pytest

from vllm_delta_snapshot.errors import UnsupportedFormat
from vllm_delta_snapshot.types import TensorPatch, TensorSpec, position_dtype


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
