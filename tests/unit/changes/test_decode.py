"""Decode: a change is trusted only after its tensor, its positions and its digests are checked.

A difference's digests can only be compared when it is resolved; nothing wrong gets past both.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash

from tests.support.runs import TinyRun, assert_same_state, copy_of, edit_metadata, edit_record, make_run
from tests.support.tensors import apply_by_hand, assert_same_patches
from vllm_delta_snapshot.changes.decode import decode
from vllm_delta_snapshot.changes.resolve import resolve_all
from vllm_delta_snapshot.errors import BaseMismatch, CorruptFile, FormatError, UnsupportedFormat
from vllm_delta_snapshot.types import TensorPatch, TensorSpec

RUNS = {
    "one file": (None, "raw"),
    "many files": (1, "raw"),
    "differences": (None, "difference"),
    "raw differences": (1, "raw_difference"),
    "both": (None, None),
}


@pytest.fixture(scope="module", params=RUNS.values(), ids=RUNS)
def pristine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    max_file_bytes, encoding = request.param
    return make_run(tmp_path_factory.mktemp("run"), 2, max_file_bytes=max_file_bytes, encoding=encoding)


@pytest.fixture
def run(pristine: TinyRun, tmp_path: Path) -> TinyRun:
    return copy_of(pristine, tmp_path / "run")


def tensors_of(run: TinyRun, version: int) -> list[dict[str, object]]:
    path = run.sync_dir / run.record(version).folder / "metadata.json"
    return json.loads(path.read_text())["tensors"]


def resolved(run: TinyRun, version: int, local: Path) -> list[TensorPatch]:
    """Fetch, decode and resolve a version against the trainer's weights."""
    before = run.history[version - 1]
    return list(resolve_all(run.metadata(version), run.changes(version, local), before.__getitem__))


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
    for patch in pristine.changes(version, tmp_path):
        state[patch.spec.name] = apply_by_hand(state[patch.spec.name], patch)
    expected = pristine.history[version]
    assert [name for name in expected if state[name].tolist() != expected[name].tolist()] == []


def test_decoded_patches_come_in_the_order_of_layer_names(pristine: TinyRun, tmp_path: Path):
    names = [patch.spec.name for patch in pristine.changes(2, tmp_path)]
    assert tuple(names) == pristine.metadata(2).layer_names


@pytest.mark.parametrize("place", [-1, -2])
def test_value_that_was_changed_behind_every_checksum_is_refused_and_named(run: TinyRun, tmp_path: Path, place: int):
    damage_payload(run, 1, place)
    with pytest.raises((CorruptFile, BaseMismatch)) as caught:
        resolved(run, 1, tmp_path / "local")
    assert caught.value.tensor


def test_any_byte_changed_behind_every_checksum_is_refused_or_says_nothing(run: TinyRun, tmp_path: Path):
    good, patches = run.payload(1).read_bytes(), resolved(run, 1, tmp_path / "good")
    for place in range(len(good) % 7, len(good), 7):
        damage_payload(run, 1, place)
        try:
            found = resolved(run, 1, tmp_path / f"local-{place}")
        except (FormatError, BaseMismatch):
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
        run.changes(1, tmp_path / "local")


@pytest.mark.parametrize("field", ["base_state_digest", "state_digest"])
def test_version_that_does_not_lead_to_its_state_is_corrupt(run: TinyRun, tmp_path: Path, field: str):
    edit_metadata(run, 1, **{field: "0" * 16})
    edit_record(run, 1, **{field: "0" * 16})
    with pytest.raises(CorruptFile, match="does not lead to the state it claims"):
        run.changes(1, tmp_path / "local")


@pytest.mark.parametrize(("field", "value"), [("name", "stranger"), ("shape", [64]), ("dtype", "F16")])
def test_tensor_that_is_not_the_runs_is_corrupt_and_named(run: TinyRun, tmp_path: Path, field: str, value: object):
    tensors = tensors_of(run, 1)
    tensors[0][field] = value
    names, shapes = ([t[key] for t in tensors] for key in ("name", "shape"))
    edit_metadata(run, 1, tensors=tensors, layer_names=names, layer_shapes=shapes)
    with pytest.raises(CorruptFile, match="does not fit the run") as caught:
        run.changes(1, tmp_path / "local")
    assert caught.value.tensor == names[0]


def test_patch_that_says_nothing_of_old_values_is_corrupt(tmp_path: Path):
    run = make_run(tmp_path, 1, encoding="raw")
    tensors = tensors_of(run, 1)
    moved = (int(tensors[0]["new_digest"], 16) - int(tensors[0]["old_digest"], 16)) % 2**64
    tensors[0] |= {"old_digest": None, "new_digest": f"{moved:016x}"}
    edit_metadata(run, 1, tensors=tensors)
    with pytest.raises(CorruptFile, match="other values than its writer saw") as caught:
        run.changes(1, tmp_path / "local")
    assert caught.value.tensor == tensors[0]["name"]


def test_difference_may_say_only_how_far_it_moves_the_digest(tmp_path: Path):
    run = make_run(tmp_path, 1, encoding="difference")
    tensors = tensors_of(run, 1)  # as in an update of several versions
    for tensor in tensors:
        moved = (int(tensor["new_digest"], 16) - int(tensor["old_digest"], 16)) % 2**64
        tensor |= {"old_digest": None, "new_digest": f"{moved:016x}"}
    edit_metadata(run, 1, tensors=tensors)
    state = dict(run.history[0])
    for patch in resolved(run, 1, tmp_path / "local"):
        state[patch.spec.name] = apply_by_hand(state[patch.spec.name], patch)
    assert_same_state(state, run.history[1])


def test_changes_decoded_on_threads_are_the_same(pristine: TinyRun, tmp_path: Path):
    expected = pristine.changes(2, tmp_path)
    with ThreadPoolExecutor(2) as pool:
        found = decode(pristine.metadata(2), tmp_path, pristine.specs, pool)
    for one, other in zip(found, expected, strict=True):
        assert (type(one), one.spec) == (type(other), other.spec)
        assert (one.positions.tolist(), one.values.tolist()) == (other.positions.tolist(), other.values.tolist())


def test_tensor_of_an_unknown_encoding_is_unsupported(run: TinyRun, tmp_path: Path):
    tensors = tensors_of(run, 1)
    tensors[0]["encoding"] = "zip"
    edit_metadata(run, 1, tensors=tensors, format_version=3)
    with pytest.raises(UnsupportedFormat) as caught:
        run.changes(1, tmp_path / "local")
    assert caught.value.tensor == tensors[0]["name"]


def test_tensor_of_an_unknown_type_is_unsupported(run: TinyRun, tmp_path: Path):
    tensors = tensors_of(run, 1)
    tensors[0]["dtype"] = "F4"
    edit_metadata(run, 1, tensors=tensors)
    with pytest.raises(UnsupportedFormat):
        run.changes(1, tmp_path / "local")


def test_tensor_said_to_lie_in_another_file_is_corrupt(tmp_path: Path):
    run = make_run(tmp_path, 1, max_file_bytes=1)
    tensors = tensors_of(run, 1)
    tensors[0]["file"], tensors[1]["file"] = tensors[1]["file"], tensors[0]["file"]
    edit_metadata(run, 1, tensors=tensors)
    with pytest.raises(CorruptFile, match="wrong tensors in the file"):
        run.changes(1, tmp_path / "local")


def test_tensor_missing_from_the_runs_table_is_corrupt(pristine: TinyRun, tmp_path: Path):
    pristine.changes(1, tmp_path)
    specs: dict[str, TensorSpec] = {}
    with pytest.raises(CorruptFile, match="no such tensor"):
        decode(pristine.metadata(1), tmp_path, specs)
