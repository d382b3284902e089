"""Decode: a patch is trusted only after its tensor, its positions and its digests are checked."""

import json
from pathlib import Path

import pytest
import xxhash

from tests.support.runs import TinyRun, copy_of, edit_metadata, edit_record, make_run
from tests.support.tensors import apply_by_hand, assert_same_patches
from vllm_delta_snapshot.errors import CorruptFile, FormatError, UnsupportedFormat
from vllm_delta_snapshot.stage.decode import decode
from vllm_delta_snapshot.types import TensorSpec


@pytest.fixture(scope="module", params=[None, 1], ids=["one file", "many files"])
def pristine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_run(tmp_path_factory.mktemp("run"), 2, max_file_bytes=request.param)


@pytest.fixture
def run(pristine: TinyRun, tmp_path: Path) -> TinyRun:
    return copy_of(pristine, tmp_path / "run")


def tensors_of(run: TinyRun, version: int) -> list[dict[str, object]]:
    path = run.sync_dir / run.record(version).folder / "metadata.json"
    return json.loads(path.read_text())["tensors"]


def damage_payload(run: TinyRun, version: int, place: int) -> None:
    """Flip a byte of the first payload file, and let metadata and record agree with it."""
    path = run.payload(version)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    files = json.loads((path.parent / "metadata.json").read_text())["files"]
    files[0]["xxh3_128"] = xxhash.xxh3_128_hexdigest(data)
    edit_metadata(run, version, files=files)


@pytest.mark.parametrize("version", [1, 2])
def test_decoded_patches_lead_to_the_trainers_weights(pristine: TinyRun, tmp_path: Path, version: int):
    state = dict(pristine.history[version - 1])
    for patch in pristine.patches(version, tmp_path):
        state[patch.spec.name] = apply_by_hand(state[patch.spec.name], patch)
    expected = pristine.history[version]
    assert [name for name in expected if state[name].tolist() != expected[name].tolist()] == []


def test_decoded_patches_come_in_the_order_of_layer_names(pristine: TinyRun, tmp_path: Path):
    names = [patch.spec.name for patch in pristine.patches(2, tmp_path)]
    assert tuple(names) == pristine.metadata(2).layer_names


@pytest.mark.parametrize("place", [-1, -2])
def test_value_that_was_changed_behind_every_checksum_is_corrupt(run: TinyRun, tmp_path: Path, place: int):
    damage_payload(run, 1, place)
    with pytest.raises(CorruptFile, match=r"other values than its writer saw|position") as caught:
        run.patches(1, tmp_path / "local")
    assert caught.value.tensor


def test_any_byte_changed_behind_every_checksum_is_refused_or_says_nothing(run: TinyRun, tmp_path: Path):
    good, patches = run.payload(1).read_bytes(), run.patches(1, tmp_path / "good")
    for place in range(len(good) % 7, len(good), 7):
        damage_payload(run, 1, place)
        try:
            found = run.patches(1, tmp_path / f"local-{place}")
        except FormatError:
            pass
        else:  # a byte that says nothing: in the header's padding, or in its copy of layer_names
            assert_same_patches(found, patches)
        run.payload(1).write_bytes(good)


@pytest.mark.parametrize("field", ["old_digest", "new_digest"])
def test_digest_in_metadata_that_was_changed_is_corrupt(run: TinyRun, tmp_path: Path, field: str):
    tensors = tensors_of(run, 1)
    tensors[0][field] = "0" * 16
    edit_metadata(run, 1, tensors=tensors)
    with pytest.raises(CorruptFile, match="digest"):
        run.patches(1, tmp_path / "local")


@pytest.mark.parametrize("field", ["base_state_digest", "state_digest"])
def test_version_that_does_not_lead_to_its_state_is_corrupt(run: TinyRun, tmp_path: Path, field: str):
    edit_metadata(run, 1, **{field: "0" * 16})
    edit_record(run, 1, **{field: "0" * 16})
    with pytest.raises(CorruptFile, match="does not lead to the state it claims"):
        run.patches(1, tmp_path / "local")


@pytest.mark.parametrize(("field", "value"), [("name", "stranger"), ("shape", [64]), ("dtype", "F16")])
def test_tensor_that_is_not_the_runs_is_corrupt_and_named(run: TinyRun, tmp_path: Path, field: str, value: object):
    tensors = tensors_of(run, 1)
    tensors[0][field] = value
    names, shapes = ([t[key] for t in tensors] for key in ("name", "shape"))
    edit_metadata(run, 1, tensors=tensors, layer_names=names, layer_shapes=shapes)
    with pytest.raises(CorruptFile, match="does not fit the run") as caught:
        run.patches(1, tmp_path / "local")
    assert caught.value.tensor == names[0]


def test_tensor_of_an_unknown_encoding_is_unsupported(run: TinyRun, tmp_path: Path):
    tensors = tensors_of(run, 1)
    tensors[0]["encoding"] = "zip"
    edit_metadata(run, 1, tensors=tensors)
    with pytest.raises(UnsupportedFormat) as caught:
        run.patches(1, tmp_path / "local")
    assert caught.value.tensor == tensors[0]["name"]


def test_tensor_of_an_unknown_type_is_unsupported(run: TinyRun, tmp_path: Path):
    tensors = tensors_of(run, 1)
    tensors[0]["dtype"] = "F4"
    edit_metadata(run, 1, tensors=tensors)
    with pytest.raises(UnsupportedFormat):
        run.patches(1, tmp_path / "local")


def test_tensor_said_to_lie_in_another_file_is_corrupt(tmp_path: Path):
    run = make_run(tmp_path, 1, max_file_bytes=1)
    tensors = tensors_of(run, 1)
    tensors[0]["file"], tensors[1]["file"] = tensors[1]["file"], tensors[0]["file"]
    edit_metadata(run, 1, tensors=tensors)
    with pytest.raises(CorruptFile, match="wrong tensors in the file"):
        run.patches(1, tmp_path / "local")


def test_tensor_missing_from_the_runs_table_is_corrupt(pristine: TinyRun, tmp_path: Path):
    pristine.patches(1, tmp_path)
    specs: dict[str, TensorSpec] = {}
    with pytest.raises(CorruptFile, match="no such tensor"):
        decode(pristine.metadata(1), tmp_path, specs)
