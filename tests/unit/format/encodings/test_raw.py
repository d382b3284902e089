"""`raw` and `raw_difference`: their exact arrays, and the positions and values they refuse."""

import numpy as np
import pytest

from vllm_delta_snapshot.errors import CorruptFile
from vllm_delta_snapshot.format.encodings.base import Parts, Stated
from vllm_delta_snapshot.format.encodings.raw import Raw, RawDifference
from vllm_delta_snapshot.types import TensorDifference, TensorPatch, TensorSpec, position_dtype

SPEC = TensorSpec("model.w", (10, 10), "BF16")
FAR = TensorSpec("model.far", (3_000_000_000,), "BF16")


both = pytest.mark.parametrize("encoding", [Raw(), RawDifference()], ids=["raw", "raw_difference"])


def decode_parts(
    parts: Parts, *, spec: TensorSpec = SPEC, changed: int = 2, encoding: Raw | RawDifference | None = None
) -> TensorPatch | TensorDifference:
    [change] = (encoding or Raw()).decode([Stated(spec, changed)], parts)
    return change


def decode(
    positions: list[int],
    *,
    spec: TensorSpec = SPEC,
    code: str = "I32",
    values: int | None = None,
    encoding: Raw | RawDifference | None = None,
) -> TensorPatch | TensorDifference:
    count = len(positions) if values is None else values
    dtype = {"I32": "<i4", "I64": "<i8"}.get(code, "<i4")
    indices = np.array(positions, dtype=dtype).view(f"<u{np.dtype(dtype).itemsize}")
    parts = {"indices": (code, indices), "values": (spec.dtype, np.zeros(count, dtype=spec.element.bits))}
    return decode_parts(parts, spec=spec, changed=len(positions), encoding=encoding)


@pytest.mark.parametrize("code", ["I32", "I64"])
def test_decode_of_either_width_takes_the_positions(code: str):
    assert decode([0, 5, 99], code=code).positions.tolist() == [0, 5, 99]


@both
def test_encode_of_2_to_31_elements_writes_int32(encoding: Raw | RawDifference):
    spec = TensorSpec("w", (2**31,), "BF16")
    patch = TensorPatch(spec, np.array([2**31 - 1], dtype=position_dtype(spec.numel)), np.array([7], np.uint16))
    code, positions = encoding.encode([patch])["indices"]
    assert (code, positions.tolist()) == ("I32", [2**31 - 1])


@both
def test_encode_of_one_more_than_2_to_31_elements_writes_int64(encoding: Raw | RawDifference):
    spec = TensorSpec("w", (2**31 + 1,), "BF16")
    patch = TensorPatch(spec, np.array([2**31], dtype=position_dtype(spec.numel)), np.array([7], np.uint16))
    code, positions = encoding.encode([patch])["indices"]
    assert (code, positions.tolist()) == ("I64", [2**31])


@both
def test_encode_of_fitting_arrays_copies_nothing(encoding: Raw | RawDifference):
    patch = TensorPatch(SPEC, np.array([1, 2], np.int32), np.array([3, 4], np.uint16))
    parts = encoding.encode([patch])
    assert parts["indices"][1] is patch.positions
    assert parts["values"][1] is patch.values


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        pytest.param([5, 4], "not strictly increasing", id="unsorted"),
        pytest.param([0, 50, 49, 99], "not strictly increasing", id="unsorted inside"),
        pytest.param([5, 5], "not strictly increasing", id="doubled"),
        pytest.param([0, 200, 99], "not strictly increasing", id="out of range inside"),
        pytest.param([0, -5, 99], "not strictly increasing", id="negative inside"),
        pytest.param([-1, 5], "position out of range", id="negative"),
        pytest.param([-2001493954, 5], "position out of range", id="wrapped"),
        pytest.param([5, 100], "position out of range", id="one past the end"),
        pytest.param([2**31 - 1], "position out of range", id="far out"),
    ],
)
@both
def test_decode_of_bad_positions_is_corrupt(encoding: Raw | RawDifference, positions: list[int], message: str):
    with pytest.raises(CorruptFile, match=message) as caught:
        decode(positions, encoding=encoding)
    assert caught.value.tensor == "model.w"


@pytest.mark.parametrize("positions", [[-(2**63)], [2**63 - 1], [2**32], [0, 3_000_000_000]])
def test_decode_of_bad_wide_positions_is_corrupt(positions: list[int]):
    with pytest.raises(CorruptFile, match="position out of range"):
        decode(positions, spec=FAR if positions[0] == 0 else SPEC, code="I64")


def test_decode_of_a_position_in_an_empty_tensor_is_corrupt():
    with pytest.raises(CorruptFile, match="position out of range"):
        decode([0], spec=TensorSpec("w", (0, 4), "BF16"))


@pytest.mark.parametrize("code", ["U32", "F32", "I16", "BF16"])
def test_decode_of_positions_of_another_type_is_corrupt(code: str):
    with pytest.raises(CorruptFile, match="positions have a wrong type"):
        decode([0, 1], code=code)


@pytest.mark.parametrize("values", [1, 3])
def test_decode_of_another_number_of_values_is_corrupt(values: int):
    with pytest.raises(CorruptFile, match="wrong number of values"):
        decode([0, 1], values=values)


@pytest.mark.parametrize("code", ["F16", "U16", "F32", "I16"])
def test_decode_of_values_of_another_type_is_corrupt(code: str):
    parts = {"indices": ("I32", np.zeros(1, np.uint32)), "values": (code, np.zeros(1, np.uint16))}
    with pytest.raises(CorruptFile, match="values have a wrong type"):
        decode_parts(parts, changed=1)


@pytest.mark.parametrize("names", [(), ("indices",), ("values",), ("indices", "values", "x"), ("positions", "values")])
def test_decode_of_wrong_arrays_is_corrupt(names: tuple[str, ...]):
    with pytest.raises(CorruptFile, match="wrong arrays"):
        decode_parts({name: ("I32", np.zeros(0, np.uint32)) for name in names}, changed=0)


@both
def test_decode_copies_nothing(encoding: Raw | RawDifference):
    indices, values = np.array([1, 2], np.uint32), np.array([3, 4], np.uint16)
    patch = decode_parts({"indices": ("I32", indices), "values": ("BF16", values)}, encoding=encoding)
    assert np.shares_memory(patch.positions, indices)
    assert np.shares_memory(patch.values, values)


def difference(absolute: list[bool] | None, count: int = 9) -> TensorDifference:
    mask = None if absolute is None else np.array(absolute, np.bool_)
    return TensorDifference(SPEC, np.arange(count, dtype=np.int32), np.arange(count, dtype=np.uint16), mask)


def test_difference_without_absolute_values_has_the_arrays_of_raw():
    assert list(RawDifference().encode([difference(None)])) == ["indices", "values"]


def test_absolute_values_are_a_bitmap_with_the_lowest_bit_first():
    code, bits = RawDifference().encode([difference([True, False, False, True] + [False] * 4 + [True])])["absolute"]
    assert (code, bits.tolist()) == ("U8", [0b1001, 1])


@pytest.mark.parametrize("mask", [[True] * 9, [False] * 9, [False] * 8 + [True]], ids=["all", "none", "last"])
def test_absolute_values_come_back(mask: list[bool]):
    found = decode_parts(RawDifference().encode([difference(mask)]), changed=9, encoding=RawDifference())
    assert found.absolute.tolist() == mask


@pytest.mark.parametrize("size", [0, 1, 3])
def test_decode_of_an_absolute_bitmap_of_another_length_is_corrupt(size: int):
    parts = RawDifference().encode([difference([True] * 9)]) | {"absolute": ("U8", np.zeros(size, np.uint8))}
    with pytest.raises(CorruptFile, match="wrong number of bitmap bytes"):
        decode_parts(parts, changed=9, encoding=RawDifference())


@pytest.mark.parametrize("code", ["BOOL", "I8", "F8_E4M3"])
def test_decode_of_an_absolute_bitmap_of_another_type_is_corrupt(code: str):
    parts = RawDifference().encode([difference([True] * 9)]) | {"absolute": (code, np.zeros(2, np.uint8))}
    with pytest.raises(CorruptFile, match="a bitmap has a wrong type"):
        decode_parts(parts, changed=9, encoding=RawDifference())


def test_raw_has_no_absolute_values():
    parts = RawDifference().encode([difference([True] * 9)])
    with pytest.raises(CorruptFile, match="wrong arrays"):
        decode_parts(parts, changed=9)
