"""Malformed safetensors files: each is refused, with our error, before anything of it is used."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_delta_snapshot.errors import CorruptFile, FormatError, LimitExceeded, ObjectNotFound, UnsupportedFormat
from vllm_delta_snapshot.format.safetensors_io import MAX_HEADER_BYTES, MappedFile

GOOD = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
    "b": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [12, 20]},
}
DATA = bytes(range(20))


def packed(header: object, data: bytes = DATA) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def read(folder: Path, data: bytes) -> MappedFile:
    path = folder / "f.safetensors"
    path.unlink(missing_ok=True)  # ext4 flushes a file that is cut to nothing and written again
    path.write_bytes(data)
    return MappedFile(path)


def entry(**changes: Any) -> dict[str, Any]:
    fields = {"dtype": "U8", "shape": [20], "data_offsets": [0, 20]} | changes
    return {"w": {k: v for k, v in fields.items() if v is not ...}}


def test_good_file_is_read(tmp_path: Path):
    assert set(read(tmp_path, packed(GOOD)).specs) == {"a", "b"}


def test_missing_file_is_not_found(tmp_path: Path):
    with pytest.raises(ObjectNotFound) as caught:
        MappedFile(tmp_path / "none.safetensors")
    assert caught.value.file == str(tmp_path / "none.safetensors")


def test_file_cut_off_anywhere_is_corrupt(tmp_path: Path):
    data = packed(GOOD)
    for length in range(len(data)):
        with pytest.raises(CorruptFile) as caught:
            read(tmp_path, data[:length])
        assert caught.value.file == str(tmp_path / "f.safetensors")


@pytest.mark.parametrize("extra", [b"\0", b"x" * 8, bytes(4096)], ids=len)
def test_file_with_trailing_bytes_is_corrupt(tmp_path: Path, extra: bytes):
    with pytest.raises(CorruptFile, match="file size does not fit its header"):
        read(tmp_path, packed(GOOD) + extra)


def test_header_longer_than_the_file_is_corrupt(tmp_path: Path):
    with pytest.raises(CorruptFile, match="cut off in its header"):
        read(tmp_path, struct.pack("<Q", 1000) + b"{}")


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 2**31, 2**63, 2**64 - 1])
def test_header_past_the_limit_is_refused_before_it_is_read(tmp_path: Path, length: int):
    with pytest.raises(LimitExceeded):
        read(tmp_path, struct.pack("<Q", length) + b"{}" * 100)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"        ", id="blanks"),
        pytest.param(b"{", id="cut"),
        pytest.param(b"{}}", id="more"),
        pytest.param(b"\xff\xfe{}", id="no utf-8"),
        pytest.param("{}".encode("utf-16"), id="utf-16"),
        pytest.param(b"\xef\xbb\xbf{}", id="byte order mark"),
        pytest.param(b"{'a': 1}", id="single quotes"),
        pytest.param(b"[" * 100_000, id="nested lists"),
        pytest.param(b'{"a":' * 100_000, id="nested objects"),
        pytest.param(b'{"w":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,20]}}', id="long number"),
        pytest.param(rb'{"\ud800":{"dtype":"U8","shape":[20],"data_offsets":[0,20]}}', id="half a character"),
    ],
)
def test_header_that_is_no_json_is_corrupt(tmp_path: Path, text: bytes):
    with pytest.raises(CorruptFile, match="not valid JSON"):
        read(tmp_path, packed(text))


@pytest.mark.parametrize("value", [[], 1, "x", None, True, 1.5])
def test_header_that_is_no_object_is_corrupt(tmp_path: Path, value: object):
    with pytest.raises(CorruptFile, match="not a JSON object"):
        read(tmp_path, packed(value))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(
            b'{"w":{"dtype":"U8","shape":[20],"data_offsets":[0,20]},'
            b'"w":{"dtype":"U8","shape":[20],"data_offsets":[0,20]}}',
            id="tensor",
        ),
        pytest.param(b'{"w":{"dtype":"U8","dtype":"U8","shape":[20],"data_offsets":[0,20]}}', id="field"),
        pytest.param(b'{"__metadata__":{"a":"1","a":"2"}}', id="metadata"),
        pytest.param(b'{"__metadata__":{},"__metadata__":{}}', id="metadata twice"),
    ],
)
def test_name_that_appears_twice_is_corrupt(tmp_path: Path, text: bytes):
    with pytest.raises(CorruptFile) as caught:
        read(tmp_path, packed(text))
    assert "twice" in str(caught.value)


@pytest.mark.parametrize("value", [[], "x", None, 1, {"a": 1}, {"a": None}, {"a": ["x"]}, {"a": {"b": "c"}}])
def test_free_metadata_that_is_no_object_of_strings_is_corrupt(tmp_path: Path, value: object):
    with pytest.raises(CorruptFile, match="__metadata__"):
        read(tmp_path, packed(entry() | {"__metadata__": value}))


ODD_NUMBERS = [-1, -(2**63), 2**63, 2**64, 2**70, True, False, 20.0, 1e300, "20", None, [20], {}]


@pytest.mark.parametrize("number", ODD_NUMBERS, ids=repr)
def test_dimension_that_is_no_plain_count_is_corrupt(tmp_path: Path, number: object):
    with pytest.raises(CorruptFile) as caught:
        read(tmp_path, packed(entry(shape=[number])))
    assert caught.value.tensor == "w"


@pytest.mark.parametrize("number", ODD_NUMBERS, ids=repr)
@pytest.mark.parametrize("side", [0, 1])
def test_offset_that_is_no_plain_count_is_corrupt(tmp_path: Path, number: object, side: int):
    offsets: list[object] = [0, 20]
    offsets[side] = number
    with pytest.raises(CorruptFile):
        read(tmp_path, packed(entry(data_offsets=offsets)))


@pytest.mark.parametrize("value", ["20", "", 20, None, {}, {"20": 1}, [[20]]], ids=repr)
def test_shape_that_is_no_list_is_corrupt(tmp_path: Path, value: object):
    with pytest.raises(CorruptFile):
        read(tmp_path, packed(entry(shape=value, data_offsets=[0, 1]), b"x"))


@pytest.mark.parametrize("value", [[], [0], [0, 20, 20], "ab", {"0": 1, "20": 2}, None, 20], ids=repr)
def test_offsets_that_are_no_pair_are_corrupt(tmp_path: Path, value: object):
    with pytest.raises(CorruptFile):
        read(tmp_path, packed(entry(data_offsets=value)))


def test_shape_of_too_many_dimensions_is_corrupt(tmp_path: Path):
    with pytest.raises(CorruptFile):
        read(tmp_path, packed(entry(shape=[2**62] * 300)))


def test_shape_whose_product_passes_64_bits_is_corrupt(tmp_path: Path):
    with pytest.raises(CorruptFile, match="data does not fit the shape"):
        read(tmp_path, packed(entry(shape=[2**32, 2**32, 20])))


@pytest.mark.parametrize("value", [1, None, ["U8"], {}, True], ids=repr)
def test_dtype_that_is_no_string_is_corrupt(tmp_path: Path, value: object):
    with pytest.raises(CorruptFile):
        read(tmp_path, packed(entry(dtype=value)))


@pytest.mark.parametrize("code", ["F4", "u8", "", "X" * 1000])
def test_dtype_that_is_unknown_is_unsupported_and_names_file_and_tensor(tmp_path: Path, code: str):
    with pytest.raises(UnsupportedFormat) as caught:
        read(tmp_path, packed(entry(dtype=code)))
    assert (caught.value.file, caught.value.tensor) == (str(tmp_path / "f.safetensors"), "w")


@pytest.mark.parametrize(
    "changes",
    [{"dtype": ...}, {"shape": ...}, {"data_offsets": ...}, {"strides": [1]}],
    ids=["no dtype", "no shape", "no offsets", "more"],
)
def test_entry_with_other_fields_is_corrupt(tmp_path: Path, changes: dict[str, Any]):
    with pytest.raises(CorruptFile, match="malformed"):
        read(tmp_path, packed(entry(**changes)))


@pytest.mark.parametrize("value", [[], "x", None, 1, ["dtype", "shape", "data_offsets"]], ids=repr)
def test_entry_that_is_no_object_is_corrupt(tmp_path: Path, value: object):
    with pytest.raises(CorruptFile, match="malformed"):
        read(tmp_path, packed({"w": value}))


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("U8", [19]), ("U8", [21]), ("U8", []), ("U8", [0]), ("F32", [20]), ("BF16", [9]), ("U8", [4, 4])],
)
def test_data_of_a_wrong_size_is_corrupt(tmp_path: Path, dtype: str, shape: list[int]):
    with pytest.raises(CorruptFile, match="data does not fit the shape"):
        read(tmp_path, packed(entry(dtype=dtype, shape=shape)))


def two(first: list[int], second: list[int]) -> bytes:
    header = {
        name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        for name, (begin, end) in (("a", first), ("b", second))
    }
    return packed(header)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param([0, 9], [10, 20], id="hole"),
        pytest.param([1, 10], [10, 20], id="hole at the front"),
        pytest.param([0, 11], [10, 20], id="overlap"),
        pytest.param([0, 20], [0, 20], id="same bytes"),
        pytest.param([0, 20], [5, 10], id="inside"),
        pytest.param([0, 9], [9, 19], id="bytes left over"),
        pytest.param([0, 10], [10, 21], id="past the end"),
        pytest.param([0, 20], [21, 21], id="empty one outside"),
        pytest.param([0, 20], [5, 5], id="empty one inside"),
    ],
)
def test_data_with_holes_or_overlaps_is_corrupt(tmp_path: Path, first: list[int], second: list[int]):
    with pytest.raises(CorruptFile):
        read(tmp_path, two(first, second))


@pytest.mark.parametrize("at", [0, 7, 20])
def test_empty_tensor_at_a_border_is_read(tmp_path: Path, at: int):
    entries = {"e": {"dtype": "BF16", "shape": [0, 4], "data_offsets": [at, at]}}
    for name, (begin, end) in {"a": (0, 7), "b": (7, 20)}.items():
        entries[name] = {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
    assert read(tmp_path, packed(entries)).bits("e").size == 0


def test_message_about_a_huge_entry_stays_short(tmp_path: Path):
    with pytest.raises(CorruptFile) as caught:
        read(tmp_path, packed(entry(shape=["x" * 100_000])))
    assert len(str(caught.value)) < 1000


def refused_or_read(folder: Path, data: bytes) -> None:
    """Read everything; the only error allowed is one of the format."""
    try:
        file = read(folder, data)
    except FormatError as error:
        str(error).encode()
        return
    for name, spec in file.specs.items():
        assert file.bits(name).size == spec.numel


HEADER_BYTES = len(packed(GOOD)) - len(DATA)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, HEADER_BYTES - 1), st.integers(1, 255)), min_size=1, max_size=4))
@example([(0, 255)])
def test_flipped_bytes_in_the_header_never_crash(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]]
):
    data = bytearray(packed(GOOD))
    for place, flip in flips:
        data[place] ^= flip
    refused_or_read(tmp_path_factory.getbasetemp(), bytes(data))


def test_any_single_bit_flip_in_the_header_never_crashes(tmp_path: Path):
    data = packed(GOOD)
    for bit in range(0, 8 * HEADER_BYTES, 3):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << (bit % 8)
        refused_or_read(tmp_path, bytes(flipped))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 30) | st.integers() | st.floats(allow_nan=True) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["U8", "BF16", "F4"]) | json_values,
        "shape": st.lists(st.integers(0, 20), max_size=2) | json_values,
        "data_offsets": st.lists(st.integers(0, 20), min_size=2, max_size=2) | json_values,
    },
)


@settings(max_examples=40)
@given(st.dictionaries(st.text(max_size=3) | st.just("__metadata__"), entries | json_values, max_size=3))
def test_any_json_as_header_never_crashes(tmp_path_factory: pytest.TempPathFactory, header: dict[str, Any]):
    refused_or_read(tmp_path_factory.getbasetemp(), packed(header))
