"""The table of element types, held against torch and against the safetensors library."""

import numpy as np
import pytest
import safetensors.torch
import torch

from tests.support.tensors import TORCH_CODES
from vllm_delta_snapshot.dtypes import ALL_CODES, dtype_of, dtype_of_torch_name
from vllm_delta_snapshot.errors import UnsupportedFormat

LIBRARY = safetensors.torch._TYPES


@pytest.mark.parametrize("code", TORCH_CODES)
def test_dtype_has_the_width_of_its_torch_type(code: str):
    element = dtype_of(code)
    assert getattr(torch, element.torch_name).itemsize == element.itemsize


@pytest.mark.parametrize("code", TORCH_CODES)
def test_dtype_is_float_exactly_when_torch_says_so(code: str):
    kind = getattr(torch, dtype_of(code).torch_name)
    assert dtype_of(code).is_float == (kind.is_floating_point or kind.is_complex)


@pytest.mark.parametrize("code", ALL_CODES)
def test_dtype_bits_are_unsigned_little_endian_of_the_same_width(code: str):
    bits = dtype_of(code).bits
    assert (bits.kind, bits.itemsize) == ("u", dtype_of(code).itemsize)
    assert bits == bits.newbyteorder("<")


@pytest.mark.parametrize("code", ALL_CODES)
def test_dtype_is_found_by_its_torch_name(code: str):
    assert dtype_of_torch_name(dtype_of(code).torch_name) == dtype_of(code)


@pytest.mark.parametrize("code", sorted(LIBRARY))
def test_dtype_has_the_torch_type_that_the_library_gives_this_code(code: str):
    assert getattr(torch, dtype_of(code).torch_name) is LIBRARY[code]


@pytest.mark.parametrize("code", ["F4", "F6_E2M3", "", "bf16", "BF16 "])
def test_dtype_of_an_unknown_code_is_refused_by_name(code: str):
    with pytest.raises(UnsupportedFormat) as caught:
        dtype_of(code)
    assert caught.value.found == code


@pytest.mark.parametrize("name", ["complex128", "float4_e2m1fn_x2", "qint8"])
def test_dtype_of_an_unpublishable_torch_type_is_refused(name: str):
    with pytest.raises(UnsupportedFormat, match="cannot be published"):
        dtype_of_torch_name(name)


def test_position_types_are_little_endian_on_disk():
    assert np.dtype("<i4").str == "<i4"
