"""Every reader, given bytes that are nearly right: what it does not accept, it refuses with an error of ours."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.readers import READERS

# Where, as a fraction of the whole; how many bytes are taken away there; and what is put there.
MUTATION = st.tuples(
    st.floats(0, 1, allow_nan=False), st.sampled_from([0, 0, 1, 1, 2, 8, 100, 10_000]), st.binary(max_size=12)
)
TOKENS = [b"{", b"}", b"[", b"]", b'"', b"-1", b"1e999", b"NaN", b"null", b"18446744073709551616", b"../", b'"a":1,']


@st.composite
def nearly(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    data = draw(st.sampled_from(seeds))
    for where, taken, put in draw(st.lists(MUTATION, min_size=1, max_size=3)):
        at = int(where * len(data))
        token = draw(st.sampled_from([put, *TOKENS])) if data[:1] == b"{" else put
        data = data[:at] + token + data[at + taken :]
    return data


@pytest.mark.parametrize("name", READERS)
def test_reader_accepts_or_refuses_what_is_nearly_right(name: str):
    reader = READERS[name]
    assert all(reader(seed) for seed in reader.seeds)

    @settings(max_examples=40)
    @given(data=nearly(reader.seeds))
    def check(data: bytes) -> None:
        reader(data)

    check()


@pytest.mark.parametrize("name", READERS)
def test_reader_accepts_or_refuses_anything(name: str):
    @settings(max_examples=15)
    @given(data=st.binary(max_size=300))
    def check(data: bytes) -> None:
        READERS[name](data)

    check()
