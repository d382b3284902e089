"""Files we write, read by the safetensors library; files it writes, read by us."""

from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.strategies import bits_for, specs
from tests.support.tensors import TORCH_CODES, bits_of, random_bits, special_bits, to_torch
from vllm_delta_snapshot.dtypes import ALL_CODES, Bits
from vllm_delta_snapshot.format.safetensors_io import MappedFile, NamedBits, file_chunks, file_size
from vllm_delta_snapshot.types import TensorSpec

LIBRARY_CODES = tuple(code for code in TORCH_CODES if code in safetensors.torch._TYPES)
SHAPES = [(), (0,), (0, 3), (1,), (5,), (3, 4), (2, 3, 4)]


def written(tensors: list[NamedBits], metadata: dict[str, str] | None = None) -> bytes:
    return b"".join(file_chunks(tensors, metadata or {}))


def named(name: str, code: str, shape: tuple[int, ...]) -> NamedBits:
    spec = TensorSpec(name, shape, code)
    return NamedBits(spec, random_bits(code, spec.numel, name))


def as_tensors(tensors: list[NamedBits]) -> dict[str, torch.Tensor]:
    return {t.spec.name: to_torch(t.bits, t.spec) for t in tensors}


def mapped(folder: Path, data: bytes) -> MappedFile:
    path = folder / "f.safetensors"
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    return MappedFile(path)


@pytest.mark.parametrize("code", LIBRARY_CODES)
def test_file_of_special_patterns_is_read_by_the_library_bit_for_bit(code: str):
    bits = special_bits(code)
    data = written([NamedBits(TensorSpec("w", (bits.size,), code), bits)])
    assert bits_of(safetensors.torch.load(data)["w"]).tolist() == bits.tolist()


@pytest.mark.parametrize("code", ALL_CODES)
def test_file_is_parsed_by_the_library_with_code_shape_and_bytes(code: str):
    tensor = named("w", code, (3, 5))
    [(name, fields)] = safetensors.deserialize(written([tensor]))
    assert (name, fields["dtype"], fields["shape"]) == ("w", code, [3, 5])
    assert bytes(fields["data"]) == tensor.bits.tobytes()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_file_of_any_rank_is_read_by_the_library(shape: tuple[int, ...]):
    tensor = named("w", "BF16", shape)
    found = safetensors.torch.load(written([tensor]))["w"]
    assert (tuple(found.shape), bits_of(found).tolist()) == (shape, tensor.bits.tolist())


@pytest.mark.parametrize("code", LIBRARY_CODES)
def test_file_of_one_tensor_is_byte_equal_to_the_library(code: str):
    for shape in SHAPES:
        tensors = [named("model.w", code, shape)]
        assert written(tensors) == safetensors.torch.save(as_tensors(tensors)), shape


def test_file_of_one_width_each_is_byte_equal_to_the_library():
    tensors = [named(f"{name}.{code}", code, (7,)) for code in ("U8", "BF16", "F32", "I64") for name in "ba"]
    assert written(tensors) == safetensors.torch.save(as_tensors(tensors))


def test_file_with_metadata_and_foreign_letters_is_byte_equal_to_the_library():
    tensors = [named(name, "BF16", (3,)) for name in ('é"\\', "模型.w", "\n\t\x01")]
    metadata = {"layer_names": '["é", "模型"]'}
    assert written(tensors, metadata) == safetensors.torch.save(as_tensors(tensors), metadata)


def test_file_of_nothing_is_byte_equal_to_the_library():
    assert written([]) == safetensors.torch.save({})


def test_file_of_mixed_types_of_one_width_is_read_by_the_library():
    tensors = [named(f"w{i}", code, (5,)) for i, code in enumerate(("F32", "I32", "U32", "F32"))]
    found = safetensors.torch.load(written(tensors))
    assert {n: bits_of(t).tolist() for n, t in found.items()} == {t.spec.name: t.bits.tolist() for t in tensors}


def test_file_does_not_depend_on_the_order_given():
    tensors = [named(f"w{i}", code, (5,)) for i, code in enumerate(ALL_CODES)]
    assert written(tensors) == written(tensors[::-1])


def test_every_tensor_in_a_file_is_aligned_to_its_width(tmp_path: Path):
    tensors = [named(f"w{i}", code, (3,)) for i, code in enumerate(ALL_CODES)]
    file = mapped(tmp_path, written(tensors))
    assert [t.spec.name for t in tensors if file.offset(t.spec.name) % t.spec.element.itemsize] == []


@given(st.lists(st.integers(0, len(ALL_CODES) - 1), max_size=6), st.integers(0, 50))
def test_file_size_is_what_is_written(places: list[int], length: int):
    tensors = [named(f"w{i}", ALL_CODES[place], (length,)) for i, place in enumerate(places)]
    assert file_size(tensors, {"k": "v" * length}) == len(written(tensors, {"k": "v" * length}))


def test_file_of_a_strided_array_holds_its_elements():
    bits = np.arange(20, dtype=np.uint16)[::2]
    data = written([NamedBits(TensorSpec("w", (10,), "BF16"), bits)])
    assert bits_of(safetensors.torch.load(data)["w"]).tolist() == bits.tolist()


def test_chunks_of_a_contiguous_tensor_are_views_not_copies():
    bits = np.zeros(8, dtype=np.uint16)
    _, chunk = file_chunks([NamedBits(TensorSpec("w", (8,), "BF16"), bits)], {})
    bits[0] = 0x4142
    assert bytes(chunk[:2]) == b"BA"


@pytest.mark.parametrize("code", LIBRARY_CODES)
def test_file_of_the_library_is_mapped_bit_for_bit(tmp_path: Path, code: str):
    for shape in SHAPES:
        tensor = named("model.w", code, shape)
        file = mapped(tmp_path, safetensors.torch.save(as_tensors([tensor])))
        assert file.specs == {"model.w": tensor.spec}
        assert file.bits("model.w").tolist() == tensor.bits.tolist()


def test_file_of_the_library_with_metadata_is_mapped_with_it(tmp_path: Path):
    file = mapped(tmp_path, safetensors.torch.save({"w": torch.zeros(2)}, {"format": "pt", "é": "\n"}))
    assert file.metadata == {"format": "pt", "é": "\n"}


def test_file_of_the_library_without_metadata_is_mapped(tmp_path: Path):
    assert mapped(tmp_path, safetensors.torch.save({"w": torch.zeros(2)})).metadata == {}


def test_mapped_offset_is_where_the_bytes_are(tmp_path: Path):
    tensors = [named("a", "F32", (3,)), named("b", "BF16", (4,))]
    file = mapped(tmp_path, written(tensors))
    data = file.path.read_bytes()
    found = {t.spec.name: data[file.offset(t.spec.name) :][: t.spec.num_bytes] for t in tensors}
    assert found == {t.spec.name: t.bits.tobytes() for t in tensors}


def test_mapped_bits_cannot_be_written(tmp_path: Path):
    bits = mapped(tmp_path, written([named("w", "BF16", (4,))])).bits("w")
    with pytest.raises(ValueError, match="read-only"):
        bits[0] = 1


def test_mapped_bits_outlive_the_file_object(tmp_path: Path):
    tensor = named("w", "BF16", (4,))
    bits = mapped(tmp_path, written([tensor])).bits("w")
    (tmp_path / "f.safetensors").unlink()
    assert bits.tolist() == tensor.bits.tolist()


@given(st.data())
def test_any_tensor_written_and_mapped_is_the_same(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    spec: TensorSpec = data.draw(specs)
    bits: Bits = data.draw(bits_for(spec, spec.numel))
    file = mapped(tmp_path_factory.getbasetemp(), written([NamedBits(spec, bits)]))
    assert file.specs == {spec.name: spec}
    assert file.bits(spec.name).tolist() == bits.tolist()
