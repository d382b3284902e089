"""The payload container: patches to files and back, and files that hold something else."""

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.strategies import codes, patches_for, shapes
from tests.support.tensors import assert_same_patches, random_patch
from vllm_delta_snapshot.dtypes import ALL_CODES
from vllm_delta_snapshot.errors import CorruptFile, FormatError, ObjectNotFound, UnsupportedFormat
from vllm_delta_snapshot.format.container import PlannedFile, StoredPatch, decode_file, encode_delta
from vllm_delta_snapshot.format.encodings.raw import Raw
from vllm_delta_snapshot.format.safetensors_io import MappedFile
from vllm_delta_snapshot.types import TensorPatch, TensorSpec


def stored(patches: list[TensorPatch], members: tuple[int, ...]) -> list[StoredPatch]:
    return [StoredPatch(place, patches[place].spec, patches[place].changed, "raw") for place in members]


def write(folder: Path, file: PlannedFile) -> Path:
    path = folder / file.name
    path.unlink(missing_ok=True)
    path.write_bytes(b"".join(file.chunks()))
    return path


def round_trip(folder: Path, patches: list[TensorPatch], **limits: int) -> list[TensorPatch]:
    found: dict[int, TensorPatch] = {}
    for file in encode_delta(patches, Raw(), **limits):
        decoded = decode_file(write(folder, file), stored(patches, file.members))
        found |= dict(zip(file.members, decoded, strict=True))
    return [found[place] for place in range(len(patches))]


def patches_of_all_codes() -> list[TensorPatch]:
    return [random_patch(TensorSpec(f"w.{code}", (50,), code), 9) for code in ALL_CODES]


def test_patches_of_all_types_come_back(tmp_path: Path):
    assert_same_patches(round_trip(tmp_path, patches_of_all_codes()), patches_of_all_codes())


@given(st.data(), st.sampled_from([0, 40, 10**9]))
def test_any_patches_come_back_from_one_or_many_files(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, max_file_bytes: int
):
    table = data.draw(st.lists(st.tuples(shapes, codes), max_size=4))
    patches = [data.draw(patches_for(TensorSpec(f"w{i}", *item))) for i, item in enumerate(table)]
    assert_same_patches(round_trip(tmp_path_factory.getbasetemp(), patches, max_file_bytes=max_file_bytes), patches)


def test_no_patches_make_one_empty_file(tmp_path: Path):
    [file] = encode_delta([], Raw())
    assert file.name == "delta.safetensors"
    assert decode_file(write(tmp_path, file), []) == []


def test_one_file_has_the_name_that_openrl_reads():
    assert [file.name for file in encode_delta(patches_of_all_codes(), Raw())] == ["delta.safetensors"]


def test_several_files_are_numbered_and_cover_every_patch_once():
    patches = [random_patch(TensorSpec(f"w{i}", (100,), "BF16"), 10) for i in range(5)]
    files = encode_delta(patches, Raw(), max_file_bytes=130)
    assert [file.name for file in files] == [f"delta-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert [file.members for file in files] == [(0, 1), (2, 3), (4,)]


def test_file_of_a_single_large_patch_may_pass_the_limit():
    patches = [random_patch(TensorSpec(f"w{i}", (100,), "BF16"), 50) for i in range(2)]
    assert [file.members for file in encode_delta(patches, Raw(), max_file_bytes=1)] == [(0,), (1,)]


def test_header_lists_the_names_of_its_own_tensors(tmp_path: Path):
    patches = [random_patch(TensorSpec(name, (100,), "BF16"), 10) for name in ("é", "b", "c")]
    files = encode_delta(patches, Raw(), max_file_bytes=130)
    names = [json.loads(MappedFile(write(tmp_path, file)).metadata["layer_names"]) for file in files]
    assert names == [["é", "b"], ["c"]]


def test_planned_size_is_what_is_written():
    for file in encode_delta(patches_of_all_codes(), Raw(), max_file_bytes=200):
        assert file.num_bytes == sum(len(chunk) for chunk in file.chunks())


def test_chunks_can_be_read_again_for_a_second_try():
    [file] = encode_delta(patches_of_all_codes(), Raw())
    assert b"".join(file.chunks()) == b"".join(file.chunks())


def test_encode_of_arrays_references_them(tmp_path: Path):
    patch = random_patch(TensorSpec("w", (100,), "BF16"), 10)
    [file] = encode_delta([patch], Raw())
    patch.values[0] ^= 1
    assert_same_patches(decode_file(write(tmp_path, file), stored([patch], (0,))), [patch])


def test_delta_of_a_bf16_tensor_is_byte_equal_to_the_library():
    patches = [random_patch(TensorSpec(f"w{i}", (100,), "BF16"), 10) for i in range(12)]
    [file] = encode_delta(patches, Raw())
    tensors = {}
    for i, patch in enumerate(patches):
        tensors[f"{i}.indices"] = torch.from_numpy(patch.positions)
        tensors[f"{i}.values"] = torch.from_numpy(patch.values.view(np.int16)).view(torch.bfloat16)
    metadata = {"layer_names": json.dumps([patch.spec.name for patch in patches])}
    assert b"".join(file.chunks()) == safetensors.torch.save(tensors, metadata)


SPEC = TensorSpec("model.w", (10,), "BF16")
INDICES = torch.tensor([1, 5], dtype=torch.int32)
VALUES = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)


def decode_library_file(
    folder: Path, tensors: dict[str, torch.Tensor], *, places: tuple[int, ...] = (0,), encoding: str = "raw"
) -> list[TensorPatch]:
    safetensors.torch.save_file(tensors, folder / "delta.safetensors")
    return decode_file(folder / "delta.safetensors", [StoredPatch(place, SPEC, 2, encoding) for place in places])


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


def test_any_single_bit_flip_gives_valid_patches_or_a_refusal(tmp_path: Path):
    patch = TensorPatch(SPEC, np.array([1, 5], np.int32), np.array([3, 4], np.uint16))
    [file] = encode_delta([patch], Raw())
    data = b"".join(file.chunks())
    path = tmp_path / "delta.safetensors"
    for bit in range(0, 8 * len(data), 7):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << (bit % 8)
        path.unlink(missing_ok=True)
        path.write_bytes(flipped)
        try:
            [found] = decode_file(path, stored([patch], (0,)))
        except FormatError:
            continue
        assert 0 <= found.positions[0] < found.positions[1] < SPEC.numel
