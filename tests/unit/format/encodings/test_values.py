"""Values of a block: planes of new ones; signs and exceptions of differences."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tensors import special_bits
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.errors import CorruptFile
from vllm_delta_snapshot.format.encodings.base import Parts
from vllm_delta_snapshot.format.encodings.gaps import decode_gaps, encode_gaps
from vllm_delta_snapshot.format.encodings.planes import compress_planes, decompress_planes
from vllm_delta_snapshot.format.encodings.values import Planes, Signs, ValueCoder

WIDTHS = pytest.mark.parametrize("width", [1, 2, 4, 8])
CODERS = {"planes": Planes(), "signs": Signs()}
each_coder = pytest.mark.parametrize("coder", CODERS.values(), ids=CODERS)


def moves(differences: list[int], width: int) -> Bits:
    """Return signed differences as they are stored: wrapped to the width."""
    return np.array([value % (1 << (8 * width)) for value in differences], f"<u{width}")


def assert_comes_back(coder: ValueCoder, values: Bits) -> None:
    parts = coder.encode(values)
    width = values.dtype.itemsize
    assert parts.keys() == coder.keys(width)
    found = coder.decode(parts, count=values.size, itemsize=width, tensor="w")
    assert (found.dtype, found.tolist()) == (values.dtype, values.tolist())


def exceptions_of(parts: Parts, width: int) -> tuple[list[int], list[int]]:
    """Return the places and the zigzag numbers of the exceptions in encoded values."""
    zigzag = decompress_planes("exceptions", parts, width, most=1 << 20).tolist()
    places = decode_gaps("exception_gaps", parts, count=len(zigzag), numel=1 << 20, tensor="w").tolist()
    return places, zigzag


@each_coder
@WIDTHS
@given(st.data())
def test_any_values_come_back(coder: ValueCoder, width: int, data: st.DataObject):
    raw = data.draw(st.binary(max_size=64 * width))
    ones = data.draw(st.lists(st.sampled_from([1, -1, 0, 2, -2]), max_size=64))
    any_bits = np.frombuffer(raw[: len(raw) // width * width], f"<u{width}")
    assert_comes_back(coder, np.concatenate([any_bits, moves(ones, width)]))


@each_coder
def test_every_value_of_a_byte_comes_back(coder: ValueCoder):
    assert_comes_back(coder, np.arange(256, dtype=np.uint8))
    for value in range(256):
        assert_comes_back(coder, np.full(9, value, np.uint8))


@each_coder
def test_every_value_of_two_bytes_comes_back(coder: ValueCoder):
    assert_comes_back(coder, np.arange(1 << 16, dtype="<u2"))


@each_coder
@pytest.mark.parametrize("code", ["U8", "U16", "U32", "U64"])
def test_special_patterns_come_back(coder: ValueCoder, code: str):
    assert_comes_back(coder, special_bits(code))


@each_coder
@WIDTHS
def test_any_number_of_values_comes_back(coder: ValueCoder, width: int):
    for count in (0, 1, 7, 8, 9, 16, 17):
        assert_comes_back(coder, moves([1, -1, 5] * 6, width)[:count])


@WIDTHS
def test_no_difference_is_an_exception_of_number_0(width: int):
    parts = Signs().encode(moves([1, 0, -1, 0], width))
    assert exceptions_of(parts, width) == ([1, 3], [0, 0])
    assert_comes_back(Signs(), moves([0] * 20, width))


@WIDTHS
def test_ones_up_and_down_need_a_bit_each(width: int):
    parts = Signs().encode(moves([1, -1, -1, 1, 1, 1, 1, 1, -1, 1], width))
    assert parts["signs"][1].tolist() == [0b11111001, 0b10]
    assert all(not array.size for name, (_, array) in parts.items() if name != "signs")


@WIDTHS
def test_exceptions_are_numbered_in_order_of_magnitude(width: int):
    top = 1 << (8 * width - 1)
    differences = [0, -2, 2, -3, 3, 63, -64, 64, top - 1, -top]
    expected = [0, 3, 4, 5, 6, 126, 127, 128, 2 * top - 2, 2 * top - 1]
    assert exceptions_of(Signs().encode(moves(differences, width)), width)[1] == expected
    assert_comes_back(Signs(), moves(differences, width))


@WIDTHS
def test_zigzag_borders_of_every_width_come_back(width: int):
    tops = [1 << bit for bit in range(8 * width)]
    around = sorted({(sign * top + off) for top in tops for sign in (1, -1) for off in (-2, -1, 0, 1, 2)})
    assert_comes_back(Signs(), moves(around, width))


def encoded(differences: list[int]) -> Parts:
    return Signs().encode(moves(differences, 2))


def refusal(parts: Parts, count: int) -> str:
    with pytest.raises(CorruptFile) as caught:
        Signs().decode(parts, count=count, itemsize=2, tensor="w")
    assert caught.value.tensor == "w"
    return str(caught.value)


@pytest.mark.parametrize("size", [0, 1, 3])
def test_signs_of_another_length_are_corrupt(size: int):
    assert "signs: " in refusal(encoded([1] * 9) | {"signs": ("U8", np.zeros(size, np.uint8))}, 9)


@pytest.mark.parametrize("code", ["BOOL", "I8", "U16"])
def test_signs_of_another_type_are_corrupt(code: str):
    assert "signs: " in refusal(encoded([1] * 9) | {"signs": (code, np.zeros(2, np.uint8))}, 9)


def test_exceptions_without_a_place_are_corrupt():
    assert "exception_gaps" in refusal(encoded([1, 5, 7]) | encode_gaps("exception_gaps", np.array([1])), 3)


def test_places_without_an_exception_are_corrupt():
    assert "exception_gaps" in refusal(encoded([1, 1, 1]) | encode_gaps("exception_gaps", np.array([1])), 3)


def test_exceptions_past_the_last_value_are_corrupt():
    assert "exception_gaps" in refusal(encoded([1, 5, 7]) | encode_gaps("exception_gaps", np.array([1, 3])), 3)


def test_more_exceptions_than_values_are_corrupt():
    many = compress_planes("exceptions", np.arange(4, dtype="<u2"))
    assert "exceptions: wrong length" in refusal(
        encoded([5, 6, 7]) | many | encode_gaps("exception_gaps", np.arange(4)), 3
    )
