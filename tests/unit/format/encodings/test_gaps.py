"""Positions as gaps: their symbols at the borders of 16 bits, and streams that are no positions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.encodings import bytes_of
from vllm_delta_snapshot.errors import CorruptFile
from vllm_delta_snapshot.format.encodings.gaps import decode_gaps, encode_gaps, gap_keys
from vllm_delta_snapshot.format.encodings.planes import compress_planes, decompress_planes

LONG = 0xFFFF


def symbols_of(positions: list[int]) -> list[int]:
    """Return the symbols that positions are written as."""
    parts = encode_gaps("gaps", np.array(positions, np.int64))
    return decompress_planes("gaps", parts, 2, most=1 << 20).tolist()


def decode_symbols(symbols: list[int], *, count: int, numel: int) -> list[int]:
    parts = compress_planes("gaps", np.array(symbols, "<u2"))
    return decode_gaps("gaps", parts, count=count, numel=numel, tensor="w").tolist()


def round_trip(positions: list[int], numel: int) -> list[int]:
    parts = encode_gaps("gaps", np.array(positions, np.int64))
    assert parts.keys() == gap_keys("gaps")
    if numel <= 2**31:
        assert bytes_of(encode_gaps("gaps", np.array(positions, np.int32))) == bytes_of(parts)
    return decode_gaps("gaps", parts, count=len(positions), numel=numel, tensor="w").tolist()


small = st.integers(0, 300)
border = st.integers(-3, 3).flatmap(lambda off: st.sampled_from([LONG + off, 2 * LONG + off, 3 * LONG + off]))
gaps = st.lists(st.one_of(small, small, border, st.integers(0, 10**6)), max_size=40)


@given(gaps, st.integers(1, 200_000))
def test_any_positions_come_back(gaps: list[int], rest: int):
    positions = (np.cumsum(np.array(gaps, np.int64) + 1) - 1).tolist()
    assert round_trip(positions, sum(gaps) + len(gaps) + rest) == positions


@given(gaps)
def test_any_positions_come_back_where_the_last_element_changes(gaps: list[int]):
    positions = (np.cumsum(np.array(gaps, np.int64) + 1) - 1).tolist()
    assert round_trip(positions, sum(gaps) + len(gaps)) == positions


@pytest.mark.parametrize(
    ("positions", "symbols"),
    [
        ([], []),
        ([0], [0]),
        ([0, 1, 2], [0, 0, 0]),
        ([5, 7], [5, 1]),
        ([65_534], [65_534]),
        ([65_535], [LONG, 0]),
        ([65_536], [LONG, 1]),
        ([131_069], [LONG, 65_534]),
        ([131_070], [LONG, LONG, 0]),
        ([0, 65_535], [0, 65_534]),
        ([0, 65_536], [0, LONG, 0]),
        ([3, 65_539, 65_540], [3, LONG, 0, 0]),
    ],
)
def test_positions_are_written_as_these_symbols(positions: list[int], symbols: list[int]):
    assert symbols_of(positions) == symbols
    assert round_trip(positions, 200_000) == positions


def test_positions_up_to_the_last_of_2_to_31_elements_come_back():
    positions = [0, 2**30, 2**31 - 2, 2**31 - 1]
    assert round_trip(positions, 2**31) == positions
    assert round_trip([2**31 - 1], 2**31) == [2**31 - 1]


def test_positions_far_past_2_to_32_come_back():
    positions = [2**32, 2**32 + 1, 2**35]
    assert round_trip(positions, 2**35 + 1) == positions


@pytest.mark.parametrize(
    ("symbols", "count", "numel"),
    [
        pytest.param([LONG], 0, 10**6, id="a gap that goes on for ever"),
        pytest.param([0, LONG], 1, 10**6, id="a gap that goes on after the last position"),
        pytest.param([LONG, LONG], 1, 10**6, id="only long ones"),
        pytest.param([0, 0], 1, 10**6, id="too many"),
        pytest.param([0, 0], 3, 10**6, id="too few"),
        pytest.param([], 1, 10**6, id="none"),
        pytest.param([0, 0], 0, 10**6, id="some for none"),
        pytest.param([5], 1, 5, id="one past the end"),
        pytest.param([4, 0], 2, 5, id="the second past the end"),
        pytest.param([LONG, 0], 1, 65_535, id="one past the end, by a long gap"),
        pytest.param([0], 1, 0, id="in an empty tensor"),
        pytest.param([LONG] * 20 + [0], 1, 10**6, id="more long ones than fit"),
    ],
)
def test_symbols_that_are_no_such_positions_are_corrupt(symbols: list[int], count: int, numel: int):
    with pytest.raises(CorruptFile, match="gaps: ") as caught:
        decode_symbols(symbols, count=count, numel=numel)
    assert caught.value.tensor == "w"


def test_more_symbols_than_such_positions_can_need_are_refused_before_they_are_read():
    with pytest.raises(CorruptFile, match="wrong length") as caught:
        decode_symbols([LONG] * 4 + [0], count=1, numel=200_000)
    assert "at most 4" in str(caught.value.expected)


@given(st.lists(st.one_of(st.integers(0, 3), st.sampled_from([LONG - 1, LONG])), max_size=8), st.integers(0, 8))
def test_any_symbols_are_valid_positions_or_corrupt(symbols: list[int], count: int):
    numel = 200_000
    try:
        found = decode_symbols(symbols, count=count, numel=numel)
    except CorruptFile:
        return
    assert len(found) == count
    assert found == sorted(set(found))
    assert all(0 <= position < numel for position in found)
    assert symbols_of(found) == symbols
