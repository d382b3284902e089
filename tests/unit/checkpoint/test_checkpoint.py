"""A local checkpoint: which files it is, what they hold, and whether it fits another table."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.checkpoints import TINY_SPECS, tiny_tensors, write_checkpoint
from tests.support.tensors import bits_of
from vllm_delta_snapshot.checkpoint import INDEX_NAME, Checkpoint
from vllm_delta_snapshot.errors import CorruptFile, ObjectNotFound, SourceError, UnsupportedFormat
from vllm_delta_snapshot.format.digest import format_digest, state_digest
from vllm_delta_snapshot.types import TensorSpec


def assert_tiny(checkpoint: Checkpoint) -> None:
    assert sorted(checkpoint.specs.items()) == sorted((spec.name, spec) for spec in TINY_SPECS)
    wrong = [n for n, t in tiny_tensors().items() if checkpoint.bits(n).tolist() != bits_of(t).tolist()]
    assert wrong == []


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("shards", [1, 2, 7])
def test_checkpoint_of_any_number_of_shards_has_every_tensor(tmp_path: Path, shards: int):
    assert_tiny(Checkpoint(write_checkpoint(tmp_path, tiny_tensors(), shards=shards)))


def test_checkpoint_given_as_text_with_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_checkpoint(tmp_path / "base", tiny_tensors())
    monkeypatch.setenv("HOME", str(tmp_path))
    assert_tiny(Checkpoint("~/base"))


def test_checkpoint_of_several_files_without_index_has_every_tensor(tmp_path: Path):
    write_checkpoint(tmp_path, tiny_tensors(), shards=3)
    (tmp_path / INDEX_NAME).unlink()
    assert_tiny(Checkpoint(tmp_path))


def test_consolidated_file_beside_the_shards_is_ignored(tmp_path: Path):
    write_checkpoint(tmp_path, tiny_tensors())
    save_file({"other": torch.zeros(3)}, tmp_path / "consolidated.safetensors")
    save_file({"other": torch.zeros(3)}, tmp_path / "consolidated-00001-of-00002.safetensors")
    assert_tiny(Checkpoint(tmp_path))


def test_file_that_the_index_does_not_name_is_ignored(tmp_path: Path):
    write_checkpoint(tmp_path, tiny_tensors(), shards=2)
    save_file({"other": torch.zeros(3)}, tmp_path / "adapter.safetensors")
    assert_tiny(Checkpoint(tmp_path))


def test_tensor_in_two_files_is_corrupt_and_named(tmp_path: Path):
    write_checkpoint(tmp_path, tiny_tensors())
    save_file({"model.norm.weight": torch.zeros(8)}, tmp_path / "model-2.safetensors")
    with pytest.raises(CorruptFile, match="two files") as caught:
        Checkpoint(tmp_path)
    assert caught.value.tensor == "model.norm.weight"


def test_missing_folder_is_not_found(tmp_path: Path):
    with pytest.raises(ObjectNotFound, match="no such checkpoint folder") as caught:
        Checkpoint(tmp_path / "none")
    assert caught.value.file == str(tmp_path / "none")


def test_folder_without_safetensors_is_not_found_with_a_way_out(tmp_path: Path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ObjectNotFound, match="save_pretrained"):
        Checkpoint(tmp_path)


def test_shard_that_is_missing_is_not_found_and_named(tmp_path: Path):
    write_checkpoint(tmp_path, tiny_tensors(), shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ObjectNotFound) as caught:
        Checkpoint(tmp_path)
    assert caught.value.file == str(tmp_path / "model-00002-of-00002.safetensors")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "1", "null", "{}", '{"weight_map": []}', '{"weight_map": null}', '{"weight_map": "x"}',
     '{"weight_map": {"a": 1}}', '{"weight_map": {"a": null, "b": "x"}}', '{"weight_map": {"a": ["x"]}}',
     "[" * 100_000],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_index_that_is_none_is_corrupt_and_named(tmp_path: Path, text: str):
    write_checkpoint(tmp_path, tiny_tensors())
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(CorruptFile, match="not a safetensors index") as caught:
        Checkpoint(tmp_path)
    assert caught.value.file == str(tmp_path / INDEX_NAME)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", ""])
def test_index_that_names_a_file_outside_is_corrupt(tmp_path: Path, name: str):
    write_checkpoint(tmp_path / "in", tiny_tensors())
    write_index(tmp_path / "in", {"a": name})
    with pytest.raises(CorruptFile, match="unsafe file name"):
        Checkpoint(tmp_path / "in")


def test_damaged_file_is_corrupt_and_named(tmp_path: Path):
    path = write_checkpoint(tmp_path, tiny_tensors()) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptFile) as caught:
        Checkpoint(tmp_path)
    assert caught.value.file == str(path)


def test_tensor_of_an_unknown_type_is_unsupported_and_named(tmp_path: Path):
    path = write_checkpoint(tmp_path, {"a": torch.zeros(4, dtype=torch.uint8)}) / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"U8"', b'"F4"'))
    with pytest.raises(UnsupportedFormat) as caught:
        Checkpoint(tmp_path)
    assert (caught.value.file, caught.value.tensor) == (str(path), "a")


@pytest.mark.parametrize("shards", [1, 3])
def test_state_digest_does_not_depend_on_the_shards(tmp_path: Path, shards: int):
    specs = {spec.name: spec for spec in TINY_SPECS}
    expected = format_digest(state_digest((specs[n], bits_of(t)) for n, t in tiny_tensors().items()))
    assert Checkpoint(write_checkpoint(tmp_path, tiny_tensors(), shards=shards)).state_digest == expected


def test_total_elements_counts_all_tensors(tmp_path: Path):
    checkpoint = Checkpoint(write_checkpoint(tmp_path, tiny_tensors()))
    assert checkpoint.total_elements == sum(spec.numel for spec in TINY_SPECS)


def fits(folder: Path, **changes: TensorSpec | None) -> None:
    table = {"a": TensorSpec("a", (2, 3), "F32"), "b": TensorSpec("b", (4,), "F32")} | changes
    write_checkpoint(folder, {"a": torch.zeros(2, 3), "b": torch.zeros(4)})
    Checkpoint(folder).check_fits({n: s for n, s in table.items() if s is not None}, what="run 7")


def test_check_fits_of_the_same_table_passes(tmp_path: Path):
    fits(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a": None}, "a is not in run 7"),
        ({"c": TensorSpec("c", (1,), "F32")}, "c is not in the checkpoint"),
        ({"a": TensorSpec("a", (3, 2), "F32")}, r"a is F32\[2,3\] but F32\[3,2\] in run 7"),
        ({"a": TensorSpec("a", (2, 3), "BF16")}, r"a is F32\[2,3\] but BF16\[2,3\] in run 7"),
    ],
)
def test_check_fits_of_another_table_names_every_misfit(
    tmp_path: Path, changes: dict[str, TensorSpec | None], message: str
):
    with pytest.raises(SourceError, match=message) as caught:
        fits(tmp_path, **changes)
    assert caught.value.file == str(tmp_path)


def test_check_fits_of_a_foreign_table_keeps_its_message_short(tmp_path: Path):
    write_checkpoint(tmp_path, {"a": torch.zeros(1)})
    table = {f"layer.{i}": TensorSpec(f"layer.{i}", (1,), "F32") for i in range(1000)}
    with pytest.raises(SourceError, match="and 993 more"):
        Checkpoint(tmp_path).check_fits(table, what="run 7")
