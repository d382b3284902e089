"""The payload container: blocks to files and back, and files that hold something else."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.encodings import assert_same_changes, assert_valid, blocks_for, example
from tests.support.tensors import random_patch
from vllm_delta_snapshot.dtypes import ALL_CODES
from vllm_delta_snapshot.errors import CorruptFile, FormatError, ObjectNotFound, UnsupportedFormat
from vllm_delta_snapshot.format.blocks import EncodedBlock, Placed
from vllm_delta_snapshot.format.container import PlannedFile, StoredChange, decode_file, plan_file
from vllm_delta_snapshot.format.encodings import ENCODINGS, encoding_of
from vllm_delta_snapshot.format.encodings.base import Stated
from vllm_delta_snapshot.format.safetensors_io import MappedFile
from vllm_delta_snapshot.types import Change, TensorPatch, TensorSpec

NAME = "delta.safetensors"


def block_of(encoding: str, members: dict[int, Change]) -> EncodedBlock:
    placed = tuple(Placed(place, change, encoding) for place, change in members.items())
    return EncodedBlock(encoding, placed, encoding_of(encoding).encode(list(members.values())))


def raw_blocks(patches: Sequence[Change]) -> list[EncodedBlock]:
    return [block_of("raw", {place: patch}) for place, patch in enumerate(patches)]


def stored(blocks: Sequence[EncodedBlock]) -> list[StoredChange]:
    """Return what metadata says, in the order of places."""
    found = [
        StoredChange(member.place, member.change.spec, member.change.changed, block.encoding, block.place)
        for block in blocks
        for member in block.members
    ]
    return sorted(found, key=lambda change: change.place)


def changes_of(blocks: Sequence[EncodedBlock]) -> list[Change]:
    members = [member for block in blocks for member in block.members]
    return [member.change for member in sorted(members, key=lambda member: member.place)]


def write(folder: Path, file: PlannedFile) -> Path:
    path = folder / file.name
    path.unlink(missing_ok=True)
    path.write_bytes(b"".join(file.chunks()))
    return path


def round_trip(folder: Path, blocks: Sequence[EncodedBlock]) -> list[Change]:
    return decode_file(write(folder, plan_file(NAME, blocks)), stored(blocks))


def patches_of_all_codes() -> list[TensorPatch]:
    return [random_patch(TensorSpec(f"w.{code}", (50,), code), 9) for code in ALL_CODES]


def blocks_of_all_encodings() -> list[EncodedBlock]:
    """Return a block of each encoding, the places of their tensors interleaved."""
    blocks = []
    for number, encoding in enumerate(ENCODINGS.values()):
        places = range(number, 30, 10) if encoding.is_joint else (number,)
        members = {place: example(encoding, name=f"{encoding.name}.{place}") for place in places}
        blocks.append(block_of(encoding.name, members))
    return blocks


def test_patches_of_all_types_come_back(tmp_path: Path):
    assert_same_changes(round_trip(tmp_path, raw_blocks(patches_of_all_codes())), patches_of_all_codes())


def test_blocks_of_all_encodings_come_back_from_one_file(tmp_path: Path):
    blocks = blocks_of_all_encodings()
    assert_same_changes(round_trip(tmp_path, blocks), changes_of(blocks))


def test_changes_are_the_same_with_and_without_threads(tmp_path: Path):
    blocks = blocks_of_all_encodings()
    path = write(tmp_path, plan_file(NAME, blocks))
    with ThreadPoolExecutor(3) as pool:
        assert_same_changes(decode_file(path, stored(blocks), pool), decode_file(path, stored(blocks)))


def test_changes_come_back_in_the_order_asked_for(tmp_path: Path):
    blocks = raw_blocks(patches_of_all_codes())
    found = decode_file(write(tmp_path, plan_file(NAME, blocks)), stored(blocks)[::-1])
    assert_same_changes(found, patches_of_all_codes()[::-1])


@given(st.data())
def test_any_blocks_come_back(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    blocks, place = [], 0
    for encoding in data.draw(st.lists(st.sampled_from(sorted(ENCODINGS)), max_size=3)):
        changes = data.draw(blocks_for(encoding_of(encoding)))
        blocks.append(block_of(encoding, dict(enumerate(changes, start=place))))
        place += len(changes)
    assert_same_changes(round_trip(tmp_path_factory.getbasetemp(), blocks), changes_of(blocks))


def test_no_blocks_make_an_empty_file(tmp_path: Path):
    assert round_trip(tmp_path, []) == []


def test_header_lists_the_names_of_its_own_tensors_in_their_order(tmp_path: Path):
    path = write(tmp_path, plan_file(NAME, blocks_of_all_encodings()[::-1]))
    names = json.loads(MappedFile(path).metadata["layer_names"])
    assert names == [change.spec.name for change in stored(blocks_of_all_encodings())]


def test_keys_of_a_shared_block_carry_the_place_of_its_first_tensor(tmp_path: Path):
    block = block_of("packed", {4: example(encoding_of("packed")), 7: example(encoding_of("packed"), name="v")})
    path = write(tmp_path, plan_file(NAME, [block]))
    assert sorted(MappedFile(path).specs) == ["4.gaps_0", "4.gaps_1", "4.values_0", "4.values_1"]


def test_planned_size_is_what_is_written():
    file = plan_file(NAME, blocks_of_all_encodings())
    assert file.num_bytes == sum(len(chunk) for chunk in file.chunks())


def test_chunks_can_be_read_again_for_a_second_try():
    file = plan_file(NAME, blocks_of_all_encodings())
    assert b"".join(file.chunks()) == b"".join(file.chunks())


def test_plan_of_arrays_references_them(tmp_path: Path):
    patch = random_patch(TensorSpec("w", (100,), "BF16"), 10)
    blocks = raw_blocks([patch])
    file = plan_file(NAME, blocks)
    patch.values[0] ^= 1
    assert_same_changes(decode_file(write(tmp_path, file), stored(blocks)), [patch])


def test_raw_changes_are_views_of_the_file(tmp_path: Path):
    [patch] = round_trip(tmp_path, raw_blocks([random_patch(TensorSpec("w", (100,), "BF16"), 10)]))
    assert not patch.values.flags.owndata
    assert not patch.values.flags.writeable


def test_delta_of_a_bf16_tensor_is_byte_equal_to_the_library():
    patches = [random_patch(TensorSpec(f"w{i}", (100,), "BF16"), 10) for i in range(12)]
    tensors = {}
    for i, patch in enumerate(patches):
        tensors[f"{i}.indices"] = torch.from_numpy(patch.positions)
        tensors[f"{i}.values"] = torch.from_numpy(patch.values.view(np.int16)).view(torch.bfloat16)
    metadata = {"layer_names": json.dumps([patch.spec.name for patch in patches])}
    assert b"".join(plan_file(NAME, raw_blocks(patches)).chunks()) == safetensors.torch.save(tensors, metadata)


def shared_file(folder: Path) -> tuple[Path, list[StoredChange]]:
    """Write a file of two shared blocks: places 0, 2 and 4, and places 1, 3 and 5."""
    blocks = [
        block_of(name, {place: example(encoding_of(name), name=f"w{place}") for place in places})
        for name, places in (("packed", (0, 2, 4)), ("bitmap", (1, 3, 5)))
    ]
    return write(folder, plan_file(NAME, blocks)), stored(blocks)


MISPLACED = {
    "another block": (2, {"block": 1}),
    "a block of its own": (2, {"block": 2}),
    "the first tensor in another block": (0, {"block": 1}),
    "a block that is not there": (2, {"block": 9}),
    "another encoding": (2, {"encoding": "bitmap"}),
    "another encoding for the first": (0, {"encoding": "bitmap"}),
    "an encoding of single tensors": (2, {"encoding": "raw"}),
    "another width": (2, {"spec": TensorSpec("w2", (1000,), "F32")}),
    "fewer changes": (2, {"changed": 99}),
}


@pytest.mark.parametrize(("place", "fields"), MISPLACED.values(), ids=MISPLACED)
def test_tensor_that_metadata_puts_elsewhere_is_corrupt(tmp_path: Path, place: int, fields: dict[str, object]):
    path, changes = shared_file(tmp_path)
    changes[place] = replace(changes[place], **fields)
    with pytest.raises(CorruptFile) as caught:
        decode_file(path, changes)
    assert caught.value.file == str(path)


@pytest.mark.parametrize("encoding", ["raw", "raw_difference"])
def test_block_of_several_tensors_in_an_encoding_of_single_ones_is_corrupt(tmp_path: Path, encoding: str):
    blocks = raw_blocks([random_patch(TensorSpec("w0", (100,), "BF16"), 10)])
    both = [replace(stored(blocks)[0], place=place, encoding=encoding) for place in (0, 1)]
    with pytest.raises(CorruptFile, match="cannot share a block"):
        decode_file(write(tmp_path, plan_file(NAME, blocks)), both)


@pytest.mark.parametrize("missing", [0, 1, 2, 5])
def test_shared_block_without_one_of_its_tensors_is_corrupt(tmp_path: Path, missing: int):
    path, changes = shared_file(tmp_path)
    del changes[missing]
    with pytest.raises(CorruptFile) as caught:
        decode_file(path, changes)
    assert caught.value.file == str(path)


SPEC = TensorSpec("model.w", (10,), "BF16")
INDICES = torch.tensor([1, 5], dtype=torch.int32)
VALUES = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)


def decode_library_file(
    folder: Path, tensors: dict[str, torch.Tensor], *, places: tuple[int, ...] = (0,), encoding: str = "raw"
) -> list[Change]:
    safetensors.torch.save_file(tensors, folder / "delta.safetensors")
    return decode_file(
        folder / "delta.safetensors", [StoredChange(place, SPEC, 2, encoding, place) for place in places]
    )


def test_file_made_by_the_library_is_read(tmp_path: Path):
    [patch] = decode_library_file(tmp_path, {"0.indices": INDICES, "0.values": VALUES})
    assert (patch.positions.tolist(), patch.values.tolist()) == ([1, 5], [0x3F80, 0x4000])


@pytest.mark.parametrize(
    "key",
    ["values", "0", "0.", ".values", "00.values", "01.values", "-1.values", "+0.values", "0.Values", "0.values.x",
     "0x0.values", " 0.values", "0.values ", "1234567890.values", "x", "",
      "\u0660.values", "1\u0660.values", "0.va\nlues"],
)  # fmt: skip
def test_key_that_is_no_place_and_part_is_corrupt(tmp_path: Path, key: str):
    tensors = {"0.indices": INDICES, "0.values": VALUES, key: VALUES.clone()}
    with pytest.raises(CorruptFile, match="unknown key"):
        decode_library_file(tmp_path, tensors)


@pytest.mark.parametrize("places", [(), (1,), (0, 1)])
def test_file_with_other_places_than_metadata_says_is_corrupt(tmp_path: Path, places: tuple[int, ...]):
    with pytest.raises(CorruptFile, match="wrong tensors in the file") as caught:
        decode_library_file(tmp_path, {"0.indices": INDICES, "0.values": VALUES}, places=places)
    assert caught.value.file == str(tmp_path / "delta.safetensors")


@pytest.mark.parametrize("shape", [(2, 1), (1, 2), ()], ids=str)
def test_array_that_is_not_flat_is_corrupt(tmp_path: Path, shape: tuple[int, ...]):
    values = VALUES[: max(1, len(shape))].reshape(shape) if shape else VALUES[0].clone()
    with pytest.raises(CorruptFile, match="not flat"):
        decode_library_file(tmp_path, {"0.indices": INDICES, "0.values": values.clone()})


@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param({"0.indices": INDICES}, id="no values"),
        pytest.param({"0.values": VALUES}, id="no indices"),
        pytest.param({"0.indices": INDICES, "0.values": VALUES, "0.more": VALUES.clone()}, id="more"),
        pytest.param({"0.indices": INDICES, "0.values": VALUES.half()}, id="type of values"),
        pytest.param({"0.indices": INDICES.short(), "0.values": VALUES}, id="type of positions"),
        pytest.param({"0.indices": INDICES.flip(0), "0.values": VALUES}, id="unsorted"),
        pytest.param({"0.indices": INDICES - 2, "0.values": VALUES}, id="negative"),
        pytest.param({"0.indices": INDICES + 5, "0.values": VALUES}, id="out of range"),
        pytest.param({"0.indices": INDICES[:1], "0.values": VALUES[:1]}, id="too few"),
    ],
)
def test_bad_patch_in_a_file_is_corrupt_and_names_file_and_tensor(tmp_path: Path, tensors: dict[str, torch.Tensor]):
    with pytest.raises(CorruptFile) as caught:
        decode_library_file(tmp_path, tensors)
    assert (caught.value.file, caught.value.tensor) == (str(tmp_path / "delta.safetensors"), "model.w")


def test_unknown_encoding_is_unsupported_and_names_file_and_tensor(tmp_path: Path):
    with pytest.raises(UnsupportedFormat) as caught:
        decode_library_file(tmp_path, {"0.indices": INDICES, "0.values": VALUES}, encoding="zip")
    assert (caught.value.file, caught.value.tensor) == (str(tmp_path / "delta.safetensors"), "model.w")


def test_missing_file_is_not_found(tmp_path: Path):
    with pytest.raises(ObjectNotFound):
        decode_file(tmp_path / "delta.safetensors", [])


@pytest.mark.parametrize("name", ENCODINGS)
def test_flipped_bits_give_valid_changes_or_a_refusal(tmp_path: Path, name: str):
    encoding = encoding_of(name)
    places = range(2 if encoding.is_joint else 1)
    block = block_of(name, {place: example(encoding, name=f"w{place}", code="U8") for place in places})
    data = b"".join(plan_file(NAME, [block]).chunks())
    path = tmp_path / NAME
    for bit in range(0, 8 * len(data), 31):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << (bit % 8)
        path.unlink(missing_ok=True)
        path.write_bytes(flipped)
        try:
            found = decode_file(path, stored([block]))
        except FormatError:
            continue
        assert_valid([Stated(change.spec, change.changed) for change in changes_of([block])], found)
