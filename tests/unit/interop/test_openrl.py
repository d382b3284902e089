"""OpenRL's sparse_delta: its folders are read, ours can be read by its rules."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import write_checkpoint
from tests.support.openrl import check_openrl_delta, write_openrl_delta
from tests.support.runs import make_run
from tests.support.tensors import bits_of
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.errors import CorruptFile, ObjectNotFound, UnsupportedFormat
from vllm_delta_snapshot.format.encodings import ENCODINGS
from vllm_delta_snapshot.format.metadata import OpenRLMetadata
from vllm_delta_snapshot.interop.openrl import read_folder_metadata, read_openrl_delta
from vllm_delta_snapshot.types import TensorSpec

ODD = torch.tensor([0x8000, 0x7FC1, 0xFF80, 0x0001], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
CHANGES = {
    "model.a": ([0, 3, 4, 11], ODD, [3, 4]),
    "model.b": ([1], torch.tensor([2.5]), [2]),
}
SPECS = {"model.a": TensorSpec("model.a", (3, 4), "BF16"), "model.b": TensorSpec("model.b", (2,), "F32")}


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "model.a": torch.randn(3, 4, dtype=torch.bfloat16),
        "model.b": torch.randn(5),
        "model.c": torch.randn(7, dtype=torch.float16),
    }


def published(
    folder: Path, base: dict[str, torch.Tensor], new: dict[str, torch.Tensor], *, encoding: str = "raw", **options: Any
) -> Path:
    publisher = DeltaPublisher(
        new,
        sync_dir=str(folder / "run"),
        base=write_checkpoint(folder / "base", base),
        encoding=encoding,
        threads=1,
        **options,
        asynchronous=False,
    )
    return folder / "run" / publisher.publish().report.folder


def test_our_delta_fulfils_every_rule_of_openrls_reader(tmp_path: Path):
    base, new = weights(0), weights(0)
    new["model.a"][1, 2] += 1
    new["model.c"][:] = torch.arange(7)
    layers = check_openrl_delta(published(tmp_path, base, new))
    assert list(layers) == ["model.a", "model.c"]
    assert layers["model.a"][0].tolist() == [6]
    assert bits_of(layers["model.a"][1]).tolist() == bits_of(new["model.a"][1, 2]).tolist()
    assert bits_of(layers["model.c"][1]).tolist() == bits_of(new["model.c"])[layers["model.c"][0]].tolist()


def test_our_empty_delta_fulfils_every_rule_of_openrls_reader(tmp_path: Path):
    assert check_openrl_delta(published(tmp_path, weights(), weights())) == {}


def test_our_delta_with_odd_bits_fulfils_every_rule_of_openrls_reader(tmp_path: Path):
    new = weights()
    new["model.a"][0] = ODD
    _, values = check_openrl_delta(published(tmp_path, weights(), new))["model.a"]
    assert bits_of(values).tolist() == bits_of(ODD).tolist()


def test_our_delta_that_came_out_raw_fulfils_every_rule_of_openrls_reader(tmp_path: Path):
    new = weights()
    new["model.b"][3] += 1
    assert list(check_openrl_delta(published(tmp_path, weights(), new, encoding="absolute"))) == ["model.b"]


@pytest.mark.parametrize("encoding", [name for name in ENCODINGS if name != "raw"])
def test_our_delta_in_another_encoding_does_not_claim_version_2(tmp_path: Path, encoding: str):
    base = {"w": torch.zeros(2000, dtype=torch.bfloat16)}
    new = {"w": torch.ones(2000, dtype=torch.bfloat16)}
    metadata = json.loads((published(tmp_path, base, new, encoding=encoding) / "metadata.json").read_text())
    assert (metadata["tensors"][0]["encoding"], metadata["format_version"]) == (encoding, 3)


def test_our_delta_of_integers_does_not_claim_version_2(tmp_path: Path):
    base, new = {"w": torch.zeros(5, dtype=torch.int32)}, {"w": torch.ones(5, dtype=torch.int32)}
    assert json.loads((published(tmp_path, base, new) / "metadata.json").read_text())["format_version"] == 3


def test_our_delta_of_several_files_does_not_claim_version_2(tmp_path: Path):
    folder = published(tmp_path, weights(0), weights(1), max_file_bytes=1)
    assert json.loads((folder / "metadata.json").read_text())["format_version"] == 3


def test_openrl_delta_is_read_bit_for_bit(tmp_path: Path):
    metadata, patches = read_openrl_delta(write_openrl_delta(tmp_path, CHANGES), SPECS)
    assert isinstance(metadata, OpenRLMetadata)
    assert [p.spec for p in patches] == list(SPECS.values())
    assert patches[0].positions.tolist() == [0, 3, 4, 11]
    assert patches[0].values.tolist() == [0x8000, 0x7FC1, 0xFF80, 0x0001]


def test_openrl_delta_passes_the_checker_that_judges_ours(tmp_path: Path):
    assert list(check_openrl_delta(write_openrl_delta(tmp_path, CHANGES))) == list(CHANGES)


def test_openrl_delta_without_a_table_of_tensors_is_read_on_its_own_word(tmp_path: Path):
    _, patches = read_openrl_delta(write_openrl_delta(tmp_path, CHANGES))
    assert [p.spec for p in patches] == list(SPECS.values())


def test_openrl_delta_with_int64_indices_is_read(tmp_path: Path):
    write_openrl_delta(tmp_path, {})
    metadata = {"layer_names": ["w"], "layer_shapes": [[3_000_000_000]]}
    write_openrl_delta(tmp_path, {}, **metadata)
    packed = {"0.indices": torch.tensor([5, 2**31 + 5]), "0.values": torch.ones(2, dtype=torch.bfloat16)}
    from safetensors.torch import save_file

    save_file(packed, tmp_path / "delta.safetensors")
    _, [patch] = read_openrl_delta(tmp_path)
    assert patch.positions.tolist() == [5, 2**31 + 5]


def test_empty_openrl_delta_is_read(tmp_path: Path):
    assert read_openrl_delta(write_openrl_delta(tmp_path, {}))[1] == []


@pytest.mark.parametrize("more", [{"delta_format": "native"}, {"x": {"y": [1]}}, {"version": 7}], ids=str)
def test_openrl_metadata_with_more_fields_is_accepted(tmp_path: Path, more: dict[str, Any]):
    _, patches = read_openrl_delta(write_openrl_delta(tmp_path, CHANGES, **more), SPECS)
    assert len(patches) == 2


def test_openrl_metadata_with_only_the_fields_its_reader_needs_is_accepted(tmp_path: Path):
    write_openrl_delta(tmp_path, CHANGES)
    fields = json.loads((tmp_path / "metadata.json").read_text())
    kept = {key: fields[key] for key in ("format", "format_version", "layer_names", "layer_shapes")}
    (tmp_path / "metadata.json").write_text(json.dumps(kept))
    assert len(read_openrl_delta(tmp_path, SPECS)[1]) == 2


def test_openrl_version_1_is_unsupported_with_a_way_out(tmp_path: Path):
    with pytest.raises(UnsupportedFormat, match="version 1") as caught:
        read_openrl_delta(write_openrl_delta(tmp_path, CHANGES, format_version=1))
    assert caught.value.hint


@pytest.mark.parametrize("version", [0, 3, 4, "2", None, 2.5])
def test_openrl_delta_of_another_version_is_unsupported(tmp_path: Path, version: object):
    with pytest.raises(UnsupportedFormat):
        read_openrl_delta(write_openrl_delta(tmp_path, CHANGES, format_version=version))


@pytest.mark.parametrize("name", ["dense", "", None, 2])
def test_folder_of_another_format_is_unsupported(tmp_path: Path, name: object):
    with pytest.raises(UnsupportedFormat, match="not a sparse delta"):
        read_openrl_delta(write_openrl_delta(tmp_path, CHANGES, format=name))


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"layer_names": ["model.a", "model.a"]}, id="doubled name"),
        pytest.param({"layer_names": ["model.a"]}, id="too few names"),
        pytest.param({"layer_names": ["model.a", ""]}, id="empty name"),
        pytest.param({"layer_names": ["model.a", 5]}, id="name no string"),
        pytest.param({"layer_names": "ab"}, id="names no list"),
        pytest.param({"layer_shapes": [[3, 4]]}, id="too few shapes"),
        pytest.param({"layer_shapes": [[3, -4], [2]]}, id="negative"),
        pytest.param({"layer_shapes": [[3, 4.0], [2]]}, id="float"),
        pytest.param({"layer_shapes": [[3, True], [2]]}, id="bool"),
        pytest.param({"layer_shapes": [12, [2]]}, id="shape no list"),
        pytest.param({"layer_shapes": [[2**63], [2]]}, id="too large"),
    ],
)
def test_openrl_metadata_with_bad_layers_is_corrupt(tmp_path: Path, more: dict[str, Any]):
    with pytest.raises(CorruptFile) as caught:
        read_openrl_delta(write_openrl_delta(tmp_path, CHANGES, **more), SPECS)
    assert caught.value.file


@pytest.mark.parametrize(
    "specs",
    [
        {},
        SPECS | {"model.a": TensorSpec("model.a", (4, 3), "BF16")},
        SPECS | {"model.a": TensorSpec("model.a", (3, 4), "F16")},
    ],
    ids=["no such tensor", "shape", "type"],
)
def test_openrl_delta_that_does_not_fit_the_model_is_corrupt_and_names_the_tensor(
    tmp_path: Path, specs: dict[str, TensorSpec]
):
    with pytest.raises(CorruptFile, match="does not fit this model") as caught:
        read_openrl_delta(write_openrl_delta(tmp_path, CHANGES), specs)
    assert caught.value.tensor == "model.a"


def test_openrl_delta_with_unsorted_indices_is_corrupt(tmp_path: Path):
    with pytest.raises(CorruptFile, match="strictly increasing"):
        read_openrl_delta(write_openrl_delta(tmp_path, {"model.b": ([1, 0], torch.ones(2), [2])}))


def test_folder_without_metadata_is_not_found(tmp_path: Path):
    (write_openrl_delta(tmp_path, CHANGES) / "metadata.json").unlink()
    with pytest.raises(ObjectNotFound, match=r"metadata\.json"):
        read_openrl_delta(tmp_path)


def test_folder_without_payload_is_not_found(tmp_path: Path):
    (write_openrl_delta(tmp_path, CHANGES) / "delta.safetensors").unlink()
    with pytest.raises(ObjectNotFound):
        read_openrl_delta(tmp_path)


def test_file_instead_of_a_folder_is_not_found(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ObjectNotFound):
        read_folder_metadata(tmp_path / "file")


def test_our_own_delta_is_not_taken_for_openrls(tmp_path: Path):
    run = make_run(tmp_path, 1)
    with pytest.raises(CorruptFile, match="belongs to a run"):
        read_openrl_delta(run.sync_dir / run.record(1).folder)
