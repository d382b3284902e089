"""SkyRL's delta folders: read bit for bit against the state before, or refused with all that is known."""

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import snapshot_of
from tests.support.skyrl import (
    bytes_of,
    edit_manifest,
    edit_tensor,
    replace_payload,
    state_of,
    u8,
    write_skyrl_delta,
    xor_of,
)
from tests.support.strategies import bits_for, shapes
from tests.support.tensors import TORCH_CODES, bits_of, random_bits, special_bits, to_torch
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.errors import (
    CorruptFile,
    DeltaSnapshotError,
    FormatError,
    LimitExceeded,
    ObjectNotFound,
    StoreUnavailable,
    UnsupportedFormat,
)
from vllm_delta_snapshot.format.encodings.planes import frame_pieces
from vllm_delta_snapshot.interop import skyrl_manifest
from vllm_delta_snapshot.interop.skyrl import open_skyrl_delta
from vllm_delta_snapshot.interop.skyrl_manifest import delta_name, delta_version, read_manifest
from vllm_delta_snapshot.types import TensorPatch, TensorSpec

FILE = "delta-rank00000-file000000.safetensors"
SPECS = {
    "model.a": TensorSpec("model.a", (3, 4), "BF16"),
    "model.b": TensorSpec("model.b", (), "F32"),
    "model.c": TensorSpec("model.c", (5,), "F8_E4M3"),
}


def weights(seed: int) -> dict[str, torch.Tensor]:
    return {name: to_torch(random_bits(spec.dtype, spec.numel, name, seed), spec) for name, spec in SPECS.items()}


OLD, NEW = weights(0), weights(0)
NEW["model.a"][0] = weights(1)["model.a"][0]
NEW["model.b"] = torch.tensor(-0.0)
NEW["model.c"].view(torch.uint8)[3] ^= 0x80


def written(folder: Path, **options: Any) -> Path:
    return write_skyrl_delta(folder / "delta-00000001", OLD, NEW, **options)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("skyrl"))


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / pristine.name))


def applied(folder: Path, old: dict[str, torch.Tensor] = OLD, specs: dict[str, TensorSpec] | None = SPECS) -> dict:
    """Return the state that a folder leads to."""
    state = state_of(old)
    for patch in open_skyrl_delta(folder, specs).patches(state_of(old).__getitem__):
        state[patch.spec.name][patch.positions] = patch.values
    return {name: bits.tolist() for name, bits in state.items()}


def expected(new: dict[str, torch.Tensor] = NEW) -> dict[str, list[int]]:
    return {name: bits.tolist() for name, bits in state_of(new).items()}


def round_trip(folder: Path, spec: TensorSpec, old: Bits, new: Bits, **options: Any) -> TensorPatch:
    pair = {spec.name: to_torch(old, spec)}, {spec.name: to_torch(new, spec)}
    write_skyrl_delta(folder, *pair, with_unchanged=True, **options)
    [patch] = open_skyrl_delta(folder, {spec.name: spec}).patches({spec.name: old}.__getitem__)
    return patch


def assert_is_change(patch: TensorPatch, old: Bits, new: Bits) -> None:
    at = np.flatnonzero(old != new)
    assert patch.positions.tolist() == at.tolist()
    assert patch.values.tolist() == new[at].tolist()
    assert patch.values.dtype == new.dtype
    assert patch.positions.dtype == np.int32


# --- what is read


@pytest.mark.parametrize("code", TORCH_CODES)
def test_special_bits_of_every_type_come_back(tmp_path: Path, code: str):
    new = special_bits(code)
    spec = TensorSpec("w", (new.size,), code)
    for number, old in enumerate([np.roll(new, 1), random_bits(code, new.size), np.zeros_like(new), new]):
        patch = round_trip(tmp_path / str(number), spec, old, new)
        assert patch.spec == spec
        assert_is_change(patch, old, new)


@given(st.data(), shapes, st.sampled_from(TORCH_CODES))
def test_any_tensor_comes_back(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, shape: Any, code: str):
    spec = TensorSpec("w", shape, code)
    old, new = data.draw(bits_for(spec, spec.numel)), data.draw(bits_for(spec, spec.numel))
    assert_is_change(round_trip(tmp_path_factory.mktemp("any") / "d", spec, old, new), old, new)


@pytest.mark.parametrize("shape", [(), (0,), (0, 4)], ids=str)
def test_scalar_and_empty_tensors_come_back(tmp_path: Path, shape: tuple[int, ...]):
    spec = TensorSpec("w", shape, "BF16")
    old, new = random_bits("BF16", spec.numel, 1), random_bits("BF16", spec.numel, 2)
    assert_is_change(round_trip(tmp_path / "d", spec, old, new), old, new)


def test_minus_zero_and_nan_payloads_are_changes(tmp_path: Path):
    spec = TensorSpec("w", (4,), "BF16")
    old = np.array([0x0000, 0x7FC0, 0x7FC1, 0x8000], np.uint16)
    new = np.array([0x8000, 0x7FC1, 0x7FC1, 0x0000], np.uint16)
    patch = round_trip(tmp_path / "d", spec, old, new)
    assert (patch.positions.tolist(), patch.values.tolist()) == ([0, 1, 3], [0x8000, 0x7FC1, 0])


def test_element_that_changes_in_one_byte_is_one_change(tmp_path: Path):
    spec = TensorSpec("w", (3,), "F32")
    old = np.array([1, 2, 3], np.uint32)
    patch = round_trip(tmp_path / "d", spec, old, old ^ np.array([0, 0x00010000, 0], np.uint32))
    assert patch.positions.tolist() == [1]


@pytest.mark.parametrize("code", ["U8", "BF16", "F32", "F64"])
def test_tensor_of_several_pieces_comes_back(tmp_path: Path, code: str):
    spec = TensorSpec("w", (3, 500_001), code)
    old = random_bits(code, spec.numel, 0)
    new = old.copy()
    at = np.array([0, 131_071, 131_072, 524_287, 524_288, 1_048_575, 1_048_576, spec.numel - 1])
    new[at] ^= 1
    patch = round_trip(tmp_path / "d", spec, old, new)
    assert_is_change(patch, old, new)
    assert patch.changed == at.size


def test_tensor_that_changes_wholly_comes_back(tmp_path: Path):
    spec = TensorSpec("w", (300_000,), "F32")
    old, new = random_bits("F32", spec.numel, 0), random_bits("F32", spec.numel, 1)
    assert_is_change(round_trip(tmp_path / "d", spec, old, new), old, new)


def test_memory_grows_with_the_changes_and_not_with_the_tensor(tmp_path: Path):
    spec = TensorSpec("w", (32 << 20,), "U8")
    old = np.zeros(spec.numel, np.uint8)
    new = old.copy()
    new[12_345_678] = 1
    folder = write_skyrl_delta(tmp_path / "d", {"w": to_torch(old, spec)}, {"w": to_torch(new, spec)})
    delta = open_skyrl_delta(folder, {"w": spec})
    tracemalloc.start()
    patch = delta.patch("w", old)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert patch.positions.tolist() == [12_345_678]
    assert peak < 8 << 20


def test_folder_leads_to_the_new_weights(pristine: Path):
    assert applied(pristine) == expected()


def test_folder_without_a_table_of_tensors_is_read_on_its_own_word(pristine: Path):
    delta = open_skyrl_delta(pristine)
    assert delta.specs == SPECS
    assert applied(pristine, specs=None) == expected()


def test_delta_says_what_it_is(pristine: Path):
    delta = open_skyrl_delta(pristine, SPECS)
    assert (delta.manifest.version, delta.manifest.base_version, delta.folder) == (1, 0, pristine)
    assert delta.payload_bytes == (pristine / FILE).stat().st_size


def test_changes_are_counted_without_old_values(pristine: Path):
    delta = open_skyrl_delta(pristine)
    for patch in open_skyrl_delta(pristine, SPECS).patches(state_of(OLD).__getitem__):
        assert delta.count_changed(patch.spec.name) == patch.changed > 0


def test_tensor_without_a_change_is_an_empty_patch(tmp_path: Path):
    folder = write_skyrl_delta(tmp_path / "d", OLD, OLD, with_unchanged=True)
    assert [p.changed for p in open_skyrl_delta(folder, SPECS).patches(state_of(OLD).__getitem__)] == [0, 0, 0]


def test_delta_without_tensors_is_read(tmp_path: Path):
    folder = write_skyrl_delta(tmp_path / "d", OLD, OLD)
    assert list(open_skyrl_delta(folder, SPECS).patches(state_of(OLD).__getitem__)) == []


def test_several_payload_files_are_read(tmp_path: Path):
    folder = written(tmp_path, tensors_a_file=1)
    assert len(list(folder.glob("*.safetensors"))) == 3
    assert applied(folder) == expected()


@pytest.mark.parametrize("options", [{"algorithm": "sha256"}, {"is_early": True}], ids=["sha256", "early"])
def test_sha256_is_compared_too(tmp_path: Path, options: dict[str, Any]):
    folder = written(tmp_path, **options)
    assert applied(folder) == expected()
    other = {name: tensor.clone() for name, tensor in OLD.items()}
    other["model.a"][2, 2] += 1
    with pytest.raises(CorruptFile, match="does not come out as SkyRL published it"):
        applied(folder, other)


def test_checksum_without_an_algorithm_is_xxh3(folder: Path):
    assert applied(edit_tensor(folder, checksum_algorithm=...)) == expected()


def test_fields_that_are_not_known_are_ignored(folder: Path):
    assert applied(edit_tensor(edit_manifest(folder, more={"x": [1]}), 1, note="x", sha256="")) == expected()


def test_other_files_in_the_folder_are_ignored(folder: Path):
    (folder / ".manifest.json.12.tmp").write_text("{")
    (folder / "stray.safetensors").write_bytes(b"")
    assert applied(folder) == expected()


def test_folder_of_any_name_is_read(folder: Path, tmp_path: Path):
    assert applied(folder.rename(tmp_path / "copy of 7")) == expected()


def test_names_of_folders_are_of_eight_digits():
    assert delta_name(42) == "delta-00000042"
    assert [delta_version(name) for name in ("delta-00000042", "delta-42", "v00000042", "delta-000000420")] == [
        42, None, None, None
    ]  # fmt: skip


# --- what does not fit


def assert_explained(error: DeltaSnapshotError, folder: Path, tensor: str | None) -> None:
    assert error.file is not None
    assert error.file.startswith(str(folder))
    assert error.tensor == tensor
    assert error.hint


@pytest.mark.parametrize(
    "specs",
    [
        {name: spec for name, spec in SPECS.items() if name != "model.a"},
        SPECS | {"model.a": TensorSpec("model.a", (4, 3), "BF16")},
        SPECS | {"model.a": TensorSpec("model.a", (3, 4), "F16")},
    ],
    ids=["no such tensor", "shape", "type"],
)
def test_tensor_that_does_not_fit_the_checkpoint_is_corrupt(pristine: Path, specs: dict[str, TensorSpec]):
    with pytest.raises(CorruptFile, match="does not fit the checkpoint") as caught:
        open_skyrl_delta(pristine, specs)
    assert_explained(caught.value, pristine, "model.a")
    assert str(caught.value.found) == "BF16[3,4]"


def test_other_old_weights_are_found_out_and_both_causes_named(pristine: Path):
    other = {name: tensor.clone() for name, tensor in OLD.items()}
    other["model.a"].view(torch.int16)[2, 3] ^= 1
    with pytest.raises(CorruptFile, match="as SkyRL published it in version 1") as caught:
        applied(pristine, other)
    assert_explained(caught.value, pristine, "model.a")
    assert "xxh3-128" in str(caught.value.expected)
    assert "damaged" in str(caught.value.hint)
    assert "version 0" in str(caught.value.hint)


def test_patches_before_the_wrong_tensor_are_good(pristine: Path):
    other = state_of(OLD)
    other["model.c"][0] ^= 1
    patches = open_skyrl_delta(pristine, SPECS).patches(other.__getitem__)
    assert [next(patches).spec.name, next(patches).spec.name] == ["model.a", "model.b"]
    with pytest.raises(CorruptFile):
        next(patches)


def test_folder_without_manifest_was_not_committed(folder: Path):
    (folder / "manifest.json").unlink()
    with pytest.raises(ObjectNotFound, match="not committed") as caught:
        open_skyrl_delta(folder)
    assert caught.value.hint


@pytest.mark.parametrize("name", ["manifest.json", FILE])
def test_folder_in_place_of_a_file_is_told(folder: Path, name: str):
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises((StoreUnavailable, CorruptFile)) as caught:
        open_skyrl_delta(folder)
    assert caught.value.file == str(folder / name)


def test_file_in_place_of_the_folder_is_not_found(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ObjectNotFound):
        open_skyrl_delta(tmp_path / "file")


def test_payload_file_that_is_missing_is_corrupt(folder: Path):
    (folder / FILE).unlink()
    with pytest.raises(CorruptFile, match="lists a payload file that is missing") as caught:
        open_skyrl_delta(folder)
    assert_explained(caught.value, folder / FILE, None)


# --- hostile manifests


HUGE = 2**62
MANIFESTS: dict[str, Callable[[Path], Path]] = {
    "version of another folder": lambda f: edit_manifest(f, version=2),
    "version 0": lambda f: edit_manifest(f, version=0),
    "version negative": lambda f: edit_manifest(f, version=-1),
    "version as text": lambda f: edit_manifest(f, version="1"),
    "version as bool": lambda f: edit_manifest(f, version=True),
    "version too large": lambda f: edit_manifest(f.rename(f.with_name("x")), version=10**8, base_version=0),
    "base version is the version": lambda f: edit_manifest(f, base_version=1),
    "base version later": lambda f: edit_manifest(f, base_version=7),
    "tensors no list": lambda f: edit_manifest(f, tensors={}),
    "payload files no list": lambda f: edit_manifest(f, payload_files=FILE),
    "payload files missing": lambda f: edit_manifest(f, payload_files=[]),
    "payload files too many": lambda f: edit_manifest(f, payload_files=[FILE, "other.safetensors"]),
    "payload files doubled": lambda f: edit_manifest(f, payload_files=[FILE, FILE]),
    "payload file outside": lambda f: edit_manifest(f, payload_files=["../x.safetensors"]),
    "total too small": lambda f: edit_manifest(f, total_uncompressed_num_bytes=1),
    "total huge": lambda f: edit_manifest(f, total_uncompressed_num_bytes=HUGE),
    "total compressed wrong": lambda f: edit_manifest(f, total_compressed_num_bytes=0),
    "total negative": lambda f: edit_manifest(f, total_compressed_num_bytes=-1),
    "total as float": lambda f: edit_manifest(f, total_compressed_num_bytes=1.0),
}


@pytest.mark.parametrize("harm", MANIFESTS.values(), ids=MANIFESTS)
def test_manifest_that_contradicts_itself_is_corrupt(folder: Path, harm: Callable[[Path], Path]):
    harmed = harm(folder)
    with pytest.raises(CorruptFile) as caught:
        open_skyrl_delta(harmed, SPECS)
    assert_explained(caught.value, harmed / "manifest.json", None)


ENTRIES: dict[str, tuple[dict[str, Any], type[FormatError]]] = {
    "another name": ({"name": "model.x"}, CorruptFile),
    "type unknown": ({"dtype": "bfloat17"}, UnsupportedFormat),
    "type of ours": ({"dtype": "BF16"}, UnsupportedFormat),
    "type of another width": ({"dtype": "float32"}, CorruptFile),
    "type of the same width": ({"dtype": "float16"}, CorruptFile),
    "shape of the same size": ({"shape": [12]}, CorruptFile),
    "shape huge": ({"shape": [HUGE, HUGE]}, LimitExceeded),
    "size huge": ({"uncompressed_num_bytes": HUGE}, CorruptFile),
    "size zero": ({"uncompressed_num_bytes": 0}, CorruptFile),
    "shape and size of a terabyte": ({"shape": [2**39], "uncompressed_num_bytes": 2**40}, CorruptFile),
    "path": ({"payload_file": "../delta-00000001/" + FILE}, CorruptFile),
    "absolute path": ({"payload_file": "/etc/passwd"}, CorruptFile),
    "dot": ({"payload_file": ".."}, CorruptFile),
    "empty path": ({"payload_file": ""}, CorruptFile),
    "path with a null": ({"payload_file": "a\0b"}, CorruptFile),
    "algorithm unknown": ({"checksum_algorithm": "crc32"}, UnsupportedFormat),
    "algorithm empty": ({"checksum_algorithm": ""}, UnsupportedFormat),
    "algorithm other": ({"checksum_algorithm": "sha256"}, CorruptFile),
    "checksum empty": ({"checksum": ""}, CorruptFile),
    "checksum too short": ({"checksum": "00"}, CorruptFile),
    "checksum upper case": ({"checksum": "AB" * 16}, CorruptFile),
    "checksum no hexadecimal": ({"checksum": "x" * 32}, CorruptFile),
    "checksum with a line break": ({"checksum": "0" * 32 + "\n"}, CorruptFile),
    "checksum missing": ({"checksum": ...}, CorruptFile),
    "checksum other": ({"checksum": "0" * 32}, CorruptFile),
}


@pytest.mark.parametrize(("changes", "kind"), ENTRIES.values(), ids=ENTRIES)
def test_manifest_with_a_wrong_tensor_names_it(folder: Path, changes: dict[str, Any], kind: type[FormatError]):
    edit_tensor(folder, 0, **changes)
    tensors = json.loads((folder / "manifest.json").read_text())["tensors"]
    edit_manifest(folder, total_uncompressed_num_bytes=sum(t["uncompressed_num_bytes"] for t in tensors))
    with pytest.raises(FormatError) as caught:
        applied(folder)
    assert type(caught.value) is kind
    assert_explained(caught.value, folder, changes.get("name", "model.a"))


@pytest.mark.parametrize("field", ["name", "dtype", "shape", "payload_file", "payload_key", "compressed_num_bytes"])
@pytest.mark.parametrize("value", [..., None, [1.5], {"x": 1}], ids=["missing", "null", "list", "object"])
def test_manifest_with_a_field_that_is_missing_or_of_a_wrong_type_names_it(folder: Path, field: str, value: object):
    with pytest.raises(CorruptFile, match=rf"tensors\.1\.{field}") as caught:
        open_skyrl_delta(edit_tensor(folder, 1, **{field: value}))
    assert_explained(caught.value, folder / "manifest.json", None)


@pytest.mark.parametrize("shape", [[-1], [True], [2.0], ["2"], [1] * 65, 7], ids=str)
def test_manifest_with_a_malformed_shape_is_corrupt(folder: Path, shape: object):
    with pytest.raises(CorruptFile, match="shape"):
        open_skyrl_delta(edit_tensor(folder, 0, shape=shape))


def test_name_that_appears_twice_is_corrupt(folder: Path):
    with pytest.raises(CorruptFile, match="twice") as caught:
        open_skyrl_delta(edit_tensor(folder, 1, name="model.a"))
    assert_explained(caught.value, folder / "manifest.json", "model.a")


def test_payload_that_two_tensors_name_is_corrupt(folder: Path):
    with pytest.raises(CorruptFile, match="a payload appears twice"):
        open_skyrl_delta(edit_tensor(folder, 1, payload_key="model.a"))


def test_payload_key_that_is_missing_is_corrupt(folder: Path):
    with pytest.raises(CorruptFile, match="lacks a tensor") as caught:
        open_skyrl_delta(edit_tensor(folder, 1, payload_key="model.x"))
    assert_explained(caught.value, folder / FILE, "model.b")


def test_payload_tensor_that_is_not_listed_is_corrupt(folder: Path):
    save_file(load_file(folder / FILE) | {"more": u8(b"x")}, folder / FILE)
    with pytest.raises(CorruptFile, match="does not list") as caught:
        open_skyrl_delta(folder)
    assert_explained(caught.value, folder / FILE, "more")


@pytest.mark.parametrize("kind", ["type", "shape"])
def test_payload_of_another_type_or_shape_is_corrupt(folder: Path, kind: str):
    payload = load_file(folder / FILE)
    frame = payload["model.a"]
    payload["model.a"] = frame.view(torch.int8) if kind == "type" else frame.reshape(1, -1)
    save_file(payload, folder / FILE)
    with pytest.raises(CorruptFile, match="another type or size") as caught:
        open_skyrl_delta(folder)
    assert_explained(caught.value, folder / FILE, "model.a")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff\xfe{\0}\0", b'{"version": NaN}', b"[" * 100_000])
def test_manifest_that_is_no_json_object_is_corrupt(folder: Path, data: bytes):
    (folder / "manifest.json").write_bytes(data)
    with pytest.raises(CorruptFile) as caught:
        open_skyrl_delta(folder)
    assert_explained(caught.value, folder / "manifest.json", None)


def test_manifest_that_is_too_large_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(skyrl_manifest, "MAX_METADATA_BYTES", 100)
    with pytest.raises(LimitExceeded) as caught:
        read_manifest(folder)
    assert_explained(caught.value, folder / "manifest.json", None)


# --- hostile frames


XOR = xor_of(bytes_of(OLD["model.a"]), bytes_of(NEW["model.a"]))


def frame_of(data: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


def frame_that_claims(num_bytes: int) -> bytes:
    """Return a frame of a few bytes whose header says that it holds `num_bytes`."""
    return b"\x28\xb5\x2f\xfd\xc0\0" + num_bytes.to_bytes(8, "little") + b"\x01\0\0"


FRAMES = {
    "nothing": b"",
    "no frame": b"x" * 40,
    "header alone": frame_of(XOR)[:6],
    "cut off": frame_of(XOR)[:-4],
    "of something shorter": frame_of(XOR[:-1]),
    "of something longer": frame_of(XOR + b"\0"),
    "of nothing": frame_of(b""),
    "of zeros": frame_of(bytes(len(XOR))),
    "of a gigabyte": frame_that_claims(1 << 30),
    "of an exabyte": frame_that_claims(1 << 60),
    "empty but claims": frame_that_claims(len(XOR)),
    "without a size": frame_of(XOR, write_content_size=False),
    "with something after it": frame_of(XOR) + b"x",
    "with another frame after it": frame_of(XOR) + frame_of(b"x"),
    "with a skippable frame before it": b"\x50\x2a\x4d\x18\x01\0\0\0x" + frame_of(XOR),
}


@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
def test_payload_that_is_no_frame_of_the_tensor_is_corrupt(folder: Path, frame: bytes):
    replace_payload(folder, "model.a", frame)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptFile) as caught:
            applied(folder)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert_explained(caught.value, folder / FILE, "model.a")


@pytest.mark.parametrize("options", [{"level": 19}, {"write_checksum": True}, {"level": -5}], ids=str)
def test_frames_of_other_writers_are_read(folder: Path, options: dict[str, Any]):
    assert applied(replace_payload(folder, "model.a", frame_of(XOR, **options))) == expected()


def test_frame_that_decompresses_to_a_terabyte_is_refused_by_its_size_before_it_is_read(folder: Path):
    edit_tensor(folder, 0, shape=[2**39], uncompressed_num_bytes=2**40)
    with pytest.raises(CorruptFile, match="a zstd frame of another size"):
        open_skyrl_delta(edit_manifest(folder, total_uncompressed_num_bytes=2**40 + 9))


def test_frame_that_claims_a_terabyte_takes_no_memory_to_inspect(tmp_path: Path):
    spec = TensorSpec("w", (2**40,), "U8")
    folder = write_skyrl_delta(tmp_path / "d", {"w": torch.zeros(1).byte()}, {"w": torch.ones(1).byte()})
    edit_tensor(folder, shape=list(spec.shape), uncompressed_num_bytes=spec.numel)
    edit_manifest(replace_payload(folder, "w", frame_that_claims(2**40)), total_uncompressed_num_bytes=2**40)
    delta = open_skyrl_delta(folder)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptFile, match="cut off"):
            delta.count_changed("w")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1, 3 << 20])
def test_pieces_are_the_content_of_the_frame(size: int):
    data = random_bits("U8", size).tobytes()
    pieces = [piece.tobytes() for piece in frame_pieces(np.frombuffer(frame_of(data), np.uint8), size, tensor="w")]
    assert b"".join(pieces) == data
    assert all(len(piece) == 1 << 20 for piece in pieces[:-1])


# --- damage, everywhere


def tiny(folder: Path) -> Path:
    """Write the smallest folder with something in it."""
    return write_skyrl_delta(folder / "delta-00000001", {"w": OLD["model.a"]}, {"w": NEW["model.a"]})


TINY_SPECS = {"w": TensorSpec("w", (3, 4), "BF16")}
TINY_NEW = {"w": bits_of(NEW["model.a"]).tolist()}


def assert_refused_or_exact(folder: Path, what: str) -> bool:
    """Check that a damaged folder leads exactly to the new weights, or is refused with a reason; say which."""
    refused, found = None, None
    try:
        found = applied(folder, {"w": OLD["model.a"]}, TINY_SPECS)
    except FormatError as error:
        refused = error
    if refused is None:
        assert found == TINY_NEW, what
        return True
    assert_explained(refused, folder, refused.tensor)
    return False


@pytest.mark.parametrize("name", ["manifest.json", FILE])
def test_every_byte_flipped_is_an_error_or_changes_nothing(tmp_path: Path, name: str):
    folder = tiny(tmp_path)
    path = folder / name
    data = path.read_bytes()
    exact = 0
    for at in range(len(data)):
        mask = (0x01, 0x20, 0x80, 0xFF)[at % 4]
        path.write_bytes(data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :])
        exact += assert_refused_or_exact(folder, f"{name}, byte {at} XOR {mask:#x}")
    assert exact < len(data) // 4


@pytest.mark.parametrize("name", ["manifest.json", FILE])
def test_every_truncation_is_an_error(tmp_path: Path, name: str):
    folder = tiny(tmp_path)
    path = folder / name
    data = path.read_bytes()
    for size in range(len(data) - 1, -1, -3):
        path.write_bytes(data[:size])
        assert not assert_refused_or_exact(folder, f"{name}, {size} of {len(data)} bytes")


@pytest.mark.parametrize("name", ["manifest.json", FILE])
def test_bytes_at_the_end_are_an_error_or_change_nothing(tmp_path: Path, name: str):
    folder = tiny(tmp_path)
    for more in (b"\0", b" ", b"}", b"\n\n"):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data + more)
        assert_refused_or_exact(folder, repr(more))
        (folder / name).write_bytes(data)


def test_reading_writes_nothing(folder: Path):
    before = snapshot_of(folder)
    applied(folder)
    assert snapshot_of(folder) == before
