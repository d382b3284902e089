"""Where a block changes: gaps, a bitmap, or all elements."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.encodings import bytes_of
from vllm_delta_snapshot.errors import CorruptFile
from vllm_delta_snapshot.format.encodings.planes import compress_planes, decompress_planes
from vllm_delta_snapshot.format.encodings.positions import _PIECE, All, Bitmap, Gaps, PositionCoder

CODERS = {"gaps": Gaps(), "bitmap": Bitmap()}
each_coder = pytest.mark.parametrize("coder", CODERS.values(), ids=CODERS)


def round_trip(coder: PositionCoder, positions: list[int], numel: int) -> list[int]:
    parts = coder.encode(np.array(positions, np.int64), numel)
    assert parts.keys() == coder.keys
    assert bytes_of(coder.encode(np.array(positions, np.int32), numel)) == bytes_of(parts)
    return coder.decode(parts, count=len(positions), numel=numel, tensor="w").tolist()


def decode_bytes(data: list[int], *, count: int, numel: int) -> list[int]:
    """Decode a bitmap of these bytes."""
    parts = compress_planes("bitmap", np.array(data, np.uint8))
    return Bitmap().decode(parts, count=count, numel=numel, tensor="w").tolist()


@each_coder
@given(st.data(), st.integers(1, 100))
def test_any_positions_come_back(coder: PositionCoder, data: st.DataObject, numel: int):
    positions = sorted(data.draw(st.sets(st.integers(0, numel - 1))))
    assert round_trip(coder, positions, numel) == positions


@each_coder
@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9])
def test_no_positions_and_all_come_back(coder: PositionCoder, numel: int):
    assert round_trip(coder, [], numel) == []
    assert round_trip(coder, list(range(numel)), numel) == list(range(numel))


@each_coder
@pytest.mark.parametrize("numel", [_PIECE - 1, _PIECE, _PIECE + 1, 2 * _PIECE, 2 * _PIECE + 13])
def test_positions_over_the_borders_of_pieces_come_back(coder: PositionCoder, numel: int):
    near = {0, 1, _PIECE - 2, _PIECE - 1, _PIECE, _PIECE + 1, 2 * _PIECE - 1, 2 * _PIECE, numel - 2, numel - 1}
    positions = sorted(position for position in near if position < numel)
    assert round_trip(coder, positions, numel) == positions


@pytest.mark.parametrize("positions", [[], [0], [2 * _PIECE + 5], [_PIECE, _PIECE + 5]], ids=str)
def test_bitmap_with_pieces_without_a_change_comes_back(positions: list[int]):
    assert round_trip(Bitmap(), positions, 3 * _PIECE) == positions


def test_many_positions_over_several_pieces_come_back():
    numel = 2 * _PIECE + 13
    positions = np.flatnonzero(np.random.default_rng(0).random(numel) < 0.2)
    for coder in CODERS.values():
        parts = coder.encode(positions, numel)
        assert np.array_equal(coder.decode(parts, count=positions.size, numel=numel, tensor="w"), positions)


@pytest.mark.parametrize(
    ("positions", "numel", "expected"),
    [([0], 1, [1]), ([0, 3, 7], 8, [0b10001001]), ([8], 9, [0, 1]), ([], 9, [0, 0]), ([1], 17, [2, 0, 0]), ([], 0, [])],
)
def test_bitmap_has_the_lowest_bit_first(positions: list[int], numel: int, expected: list[int]):
    parts = Bitmap().encode(np.array(positions, np.int64), numel)
    assert decompress_planes("bitmap", parts, 1, most=10).tolist() == expected


@pytest.mark.parametrize(
    ("data", "count", "numel"),
    [
        pytest.param([0b1000], 1, 3, id="a bit beyond the end"),
        pytest.param([0b1001], 2, 3, id="a bit beyond the end, among others"),
        pytest.param([0b1001], 1, 3, id="one more bit, beyond the end"),
        pytest.param([0b1000_0000], 0, 7, id="a bit beyond the end of no change"),
        pytest.param([0b11], 1, 8, id="too many bits"),
        pytest.param([0b11], 3, 8, id="too few bits"),
        pytest.param([0], 1, 8, id="no bits"),
        pytest.param([1], 0, 8, id="a bit for no change"),
        pytest.param([1, 0], 1, 8, id="a byte too many"),
        pytest.param([1], 1, 9, id="a byte too few"),
        pytest.param([], 1, 8, id="nothing"),
        pytest.param([1], 1, 0, id="a bit of an empty tensor"),
    ],
)
def test_bitmap_that_does_not_fit_is_corrupt(data: list[int], count: int, numel: int):
    with pytest.raises(CorruptFile, match="bitmap: ") as caught:
        decode_bytes(data, count=count, numel=numel)
    assert caught.value.tensor == "w"


@pytest.mark.parametrize("off", [-1, 1])
def test_bitmap_of_several_pieces_with_another_number_of_bits_is_corrupt(off: int):
    positions = np.arange(0, 2 * _PIECE, 100)
    parts = Bitmap().encode(positions, 2 * _PIECE)
    with pytest.raises(CorruptFile, match="wrong number of bits"):
        Bitmap().decode(parts, count=positions.size + off, numel=2 * _PIECE, tensor="w")


def test_all_elements_are_written_as_nothing():
    assert All().encode(np.arange(5), 5) == {}
    assert All().decode({}, count=5, numel=5, tensor="w").tolist() == [0, 1, 2, 3, 4]
    assert All().decode({}, count=0, numel=0, tensor="w").tolist() == []


@pytest.mark.parametrize("count", [0, 4, 6, 2**62])
def test_all_elements_of_another_number_are_corrupt(count: int):
    with pytest.raises(CorruptFile, match="not dense"):
        All().decode({}, count=count, numel=5, tensor="w")
