"""What every encoding must do; a new one is tested by being listed in `ENCODINGS`."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.strategies import patches_for, specs
from tests.support.tensors import random_bits, random_patch, same_patch, special_bits
from vllm_delta_snapshot.dtypes import ALL_CODES, dtype_of
from vllm_delta_snapshot.errors import FormatError, UnsupportedFormat
from vllm_delta_snapshot.format.encodings import ENCODINGS, Encoding, encoding_of
from vllm_delta_snapshot.format.encodings.base import Parts
from vllm_delta_snapshot.types import TensorPatch, TensorSpec, position_dtype

pytestmark = pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=ENCODINGS)

FAR = TensorSpec("per_layer_embed", (2_800_000_000,), "BF16")
LAST_INT32 = TensorSpec("w", (2**16, 2**15), "BF16")


def as_read(parts: Parts) -> dict[str, tuple[str, np.ndarray]]:
    """Return parts as a container gives them: flat, unsigned, read-only, in memory of their own."""
    read = {}
    for name, (code, array) in parts.items():
        bits = np.frombuffer(np.ascontiguousarray(array).tobytes(), dtype=dtype_of(code).bits)
        read[name] = (code, bits)
    return read


def round_trip(encoding: Encoding, patch: TensorPatch) -> TensorPatch:
    return encoding.decode(patch.spec, patch.changed, as_read(encoding.encode(patch)))


def patch_at(spec: TensorSpec, positions: list[int]) -> TensorPatch:
    array = np.array(positions, dtype=position_dtype(spec.numel))
    return TensorPatch(spec, array, random_bits(spec.dtype, len(positions), positions))


def assert_valid(patch: TensorPatch) -> None:
    assert patch.positions.shape == patch.values.shape == (patch.changed,)
    assert patch.positions.dtype in (np.int32, np.int64)
    assert patch.values.dtype == patch.spec.element.bits
    assert np.all(np.diff(patch.positions.astype(np.int64)) > 0)
    assert not patch.changed or 0 <= patch.positions[0] <= patch.positions[-1] < patch.spec.numel


@given(st.data())
def test_any_patch_comes_back_bit_for_bit(encoding: Encoding, data: st.DataObject):
    patch = data.draw(specs.flatmap(patches_for))
    assert same_patch(round_trip(encoding, patch), patch)


@pytest.mark.parametrize("code", ALL_CODES)
def test_every_special_pattern_comes_back_bit_for_bit(encoding: Encoding, code: str):
    bits = special_bits(code)
    patch = TensorPatch(TensorSpec("w", (3 * bits.size,), code), np.arange(bits.size, dtype=np.int32) * 3, bits)
    assert same_patch(round_trip(encoding, patch), patch)


@pytest.mark.parametrize("code", ALL_CODES)
def test_tensor_changed_everywhere_comes_back(encoding: Encoding, code: str):
    patch = patch_at(TensorSpec("w", (7, 11), code), list(range(77)))
    assert same_patch(round_trip(encoding, patch), patch)


@pytest.mark.parametrize(
    ("spec", "positions"),
    [
        pytest.param(TensorSpec("w", (), "F32"), [0], id="0-d"),
        pytest.param(TensorSpec("w", (), "F32"), [], id="0-d unchanged"),
        pytest.param(TensorSpec("w", (0, 4), "BF16"), [], id="empty tensor"),
        pytest.param(TensorSpec("w", (10, 10), "BF16"), [], id="no change"),
        pytest.param(TensorSpec("w", (10, 10), "BF16"), [0], id="first"),
        pytest.param(TensorSpec("w", (10, 10), "BF16"), [99], id="last"),
        pytest.param(TensorSpec("w", (10, 10), "BF16"), [0, 99], id="first and last"),
        pytest.param(TensorSpec("w", (1000, 1000), "BF16"), [0, 254, 255, 256, 65535, 65536, 999_999], id="gaps"),
        pytest.param(LAST_INT32, [0, 2**31 - 1], id="2**31 elements"),
        pytest.param(LAST_INT32, [2**31 - 2, 2**31 - 1], id="end of 2**31 elements"),
        pytest.param(FAR, [0, 2**31 - 1, 2**31, 2_799_999_999], id="past 2**31"),
        pytest.param(TensorSpec("w", (2**40,), "U8"), [5, 2**32, 2**32 + 1, 2**40 - 1], id="past 2**32"),
    ],
)
def test_patch_at_the_borders_comes_back(encoding: Encoding, spec: TensorSpec, positions: list[int]):
    patch = patch_at(spec, positions)
    assert same_patch(round_trip(encoding, patch), patch)


@pytest.mark.parametrize("spec", [LAST_INT32, FAR, TensorSpec("w", (5,), "BF16")], ids=str)
def test_positions_come_back_in_the_width_of_the_tensor(encoding: Encoding, spec: TensorSpec):
    assert round_trip(encoding, patch_at(spec, [0, 4])).positions.dtype == position_dtype(spec.numel)


def test_many_random_positions_of_a_huge_tensor_come_back(encoding: Encoding):
    patch = random_patch(FAR, 5000)
    assert same_patch(round_trip(encoding, patch), patch)


def test_patch_with_wider_positions_than_needed_comes_back(encoding: Encoding):
    patch = patch_at(TensorSpec("w", (100,), "BF16"), [1, 5])
    wide = TensorPatch(patch.spec, patch.positions.astype(np.int64), patch.values)
    assert same_patch(round_trip(encoding, wide), patch)


def test_encode_leaves_the_patch_alone(encoding: Encoding):
    patch = random_patch(TensorSpec("w", (1000,), "BF16"), 100)
    before = (patch.positions.tolist(), patch.values.tolist())
    encoding.encode(patch)
    assert (patch.positions.tolist(), patch.values.tolist()) == before


def test_encode_twice_gives_the_same_bytes(encoding: Encoding):
    patch = random_patch(TensorSpec("w", (1000,), "BF16"), 100)
    first, second = as_read(encoding.encode(patch)), as_read(encoding.encode(patch))
    assert {k: v[1].tobytes() for k, v in first.items()} == {k: v[1].tobytes() for k, v in second.items()}


def test_encoded_parts_are_flat_and_of_their_code(encoding: Encoding):
    for code, array in encoding.encode(random_patch(TensorSpec("w", (1000,), "BF16"), 100)).values():
        assert (array.ndim, array.dtype.itemsize) == (1, dtype_of(code).itemsize)


def encoded(encoding: Encoding) -> tuple[TensorPatch, dict[str, tuple[str, np.ndarray]]]:
    patch = random_patch(TensorSpec("w", (1000,), "BF16"), 100)
    return patch, as_read(encoding.encode(patch))


def refusal(encoding: Encoding, spec: TensorSpec, changed: int, parts: Parts) -> FormatError:
    with pytest.raises(FormatError) as caught:
        encoding.decode(spec, changed, parts)
    assert caught.value.tensor == spec.name
    return caught.value


def test_missing_part_is_refused(encoding: Encoding):
    patch, parts = encoded(encoding)
    for name in parts:
        rest = {key: part for key, part in parts.items() if key != name}
        refusal(encoding, patch.spec, patch.changed, rest)


def test_extra_part_is_refused(encoding: Encoding):
    patch, parts = encoded(encoding)
    refusal(encoding, patch.spec, patch.changed, parts | {"more": ("U8", np.zeros(1, np.uint8))})


def test_no_parts_are_refused(encoding: Encoding):
    patch, _ = encoded(encoding)
    refusal(encoding, patch.spec, patch.changed, {})


@pytest.mark.parametrize("off", [-100, -1, 1, 2**40])
def test_wrong_count_in_metadata_is_refused(encoding: Encoding, off: int):
    patch, parts = encoded(encoding)
    refusal(encoding, patch.spec, patch.changed + off, parts)


@pytest.mark.parametrize("kept", [0, 1, -1])
def test_part_that_is_cut_is_refused(encoding: Encoding, kept: int):
    patch, parts = encoded(encoding)
    for name, (code, array) in parts.items():
        refusal(encoding, patch.spec, patch.changed, parts | {name: (code, array[:kept])})


def test_part_that_is_longer_is_refused(encoding: Encoding):
    patch, parts = encoded(encoding)
    for name, (code, array) in parts.items():
        longer = np.concatenate([array, array[-1:]])
        refusal(encoding, patch.spec, patch.changed, parts | {name: (code, longer)})


def test_part_of_another_type_is_refused(encoding: Encoding):
    patch, parts = encoded(encoding)
    for name, (_, array) in parts.items():
        refusal(encoding, patch.spec, patch.changed, parts | {name: ("F64", array.astype(np.uint64))})


def test_patch_of_another_tensor_is_refused(encoding: Encoding):
    patch, parts = encoded(encoding)
    small = TensorSpec("small", (int(patch.positions[-1]),), "BF16")
    refusal(encoding, small, patch.changed, parts)


@settings(max_examples=100)
@given(st.data())
def test_damaged_bytes_give_a_valid_patch_or_a_refusal(encoding: Encoding, data: st.DataObject):
    patch = data.draw(specs.flatmap(patches_for))
    parts = as_read(encoding.encode(patch))
    name = data.draw(st.sampled_from(sorted(parts)))
    code, array = parts[name]
    damaged = array.copy()
    if damaged.size:
        for place, flip in data.draw(st.lists(st.tuples(st.integers(0, damaged.nbytes - 1), st.integers(1, 255)))):
            damaged.view(np.uint8)[place] ^= flip
    try:
        found = encoding.decode(patch.spec, patch.changed, parts | {name: (code, damaged)})
    except FormatError:
        return
    assert_valid(found)


def test_encoding_is_found_by_its_name(encoding: Encoding):
    assert encoding_of(encoding.name) is encoding


def test_encoding_of_an_unknown_name_is_unsupported(encoding: Encoding):
    with pytest.raises(UnsupportedFormat) as caught:
        encoding_of(encoding.name + "2")
    assert encoding.name in str(caught.value.expected)
