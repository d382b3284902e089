"""Which files are a checkpoint's, and that a part of one is never taken for the whole."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.checkpoints import tiny_tensors, write_checkpoint
from tests.support.hub import COMMIT, cached
from vllm_delta_snapshot.checkpoint import INDEX_NAME, Checkpoint
from vllm_delta_snapshot.checkpoint.weight_files import weight_files
from vllm_delta_snapshot.errors import CorruptFile, LimitExceeded, ObjectNotFound


def names_of(folder: Path) -> list[str]:
    return [path.name for path in weight_files(folder).paths]


def extra(folder: Path, name: str) -> None:
    save_file({"other": torch.zeros(3)}, folder / name)


def edit_index(folder: Path, **changes: str) -> None:
    path = folder / INDEX_NAME
    index = json.loads(path.read_text())
    index["weight_map"] |= changes
    path.write_text(json.dumps(index))


def test_index_that_is_a_link_to_nothing_is_an_error_not_a_missing_index(tmp_path: Path):
    write_checkpoint(tmp_path, tiny_tensors(), shards=2)
    (tmp_path / INDEX_NAME).unlink()
    (tmp_path / INDEX_NAME).symlink_to("../blobs/gone")
    with pytest.raises(ObjectNotFound, match="link to nothing") as caught:
        weight_files(tmp_path)
    assert caught.value.file == str(tmp_path / INDEX_NAME)


def test_folder_or_pipe_in_the_indexs_place_is_corrupt(tmp_path: Path):
    write_checkpoint(tmp_path / "a", tiny_tensors())
    (tmp_path / "a" / INDEX_NAME).mkdir()
    write_checkpoint(tmp_path / "b", tiny_tensors())
    os.mkfifo(tmp_path / "b" / INDEX_NAME)
    for name in "ab":
        with pytest.raises(CorruptFile, match="not a regular file") as caught:
            weight_files(tmp_path / name)
        assert caught.value.file == str(tmp_path / name / INDEX_NAME)


def test_index_that_names_no_file_or_one_twice_is_corrupt(tmp_path: Path):
    write_checkpoint(tmp_path, tiny_tensors())
    for text in ('{"weight_map": {}}', '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}'):
        (tmp_path / INDEX_NAME).write_text(text)
        with pytest.raises(CorruptFile) as caught:
            weight_files(tmp_path)
        assert caught.value.file == str(tmp_path / INDEX_NAME)


def test_index_that_names_a_file_outside_is_corrupt_and_named(tmp_path: Path):
    write_checkpoint(tmp_path, tiny_tensors(), shards=2)
    edit_index(tmp_path, more="../model.safetensors")
    with pytest.raises(CorruptFile, match="unsafe file name") as caught:
        weight_files(tmp_path)
    assert caught.value.file == str(tmp_path / INDEX_NAME)


def test_index_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_checkpoint(tmp_path, tiny_tensors(), shards=2)
    monkeypatch.setattr("vllm_delta_snapshot.checkpoint.weight_files.MAX_METADATA_BYTES", 10)
    with pytest.raises(LimitExceeded) as caught:
        weight_files(tmp_path)
    assert caught.value.file == str(tmp_path / INDEX_NAME)


@pytest.mark.parametrize("is_link", [False, True])
def test_shard_of_the_index_that_is_not_there_is_named(tmp_path: Path, is_link: bool):
    write_checkpoint(tmp_path, tiny_tensors(), shards=3)
    lost = tmp_path / "model-00002-of-00003.safetensors"
    lost.unlink()
    if is_link:
        lost.symlink_to("../blobs/gone")
    with pytest.raises(ObjectNotFound, match="1 missing: model-00002-of-00003") as caught:
        weight_files(tmp_path)
    assert caught.value.file == str(lost)


@pytest.mark.parametrize("lost", [(1,), (2,), (3,), (1, 3)])
def test_shard_that_is_missing_without_an_index_is_told_by_the_names_of_the_others(
    tmp_path: Path, lost: tuple[int, ...]
):
    write_checkpoint(tmp_path, tiny_tensors(), shards=3)
    (tmp_path / INDEX_NAME).unlink()
    for number in lost:
        (tmp_path / f"model-{number:05d}-of-00003.safetensors").unlink()
    with pytest.raises(ObjectNotFound, match=f"{len(lost)} missing: model-{lost[0]:05d}-of-00003") as caught:
        Checkpoint(tmp_path)
    assert caught.value.file == str(tmp_path / f"model-{lost[0]:05d}-of-00003.safetensors")


def test_shards_that_count_from_zero_are_whole(tmp_path: Path):
    for number in range(2):
        save_file({f"w{number}": torch.zeros(3)}, tmp_path / f"model-{number:05d}-of-00002.safetensors")
    assert len(names_of(tmp_path)) == 2
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ObjectNotFound, match="model-00001-of-00002"):
        weight_files(tmp_path)


def test_file_without_an_index_that_is_a_link_to_nothing_is_missing(tmp_path: Path):
    write_checkpoint(tmp_path, tiny_tensors())
    (tmp_path / "more.safetensors").symlink_to("../blobs/gone")
    with pytest.raises(ObjectNotFound, match="1 missing: more"):
        weight_files(tmp_path)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_shard_that_is_no_file_is_corrupt_and_never_waited_for(tmp_path: Path, kind: str, shards: int):
    write_checkpoint(tmp_path, tiny_tensors(), shards=shards)
    path = tmp_path / ("model.safetensors" if shards == 1 else "model-00001-of-00002.safetensors")
    path.unlink()
    os.mkfifo(path) if kind == "pipe" else path.mkdir()
    with pytest.raises(CorruptFile, match="not a regular file") as caught:
        weight_files(tmp_path)
    assert caught.value.file == str(path)


def test_single_file_beside_the_index_of_others_is_refused(tmp_path: Path):
    write_checkpoint(tmp_path, tiny_tensors(), shards=2)
    save_file(tiny_tensors(seed=1), tmp_path / "model.safetensors")
    with pytest.raises(CorruptFile, match="two checkpoints in one folder"):
        Checkpoint(tmp_path)


def test_single_file_with_an_index_of_its_own_is_taken(tmp_path: Path):
    write_checkpoint(tmp_path, tiny_tensors())
    index = {"weight_map": dict.fromkeys(tiny_tensors(), "model.safetensors")}
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    assert names_of(tmp_path) == ["model.safetensors"]
    assert Checkpoint(tmp_path).specs.keys() == tiny_tensors().keys()


def test_tensor_of_the_index_that_no_file_has_is_corrupt_and_named(tmp_path: Path):
    write_checkpoint(tmp_path, tiny_tensors(), shards=2)
    edit_index(tmp_path, **{"lm_head.weight": "model-00001-of-00002.safetensors"})
    with pytest.raises(CorruptFile, match="1 missing: lm_head") as caught:
        Checkpoint(tmp_path)
    assert (caught.value.file, caught.value.tensor) == (str(tmp_path / INDEX_NAME), "lm_head.weight")


def test_tensor_in_another_file_than_the_index_says_is_loaded_as_the_loaders_do(tmp_path: Path):
    write_checkpoint(tmp_path, tiny_tensors(), shards=2)
    name = next(iter(tiny_tensors()))
    edit_index(tmp_path, **{name: "model-00002-of-00002.safetensors"})
    assert Checkpoint(tmp_path).specs.keys() == tiny_tensors().keys()


def test_files_that_other_systems_leave_behind_are_not_weights(tmp_path: Path):
    write_checkpoint(tmp_path, tiny_tensors())
    (tmp_path / "._model.safetensors").write_bytes(b"\0" * 4096)
    assert names_of(tmp_path) == ["model.safetensors"]


def test_adapter_beside_the_weights_is_refused_without_an_index(tmp_path: Path):
    write_checkpoint(tmp_path, tiny_tensors())
    extra(tmp_path, "adapter_model.safetensors")
    with pytest.raises(CorruptFile, match="adapter lies in the checkpoint's folder") as caught:
        weight_files(tmp_path)
    assert caught.value.file == str(tmp_path / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("files", "found", "hint"),
    [
        ((), "an empty folder", "save_pretrained"),
        (("config.json", "tokenizer.json"), "config.json, tokenizer.json", "save_pretrained"),
        (("pytorch_model.bin", "config.json"), "only pickles: pytorch_model.bin", "Load it once and write it again"),
        (("adapter_model.safetensors", "adapter_config.json"), "adapter_model.safetensors", "adapter (PEFT)"),
        (("consolidated.safetensors", "params.json"), "Mistral's own layout", "model.safetensors"),
        (("step-1/model.safetensors",), "step-1", "Its folder step-1 has some"),
    ],
)
def test_folder_without_weights_says_what_it_is_instead(tmp_path: Path, files: tuple[str, ...], found: str, hint: str):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ObjectNotFound, match="no safetensors files") as caught:
        Checkpoint(tmp_path)
    assert found in str(caught.value.found)
    assert hint in str(caught.value.hint)


def test_what_a_snapshot_lacks_is_downloaded(tmp_path: Path):
    write_checkpoint(tmp_path / "base", tiny_tensors(), shards=2)
    snapshot = cached(tmp_path / "cache", tmp_path / "base")
    (snapshot / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ObjectNotFound, match=f"Download the rest: hf download org/model --revision {COMMIT}"):
        Checkpoint(snapshot)
    with pytest.raises(ObjectNotFound, match=r"Give org/model as the base; to download it: hf download org/model "):
        Checkpoint(snapshot.parents[1])
