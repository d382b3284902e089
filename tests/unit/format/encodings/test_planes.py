"""Byte planes: standard zstd frames, and frames that are not what they should be."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tests.support.encodings import bytes_of, claiming_frame
from tests.support.tensors import random_bits, special_bits
from vllm_delta_snapshot.errors import CorruptFile
from vllm_delta_snapshot.format.encodings.base import Part, Parts
from vllm_delta_snapshot.format.encodings.planes import compress_planes, decompress_planes, plane_keys

WIDTHS = pytest.mark.parametrize("width", [1, 2, 4, 8])


def frame(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def compressed(data: bytes, **options: object) -> np.ndarray:
    return frame(zstandard.ZstdCompressor(**options).compress(data))


def decode(*planes: np.ndarray, count: int | None = None, most: int = 0) -> list[int]:
    parts: Parts = {f"x_{number}": ("U8", plane) for number, plane in enumerate(planes)}
    return decompress_planes("x", parts, len(planes), count=count, most=most, tensor="w").tolist()


@given(st.data(), st.sampled_from([1, 2, 4, 8]))
def test_any_array_comes_back(data: st.DataObject, width: int):
    raw = data.draw(st.binary(max_size=400))
    array = np.frombuffer(raw[: len(raw) // width * width], f"<u{width}")
    parts = compress_planes("x", array)
    assert list(parts) == plane_keys("x", width)
    for found in (
        decompress_planes("x", parts, width, count=array.size),
        decompress_planes("x", parts, width, most=array.size),
    ):
        assert (found.dtype, found.tolist()) == (array.dtype, array.tolist())


@WIDTHS
@pytest.mark.parametrize("size", [1, 2, 127, 131_072, 131_073, 400_000])
def test_arrays_of_any_size_come_back(width: int, size: int):
    array = random_bits(f"U{8 * width}", size)
    assert np.array_equal(decompress_planes("x", compress_planes("x", array), width, count=size), array)


@WIDTHS
def test_array_of_one_value_comes_back_from_the_smallest_frames(width: int):
    array = np.zeros(3_000_000, f"<u{width}")
    parts = compress_planes("x", array)
    assert sum(plane.nbytes for _, plane in parts.values()) < 300 * width
    assert not decompress_planes("x", parts, width, count=array.size).any()


def test_planes_are_the_bytes_from_the_lowest():
    parts = compress_planes("x", np.array([0x0102, 0x0304, 0xFFFF], "<u2"))
    planes = [zstandard.decompress(array.tobytes()) for _, array in parts.values()]
    assert planes == [b"\x02\x04\xff", b"\x01\x03\xff"]


def test_strided_array_comes_back():
    array = special_bits("U32")[::3]
    assert decompress_planes("x", compress_planes("x", array), 4, count=array.size).tolist() == array.tolist()


@WIDTHS
def test_empty_array_is_written_as_nothing(width: int):
    parts = compress_planes("x", np.empty(0, f"<u{width}"))
    assert [array.size for _, array in parts.values()] == [0] * width
    found = decompress_planes("x", parts, width, count=0)
    assert (found.size, found.dtype.itemsize) == (0, width)


def test_frames_are_the_same_on_every_thread():
    array = random_bits("U16", 10_000)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: bytes_of(compress_planes("x", array)), range(16)))
    assert found == [bytes_of(compress_planes("x", array))] * 16


def test_frame_of_another_compressor_is_read():
    data = bytes(range(256)) * 4
    assert decode(compressed(data, level=19, write_checksum=True), count=1024) == list(data)


@pytest.mark.parametrize(
    "plane",
    [
        pytest.param(compressed(b"abcde", write_content_size=False), id="size unknown"),
        pytest.param(compressed(b"abcd"), id="too short"),
        pytest.param(compressed(b"abcdef"), id="too long"),
        pytest.param(compressed(b""), id="frame of nothing"),
        pytest.param(frame(b""), id="nothing"),
        pytest.param(frame(b"abcde"), id="no frame"),
        pytest.param(frame(b"\x28\xb5\x2f\xfd"), id="only the magic number"),
        pytest.param(frame(compressed(b"abcde").tobytes() + b"\0"), id="a byte behind it"),
        pytest.param(frame(compressed(b"abcde").tobytes() * 2), id="another frame behind it"),
        pytest.param(frame(compressed(b"abcde").tobytes() + compressed(b"").tobytes()), id="an empty frame behind it"),
        pytest.param(frame(b"\x50\x2a\x4d\x18\x05\0\0\0abcde"), id="skippable frame"),
        pytest.param(frame(b"\x50\x2a\x4d\x18\0\0\0\0" + compressed(b"abcde").tobytes()), id="skippable frame before"),
        pytest.param(claiming_frame(5), id="fewer than it claims"),
        pytest.param(claiming_frame(5, b"\x33\x00\x00a"), id="more than it claims"),
        pytest.param(claiming_frame(5, b"\x29\x00\x00"), id="block cut off"),
        pytest.param(claiming_frame(5, b"\x07\x00\x00"), id="reserved kind of block"),
    ],
)
def test_plane_that_is_no_frame_of_its_length_is_corrupt(plane: np.ndarray):
    with pytest.raises(CorruptFile, match="x: ") as caught:
        decode(plane, count=5)
    assert caught.value.tensor == "w"
    with pytest.raises(CorruptFile, match="x: "):
        decode(compressed(b"abcde"), plane, count=5)


def test_frame_that_needs_a_dictionary_is_corrupt():
    words = zstandard.ZstdCompressionDict(b"abcdefgh" * 100, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    plane = compressed(b"abcdefgh" * 50, dict_data=words)
    with pytest.raises(CorruptFile, match="damaged zstd frame"):
        decode(plane, count=400)


def test_frame_that_is_cut_anywhere_is_corrupt():
    plane = compressed(bytes(range(256)) * 3)
    for length in range(plane.size):
        with pytest.raises(CorruptFile):
            decode(plane[:length], count=768)


def test_frame_of_nothing_for_an_empty_array_is_corrupt():
    with pytest.raises(CorruptFile, match="written as nothing"):
        decode(compressed(b""), count=0)


@pytest.mark.parametrize("most", [0, 1, 4])
def test_array_of_more_elements_than_allowed_is_corrupt(most: int):
    with pytest.raises(CorruptFile, match="wrong length") as caught:
        decode(compressed(b"abcde"), most=most)
    assert f"at most {most}" in str(caught.value.expected)


@pytest.mark.parametrize("most", [5, 6, 2**40])
def test_array_of_as_many_elements_as_allowed_is_read(most: int):
    assert decode(compressed(b"abcde"), most=most) == list(b"abcde")


@pytest.mark.parametrize("planes", [(b"abc", b"ab"), (b"abc", b""), (b"", b"abc"), (b"abc", b"abc", b"abc", b"abcd")])
def test_planes_of_unequal_lengths_are_corrupt(planes: tuple[bytes, ...]):
    arrays = [compressed(plane) if plane else frame(b"") for plane in planes]
    with pytest.raises(CorruptFile, match="wrong length"):
        decode(*arrays, most=10)
    with pytest.raises(CorruptFile, match="wrong length"):
        decode(*arrays, count=3)


@pytest.mark.parametrize("code", ["I8", "BOOL", "F8_E4M3", "U16", "BF16"])
def test_plane_of_another_type_is_corrupt(code: str):
    part: Part = (code, compressed(b"abcde"))
    with pytest.raises(CorruptFile, match="x: wrong type") as caught:
        decompress_planes("x", {"x_0": ("U8", part[1]), "x_1": part}, 2, count=5, tensor="w")
    assert (caught.value.expected, caught.value.found) == ("U8", code)
