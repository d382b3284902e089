"""Blocks: which changes share one, and that no block is larger than raw."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.encodings import any_block, assert_same_changes, blocks_for, change_at, stated_of
from vllm_delta_snapshot.dtypes import ALL_CODES, dtype_of
from vllm_delta_snapshot.format.blocks import BLOCK_CHANGES, Block, EncodedBlock, Placed, encode_block, group_blocks
from vllm_delta_snapshot.format.encodings import ENCODINGS, encoding_of
from vllm_delta_snapshot.types import Change, TensorPatch, TensorSpec, position_dtype

PACKED = encoding_of("packed")


def placed(*rows: tuple[str, str]) -> list[Placed]:
    """Return changes of an element type and in an encoding each."""
    changes = [change_at(encoding_of(name), TensorSpec(f"w{i}", (4,), code), range(4)) for i, (code, name) in
               enumerate(rows)]  # fmt: skip
    return [Placed(i, change, name) for i, (change, (_, name)) in enumerate(zip(changes, rows, strict=True))]


def large(place: int, changed: int, code: str = "U8", encoding: str = "packed") -> Placed:
    spec = TensorSpec(f"w{place}", (changed,), code)
    values = np.zeros(changed, spec.element.bits)
    return Placed(place, TensorPatch(spec, np.arange(changed, dtype=np.int32), values), encoding)


def places(blocks: Iterator[Block]) -> list[list[int]]:
    return [[member.place for member in block.members] for block in blocks]


def raw_bytes(change: Change) -> int:
    return change.changed * (position_dtype(change.spec.numel).itemsize + change.spec.element.itemsize)


def test_tensors_of_one_width_and_encoding_share_a_block():
    blocks = list(group_blocks(placed(("BF16", "packed"), ("F16", "packed"), ("I16", "packed"))))
    assert [block.encoding for block in blocks] == ["packed"]
    assert places(iter(blocks)) == [[0, 1, 2]]


def test_tensors_of_another_width_or_encoding_have_another_block():
    rows = [("BF16", "packed"), ("F32", "packed"), ("BF16", "difference"), ("BF16", "bitmap"), ("F16", "packed")]
    assert places(group_blocks(placed(*rows))) == [[0, 4], [1], [2], [3]]


@pytest.mark.parametrize("name", ["raw", "raw_difference"])
def test_raw_changes_have_a_block_each_and_at_once(name: str):
    rows = [("BF16", "packed"), ("BF16", name), ("BF16", name), ("BF16", "packed")]
    assert places(group_blocks(placed(*rows))) == [[1], [2], [0, 3]]


def test_no_changes_are_no_blocks():
    assert list(group_blocks([])) == []


def test_block_is_closed_as_soon_as_it_has_enough_changes():
    taken = []

    def items() -> Iterator[Placed]:
        for place in range(4):
            taken.append(place)
            yield large(place, BLOCK_CHANGES // 2)

    blocks = group_blocks(items())
    assert [member.place for member in next(blocks).members] == [0, 1]
    assert taken == [0, 1]
    assert places(blocks) == [[2, 3]]


def test_block_with_one_change_too_few_goes_on():
    items = [large(0, BLOCK_CHANGES - 1), large(1, 1), large(2, 1)]
    assert places(group_blocks(items)) == [[0, 1], [2]]


def test_block_of_many_tensors_is_closed_however_few_the_changes():
    items = [large(place, 1) for place in range(5000)]
    assert [len(members) for members in places(group_blocks(items))] == [4096, 904]


def test_blocks_of_each_width_fill_up_by_themselves():
    items = [large(0, BLOCK_CHANGES - 1), large(1, BLOCK_CHANGES - 1, "BF16"), large(2, 1, "BF16"), large(3, 1)]
    assert places(group_blocks(items)) == [[1, 2], [0, 3]]


@given(st.lists(st.tuples(st.sampled_from(ALL_CODES), st.sampled_from(sorted(ENCODINGS))), max_size=30))
def test_every_change_is_in_one_block_of_its_own_kind(rows: list[tuple[str, str]]):
    blocks = list(group_blocks(placed(*rows)))
    assert sorted(place for members in places(iter(blocks)) for place in members) == list(range(len(rows)))
    for block in blocks:
        found = [member.place for member in block.members]
        assert found == sorted(found)
        assert {rows[place][1] for place in found} == {block.encoding}
        assert len({dtype_of(rows[place][0]).itemsize for place in found}) == 1
        assert len(found) == 1 or encoding_of(block.encoding).is_joint


def encode(encoding: str, changes: list[Change]) -> list[EncodedBlock]:
    members = tuple(Placed(3 + i, change, encoding) for i, change in enumerate(changes))
    return encode_block(Block(encoding, members))


def assert_encoded(changes: list[Change], encoded: list[EncodedBlock]) -> None:
    """Check that the blocks are no larger than raw and hold the changes."""
    members = [member for block in encoded for member in block.members]
    assert [member.place for member in members] == list(range(3, 3 + len(changes)))
    masks = sum(-(-change.changed // 8) for change in changes if getattr(change, "absolute", None) is not None)
    assert sum(block.num_bytes for block in encoded) <= sum(map(raw_bytes, changes)) + masks
    for block in encoded:
        own = [member.change for member in block.members]
        bits = {key: (code, array.view(dtype_of(code).bits)) for key, (code, array) in block.parts.items()}
        assert_same_changes(encoding_of(block.encoding).decode(stated_of(own), bits), own)
    assert_same_changes([member.change for member in members], changes)


@given(st.data(), st.sampled_from(sorted(ENCODINGS)))
def test_encoded_block_is_never_larger_than_raw(data: st.DataObject, name: str):
    changes = data.draw(blocks_for(encoding_of(name)))
    assert_encoded(changes, encode(name, changes))


@pytest.mark.parametrize("name", [name for name, encoding in ENCODINGS.items() if encoding.is_joint])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_large_encoded_block_is_smaller_than_raw(name: str, width: int):
    changes = any_block(encoding_of(name), width, [(90, 1), (97,), (99,)] * 40, seed=0)
    encoded = encode(name, changes)
    assert_encoded(changes, encoded)
    assert [block.encoding for block in encoded] == [name]
    assert encoded[0].num_bytes < sum(map(raw_bytes, changes))


@pytest.mark.parametrize(("name", "expected"), [("packed", "raw"), ("difference", "raw_difference")])
def test_block_that_is_larger_than_raw_becomes_a_raw_one_for_each_tensor(name: str, expected: str):
    changes = [change_at(encoding_of(name), TensorSpec(f"w{i}", (100,), "BF16"), [i]) for i in range(3)]
    encoded = encode(name, changes)
    assert [(block.encoding, block.place) for block in encoded] == [(expected, 3), (expected, 4), (expected, 5)]
    assert_encoded(changes, encoded)


def test_bitmap_of_a_tensor_without_a_change_becomes_raw():
    [block] = encode("bitmap", [change_at(PACKED, TensorSpec("w", (100,), "BF16"), [])])
    assert (block.encoding, block.num_bytes) == ("raw", 0)


def test_encoded_block_counts_its_bytes():
    [block] = encode("packed", [large(0, 1000).change])
    assert block.num_bytes == sum(array.nbytes for _, array in block.parts.values())


def test_block_is_named_by_its_first_place():
    [block] = encode("packed", [large(0, 1000).change, large(1, 1000).change])
    assert block.place == 3
