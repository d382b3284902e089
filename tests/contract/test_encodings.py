"""What every encoding must do; a new one is tested by being listed in `ENCODINGS`."""

import tracemalloc
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.encodings import (
    as_read,
    assert_same_changes,
    assert_valid,
    blocks_for,
    bytes_of,
    change_at,
    claiming_frame,
    example,
    example_block,
    is_dense,
    of_kind,
    round_trip,
    stated_of,
    takes,
)
from tests.support.tensors import random_patch, rng_of, special_bits
from vllm_delta_snapshot.dtypes import ALL_CODES, dtype_of
from vllm_delta_snapshot.errors import FormatError, LimitExceeded, UnsupportedFormat
from vllm_delta_snapshot.format.encodings import ENCODINGS, Encoding, encoding_of
from vllm_delta_snapshot.format.encodings.base import Parts, Stated
from vllm_delta_snapshot.types import Change, TensorDifference, TensorPatch, TensorSpec, position_dtype

every_encoding = pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=ENCODINGS)
every_joint_encoding = pytest.mark.parametrize(
    "encoding", [pytest.param(encoding, id=name) for name, encoding in ENCODINGS.items() if encoding.is_joint]
)
every_joint_encoding_with_positions = pytest.mark.parametrize(
    "encoding",
    [
        pytest.param(encoding, id=name)
        for name, encoding in ENCODINGS.items()
        if encoding.is_joint and not is_dense(encoding)
    ],
)

FAR = TensorSpec("per_layer_embed", (2_800_000_000,), "BF16")
LAST_INT32 = TensorSpec("w", (2**16, 2**15), "BF16")
FIRST_INT64 = TensorSpec("w", (2**31 + 1,), "BF16")
PAST_2_TO_32 = TensorSpec("w", (2**33,), "U8")

TENSORS = {
    "0-d": (TensorSpec("w", (), "F32"), [0]),
    "0-d unchanged": (TensorSpec("w", (), "F32"), []),
    "empty tensor": (TensorSpec("w", (0, 4), "BF16"), []),
    "no change": (TensorSpec("w", (10, 10), "BF16"), []),
    "first": (TensorSpec("w", (10, 10), "BF16"), [0]),
    "last": (TensorSpec("w", (10, 10), "BF16"), [99]),
    "first and last": (TensorSpec("w", (10, 10), "BF16"), [0, 99]),
    "all": (TensorSpec("w", (10, 10), "BF16"), range(100)),
    "all but one": (TensorSpec("w", (10, 10), "BF16"), range(1, 100)),
    "gaps": (TensorSpec("w", (1000, 1000), "BF16"), [0, 254, 255, 256, 65535, 65536, 131_072, 262_143, 999_999]),
    "2**31 elements": (LAST_INT32, [0, 2**31 - 1]),
    "end of 2**31 elements": (LAST_INT32, [2**31 - 2, 2**31 - 1]),
    "one more than 2**31 elements": (FIRST_INT64, [0, 2**31]),
    "past 2**31": (FAR, [0, 2**31 - 1, 2**31, 2_799_999_999]),
    "past 2**32": (PAST_2_TO_32, [5, 2**32, 2**32 + 1, 2**33 - 1]),
}

BLOCKS: dict[str, list[tuple[TensorSpec, Sequence[int]]]] = {
    "one after the other": [(TensorSpec("a", (8,), "BF16"), [7]), (TensorSpec("b", (8,), "BF16"), [0])],
    "all and all": [(TensorSpec("a", (8,), "BF16"), range(8)), (TensorSpec("b", (9,), "BF16"), range(9))],
    "types of one width": [(TensorSpec(code, (3, 3), code), range(9)) for code in ("BF16", "F16", "I16", "U16")],
    "0-d": [(TensorSpec(name, (), "F32"), [0]) for name in "abc"],
    "with empty tensors": [
        (TensorSpec("a", (0,), "F32"), []),
        (TensorSpec("b", (5,), "F32"), range(5)),
        (TensorSpec("c", (3, 0), "F32"), []),
    ],
    "nothing at all": [(TensorSpec(name, (0,), "U8"), []) for name in "ab"],
    "with unchanged tensors": [
        (TensorSpec("a", (5,), "F64"), []),
        (TensorSpec("b", (5,), "F64"), [0, 4]),
        (TensorSpec("c", (5,), "F64"), []),
    ],
    "many": [(TensorSpec(f"w{i}", (7,), "BF16"), range(7)) for i in range(300)],
    "a far one in the middle": [
        (TensorSpec("a", (10,), "BF16"), [9]),
        (FAR, [0, 2**31 + 5, 2_799_999_999]),
        (TensorSpec("c", (10,), "BF16"), [0, 9]),
    ],
    "past 2**31 together": [(TensorSpec(name, (2**30,), "BF16"), [0, 2**30 - 1]) for name in "abc"],
}


def blocks(encoding: Encoding) -> Iterator[tuple[str, list[Change]]]:
    """Yield every block that an encoding can write."""
    for name, rows in ({name: [row] for name, row in TENSORS.items()} | BLOCKS).items():
        changes = [change_at(encoding, *row) for row in rows]
        if takes(encoding, changes):
            yield name, changes


@every_encoding
@given(st.data())
def test_any_block_comes_back_bit_for_bit(encoding: Encoding, data: st.DataObject):
    changes = data.draw(blocks_for(encoding))
    assert_same_changes(round_trip(encoding, changes), changes)


@every_encoding
def test_blocks_at_the_borders_come_back(encoding: Encoding):
    for name, changes in blocks(encoding):
        found = round_trip(encoding, changes)
        assert_same_changes(found, changes)
        dtypes = [position_dtype(change.spec.numel) for change in changes]
        assert [change.positions.dtype for change in found] == dtypes, name


@every_encoding
def test_every_special_pattern_of_every_type_comes_back_bit_for_bit(encoding: Encoding):
    for code in ALL_CODES:
        bits = special_bits(code)
        apart = 1 if is_dense(encoding) else 3
        positions = np.arange(bits.size, dtype=np.int32) * apart
        change = of_kind(encoding, TensorPatch(TensorSpec("w", (apart * bits.size,), code), positions, bits))
        assert_same_changes(round_trip(encoding, [change]), [change])


@every_encoding
def test_tensor_of_any_type_changed_everywhere_comes_back(encoding: Encoding):
    for code in ALL_CODES:
        change = change_at(encoding, TensorSpec("w", (7, 11), code), range(77))
        assert_same_changes(round_trip(encoding, [change]), [change])


@pytest.mark.parametrize("spec", [FAR, LAST_INT32, PAST_2_TO_32], ids=["far", "2**31", "2**33"])
@pytest.mark.parametrize(
    "encoding", [encoding for encoding in ENCODINGS.values() if takes(encoding, [change_at(encoding, FAR, [0])])]
)
def test_many_random_positions_of_a_huge_tensor_come_back(encoding: Encoding, spec: TensorSpec):
    change = of_kind(encoding, random_patch(spec, 3000))
    assert_same_changes(round_trip(encoding, [change]), [change])


@every_encoding
def test_change_with_wider_positions_than_needed_comes_back(encoding: Encoding):
    change = example(encoding)
    wide = type(change)(change.spec, change.positions.astype(np.int64), change.values)
    assert_same_changes(round_trip(encoding, [wide]), [change])


@every_encoding
def test_views_with_a_stride_come_back(encoding: Encoding):
    change = example(encoding)
    twice = type(change)(change.spec, np.repeat(change.positions, 2)[::2], np.repeat(change.values, 2)[::2])
    assert_same_changes(round_trip(encoding, [twice]), [change])


@every_encoding
def test_encode_leaves_the_changes_alone(encoding: Encoding):
    changes = example_block(encoding)
    for change in changes:
        change.positions.flags.writeable = change.values.flags.writeable = False
    encoding.encode(changes)
    assert_same_changes(changes, example_block(encoding))


@every_encoding
def test_encode_twice_gives_the_same_bytes(encoding: Encoding):
    changes = example_block(encoding)
    assert bytes_of(encoding.encode(changes)) == bytes_of(encoding.encode(changes))


@every_encoding
def test_encoded_parts_are_flat_and_of_their_code(encoding: Encoding):
    for code, array in encoding.encode(example_block(encoding)).values():
        assert (array.ndim, array.dtype.itemsize) == (1, dtype_of(code).itemsize)


@every_joint_encoding
def test_change_of_the_other_kind_is_not_written(encoding: Encoding):
    change = example(encoding)
    other = TensorPatch if encoding.is_difference else TensorDifference
    with pytest.raises(ValueError, match=f"{encoding.name} cannot write"):
        encoding.encode([change, other(change.spec, change.positions, change.values)])


@every_joint_encoding
def test_difference_with_absolute_values_is_not_written(encoding: Encoding):
    change = example(encoding)
    mask = np.zeros(change.changed, np.bool_)
    with pytest.raises(ValueError, match=f"{encoding.name} cannot write"):
        encoding.encode([TensorDifference(change.spec, change.positions, change.values, mask)])


def encoded(encoding: Encoding) -> tuple[list[Stated], dict[str, tuple[str, np.ndarray]]]:
    changes = example_block(encoding)
    return stated_of(changes), as_read(encoding.encode(changes))


def refusal(encoding: Encoding, stated: Sequence[Stated], parts: Parts) -> FormatError:
    with pytest.raises(FormatError) as caught:
        encoding.decode(stated, parts)
    assert caught.value.tensor
    assert any(item.spec.name in caught.value.tensor for item in stated)
    return caught.value


@every_encoding
def test_missing_part_is_refused(encoding: Encoding):
    stated, parts = encoded(encoding)
    for name in parts:
        refusal(encoding, stated, {key: part for key, part in parts.items() if key != name})


@every_encoding
def test_extra_part_is_refused(encoding: Encoding):
    stated, parts = encoded(encoding)
    refusal(encoding, stated, parts | {"more": ("U8", np.zeros(1, np.uint8))})


@every_encoding
def test_no_parts_are_refused(encoding: Encoding):
    refusal(encoding, encoded(encoding)[0], {})


@every_encoding
def test_wrong_count_in_metadata_is_refused(encoding: Encoding):
    stated, parts = encoded(encoding)
    for place, item in enumerate(stated):
        for off in (-100, -1, 1, 2**40, 2**62):
            wrong = [*stated]
            wrong[place] = Stated(item.spec, item.changed + off)
            refusal(encoding, wrong, parts)


@every_joint_encoding
def test_count_that_belongs_to_the_next_tensor_is_refused(encoding: Encoding):
    (one, two, *others), parts = encoded(encoding)
    refusal(encoding, [Stated(one.spec, one.changed + 1), Stated(two.spec, two.changed - 1), *others], parts)
    refusal(encoding, [Stated(one.spec, one.changed - 1), Stated(two.spec, two.changed + 1), *others], parts)


@every_joint_encoding
def test_block_of_other_tensors_is_refused(encoding: Encoding):
    stated, parts = encoded(encoding)
    more = Stated(TensorSpec("more", (5,), "BF16"), 5)
    refusal(encoding, stated[:-1], parts)
    refusal(encoding, [*stated, more], parts)
    refusal(encoding, [more, *stated], parts)


@every_joint_encoding_with_positions
def test_position_that_falls_into_the_next_tensor_is_refused(encoding: Encoding):
    specs = [TensorSpec("a", (10,), "BF16"), TensorSpec("b", (10,), "BF16")]
    parts = as_read(encoding.encode([change_at(encoding, specs[0], [0, 9]), change_at(encoding, specs[1], [5])]))
    shorter = [Stated(TensorSpec("a", (9,), "BF16"), 2), Stated(TensorSpec("b", (11,), "BF16"), 1)]
    assert "outside of the tensor" in str(refusal(encoding, shorter, parts))


@every_encoding
def test_part_that_is_cut_is_refused(encoding: Encoding):
    stated, parts = encoded(encoding)
    for name, (code, array) in parts.items():
        for kept in (0, 1, -1):
            refusal(encoding, stated, parts | {name: (code, array[:kept])})


@every_encoding
def test_part_that_is_longer_is_refused(encoding: Encoding):
    stated, parts = encoded(encoding)
    for name, (code, array) in parts.items():
        for more in (np.zeros(1, array.dtype), array[-1:], array):
            refusal(encoding, stated, parts | {name: (code, np.concatenate([array, more]))})


@every_encoding
def test_part_of_another_type_is_refused(encoding: Encoding):
    stated, parts = encoded(encoding)
    for name, (_, array) in parts.items():
        for code in ("F64", "I8", "BOOL"):
            refusal(encoding, stated, parts | {name: (code, array.astype(dtype_of(code).bits))})


@every_encoding
def test_block_of_a_smaller_tensor_is_refused(encoding: Encoding):
    stated, parts = encoded(encoding)
    small = TensorSpec("small", (99,), "BF16")
    refusal(encoding, [*stated[:-1], Stated(small, stated[-1].changed)], parts)


@every_encoding
def test_block_of_another_width_is_refused(encoding: Encoding):
    stated, parts = encoded(encoding)
    for code in ("U8", "F32", "F64"):
        refusal(encoding, [Stated(TensorSpec(s.spec.name, s.spec.shape, code), s.changed) for s in stated], parts)


@every_encoding
def test_parts_of_every_other_encoding_are_refused(encoding: Encoding):
    stated, _ = encoded(encoding)
    for other in ENCODINGS.values():
        if other is not encoding and {other.name, encoding.name} != {"raw", "raw_difference"}:
            refusal(encoding, stated, encoded(other)[1])


def decode_or_refuse(encoding: Encoding, stated: Sequence[Stated], parts: Parts) -> None:
    """Check that anything gives valid changes or a refusal, and no other error."""
    try:
        found = encoding.decode(stated, parts)
    except FormatError:
        return
    assert_valid(stated, found)


seeds = st.integers(0, 2**32 - 1)


@every_encoding
@given(st.data(), seeds)
def test_damaged_bytes_give_valid_changes_or_a_refusal(encoding: Encoding, data: st.DataObject, seed: int):
    changes = data.draw(blocks_for(encoding))
    parts = as_read(encoding.encode(changes))
    rng = np.random.default_rng(seed)
    for name, (code, array) in parts.items():
        for count in (1, 1, 2, 5):
            damaged = array.copy()
            if damaged.size:
                damaged.view(np.uint8)[rng.integers(0, array.nbytes, count)] ^= rng.integers(1, 256, count, np.uint8)
            decode_or_refuse(encoding, stated_of(changes), parts | {name: (code, damaged)})


@every_encoding
def test_any_one_byte_damaged_gives_valid_changes_or_a_refusal(encoding: Encoding):
    stated, parts = encoded(encoding)
    for name, (code, array) in parts.items():
        for place in range(array.nbytes):
            damaged = array.copy()
            damaged.view(np.uint8)[place] ^= 1 << (place % 8)
            decode_or_refuse(encoding, stated, parts | {name: (code, damaged)})


@every_encoding
@given(st.data(), seeds)
def test_parts_of_other_keys_and_blocks_give_valid_changes_or_a_refusal(
    encoding: Encoding, data: st.DataObject, seed: int
):
    changes, others = data.draw(blocks_for(encoding)), data.draw(blocks_for(encoding))
    parts, foreign = as_read(encoding.encode(changes)), as_read(encoding.encode(others))
    rng = np.random.default_rng(seed)
    decode_or_refuse(encoding, stated_of(changes), foreign)
    for name in parts:
        other = sorted(parts)[rng.integers(len(parts))]
        decode_or_refuse(encoding, stated_of(changes), parts | {name: foreign.get(name, parts[name])})
        decode_or_refuse(encoding, stated_of(changes), parts | {name: parts[other], other: parts[name]})


CLAIMED = [
    Stated(TensorSpec("w", shape, "U8"), changed)
    for shape in [(), (0,), (99,), (100,), (1000,), (2**31,), (2**40,), (2**62,), (2**63 - 1,)]
    for changed in [0, 1, 100, 101, 2**40, 2**62, 2**63 - 1]
]


@every_encoding
def test_any_claims_in_metadata_give_valid_changes_or_a_refusal(encoding: Encoding):
    parts = as_read(encoding.encode([example(encoding, code="U8")]))
    for item in CLAIMED:
        decode_or_refuse(encoding, [item], parts)


@every_joint_encoding
def test_any_claims_of_several_tensors_give_valid_changes_or_a_refusal(encoding: Encoding):
    parts = as_read(encoding.encode([example(encoding, code="U8")]))
    rng = rng_of(encoding.name)
    for _ in range(500):
        decode_or_refuse(encoding, [CLAIMED[i] for i in rng.integers(0, len(CLAIMED), rng.integers(2, 7))], parts)


@every_joint_encoding
def test_more_changes_than_elements_are_refused(encoding: Encoding):
    (one, *others), parts = encoded(encoding)
    small = Stated(TensorSpec("w", (one.changed - 1,), "BF16"), one.changed)
    assert "more changes than elements" in str(refusal(encoding, [small, *others], parts))


@every_joint_encoding
def test_block_of_more_elements_than_63_bits_count_is_beyond_the_limit(encoding: Encoding):
    huge = [Stated(TensorSpec(name, (2**62,), "U8"), 0) for name in ("w", "v")]
    parts = as_read(encoding.encode([example(encoding, code="U8")]))
    assert isinstance(refusal(encoding, huge, parts), LimitExceeded)


@every_joint_encoding
@pytest.mark.parametrize("size", [2**27, 2**40, 2**62, 2**64 - 1], ids=hex)
def test_frame_that_claims_more_than_it_can_hold_allocates_nothing(encoding: Encoding, size: int):
    stated = [Stated(TensorSpec("w", (size if size < 2**63 else 2**62,), "U8"), min(size, 2**62))]
    parts = as_read(encoding.encode([example(encoding, code="U8")]))
    lying = {name: ("U8", claiming_frame(size)) for name in parts}
    tracemalloc.start()
    try:
        refusal(encoding, stated, lying)
        for name in parts:
            refusal(encoding, stated, parts | {name: lying[name]})
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@every_encoding
def test_encoding_is_found_by_its_name(encoding: Encoding):
    assert encoding_of(encoding.name) is encoding


@every_encoding
def test_encoding_of_an_unknown_name_is_unsupported(encoding: Encoding):
    with pytest.raises(UnsupportedFormat) as caught:
        encoding_of(encoding.name + "2")
    assert encoding.name in str(caught.value.expected)
