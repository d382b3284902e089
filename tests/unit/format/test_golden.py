"""Golden files: bytes that were written once must be read, and written again, the same for ever.

If one of these fails, the format changed: restore it, or make a new format version (tests/golden/make.py).
"""

import json
from pathlib import Path

import numpy as np
import pytest
import zstandard

from tests.golden.make import (
    COMPACT_ENCODINGS,
    COMPACT_SPECS,
    PARTS_ENCODINGS,
    SPECS,
    State,
    base_state,
    compact_changes,
    compact_files,
    merged_changes,
    parts_changes,
    parts_files,
    patches_of,
    raw_files,
)
from tests.support.encodings import assert_same_changes
from vllm_delta_snapshot.changes.decode import decode
from vllm_delta_snapshot.changes.resolve import resolve_all
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.dtypes import ALL_CODES
from vllm_delta_snapshot.format.container import plan_file
from vllm_delta_snapshot.format.digest import format_digest, patch_digest, state_digest, tensor_digest, tensor_key
from vllm_delta_snapshot.format.encodings import ENCODINGS
from vllm_delta_snapshot.format.layout import delta_folder
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.format.run import RunInfo
from vllm_delta_snapshot.format.safetensors_io import MappedFile, NamedBits, file_chunks
from vllm_delta_snapshot.format.version import VersionRecord
from vllm_delta_snapshot.interop.openrl import read_folder_metadata
from vllm_delta_snapshot.runs.materialize import materialize
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store.posix import PosixStore
from vllm_delta_snapshot.types import Change, TensorDifference, TensorSpec

GOLDEN = Path(__file__).parents[2] / "golden"
RUN = GOLDEN / "run"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
STATE_DIGESTS = [
    "3dbcf85ac0e60aee",
    "b7a7c320a3e54965",
    "f78f962c389f2ee9",
    "f78f962c389f2ee9",
    "f8bcf7d80b8fcd70",
]
VERSIONS = [1, 2, 3, 4]


COMPACT = GOLDEN / "compact"
COMPACT_EXPECTED = json.loads((GOLDEN / "expected_compact.json").read_text())
COMPACT_STATE_DIGESTS = [
    "f25b8c82f0f57bd7",
    "165ef55a0b61ad29",
    "77a1cae2144a8347",
    "3dc8f0ff80b0c475",
    "040726e2ccc84a9a",
    "54b1086e2cbd47c0",
    "378cf0e8b960f805",
    "b076abc03987a170",
    "c5311ca116c9ad30",
    "472ea6e353beb470",
]
PARTS = GOLDEN / "parts"
PARTS_EXPECTED = json.loads((GOLDEN / "expected_parts.json").read_text())
RUNS = {"run": RUN, "compact": COMPACT, "parts": PARTS}
OF_RUNS = [
    pytest.param(RUNS[name], version, id=f"{name} {version}")
    for name, versions in (("run", VERSIONS), ("compact", COMPACT_ENCODINGS), ("parts", PARTS_ENCODINGS))
    for version in versions
]
every_version = pytest.mark.parametrize(("run", "version"), OF_RUNS)


def folder_of(version: int, run: Path = RUN) -> Path:
    return run / delta_folder(version, f"{version:08x}")


def test_golden_run_is_read_whole():
    folder = RunFolder(PosixStore(RUN))
    assert folder.versions() == VERSIONS
    assert list(folder.read_run().specs().values()) == SPECS


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_version_has_exactly_its_patches(version: int):
    folder = RunFolder(PosixStore(RUN))
    metadata = folder.read_metadata(folder.read_version(version))
    found = decode(metadata, folder_of(version), folder.read_run().specs())
    assert_same_changes(found, patches_of(version))


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_records_have_exactly_their_digests(version: int):
    record = RunFolder(PosixStore(RUN)).read_version(version)
    assert (record.base_state_digest, record.state_digest) == (STATE_DIGESTS[version - 1], STATE_DIGESTS[version])


@pytest.mark.parametrize("version", [0, *VERSIONS])
def test_golden_run_materializes_to_exactly_its_bytes(tmp_path: Path, version: int):
    materialize(RunFolder(PosixStore(RUN)), Checkpoint(GOLDEN / "base"), version, tmp_path / "out")
    checkpoint = Checkpoint(tmp_path / "out")
    assert {spec.name: bits.tobytes().hex() for spec, bits in checkpoint.items()} == EXPECTED["states"][version]
    assert checkpoint.state_digest == STATE_DIGESTS[version] == EXPECTED["state_digests"][version]


@pytest.mark.parametrize("version", VERSIONS)
def test_payload_written_again_is_byte_equal(version: int):
    files = raw_files(version)
    assert len(files) > 1 or version != 4
    written = {name: b"".join(plan_file(name, blocks).chunks()) for name, blocks in files}
    assert written == {path.name: path.read_bytes() for path in folder_of(version).glob("*.safetensors")}


@every_version
def test_metadata_written_again_is_byte_equal(run: Path, version: int):
    data = (folder_of(version, run) / "metadata.json").read_bytes()
    assert DeltaMetadata.from_json(data, file="f").to_json() == data


@every_version
def test_version_record_written_again_is_byte_equal(run: Path, version: int):
    data = (run / "versions" / f"{version:08d}.json").read_bytes()
    assert VersionRecord.from_json(data, file="f").to_json() == data


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_run_written_again_is_byte_equal(run: Path):
    data = (run / "run.json").read_bytes()
    assert RunInfo.from_json(data, file="f").to_json() == data


def test_checkpoint_written_again_is_byte_equal():
    tensors = [NamedBits(spec, base_state()[spec.name]) for spec in SPECS]
    data = b"".join(file_chunks(tensors, {"format": "pt"}))
    assert data == (GOLDEN / "base" / "model.safetensors").read_bytes()


def test_golden_files_cover_every_element_type():
    assert {spec.dtype for spec in SPECS} == set(ALL_CODES)


def compact_metadata(version: int) -> DeltaMetadata:
    folder = RunFolder(PosixStore(COMPACT))
    return folder.read_metadata(folder.read_version(version))


def compact_decoded(version: int) -> list[Change]:
    specs = {spec.name: spec for spec in COMPACT_SPECS}
    return decode(compact_metadata(version), folder_of(version, COMPACT), specs)


def same_state(one: State, other: State) -> bool:
    return {name: bits.tobytes() for name, bits in one.items()} == {n: bits.tobytes() for n, bits in other.items()}


@pytest.fixture(scope="module")
def compact_states() -> list[State]:
    """Return the state at every version, from the changes that went into the files and not from the files."""
    states = [base_state(COMPACT_SPECS)]
    for version in COMPACT_ENCODINGS:
        state = {name: bits.copy() for name, bits in states[-1].items()}
        for change, _ in compact_changes(version, states[-1]):
            patch = (
                change.resolve(state[change.spec.name][change.positions])
                if isinstance(change, TensorDifference)
                else change
            )
            state[patch.spec.name][patch.positions] = patch.values
        states.append(state)
    return states


def test_compact_run_is_read_whole():
    folder = RunFolder(PosixStore(COMPACT))
    assert folder.versions() == list(COMPACT_ENCODINGS)
    assert list(folder.read_run().specs().values()) == COMPACT_SPECS


@pytest.mark.parametrize("version", COMPACT_ENCODINGS)
def test_compact_version_has_exactly_its_changes(compact_states: list[State], version: int):
    expected = [change for change, _ in compact_changes(version, compact_states[version - 1])]
    assert_same_changes(compact_decoded(version), expected)


@pytest.mark.parametrize("version", COMPACT_ENCODINGS)
def test_compact_version_leads_to_exactly_its_values(compact_states: list[State], version: int):
    before, after = compact_states[version - 1], compact_states[version]
    state = {name: bits.copy() for name, bits in before.items()}
    for patch in resolve_all(compact_metadata(version), compact_decoded(version), before.__getitem__):
        state[patch.spec.name][patch.positions] = patch.values
    assert same_state(state, after)


@pytest.mark.parametrize("version", [0, *COMPACT_ENCODINGS])
def test_compact_version_has_exactly_its_state_digest(compact_states: list[State], version: int):
    state = compact_states[version]
    found = format_digest(state_digest((spec, state[spec.name]) for spec in COMPACT_SPECS))
    assert found == COMPACT_STATE_DIGESTS[version] == COMPACT_EXPECTED["state_digests"][version]
    if version:
        metadata = compact_metadata(version)
        assert (metadata.base_state_digest, metadata.state_digest) == (COMPACT_STATE_DIGESTS[version - 1], found)


def test_compact_run_materializes_to_its_newest_state(tmp_path: Path, compact_states: list[State]):
    tensors = [NamedBits(spec, compact_states[0][spec.name]) for spec in COMPACT_SPECS]
    (tmp_path / "model.safetensors").write_bytes(b"".join(file_chunks(tensors, {"format": "pt"})))
    newest = max(COMPACT_ENCODINGS)
    materialize(RunFolder(PosixStore(COMPACT)), Checkpoint(tmp_path), newest, tmp_path / "out")
    checkpoint = Checkpoint(tmp_path / "out")
    assert all(bits.tobytes() == compact_states[newest][spec.name].tobytes() for spec, bits in checkpoint.items())
    assert checkpoint.state_digest == COMPACT_STATE_DIGESTS[newest]


def arrays_of(path: Path) -> dict[str, tuple[TensorSpec, bytes]]:
    """Return the arrays of a payload file; compressed ones as what is in them, which no version of zstd changes."""
    mapped = MappedFile(path)
    return {key: (spec, _unpacked(key, mapped.bits(key).tobytes())) for key, spec in mapped.specs.items()}


def _unpacked(key: str, data: bytes) -> bytes:
    return zstandard.decompress(data) if data and key[-1].isdigit() else data


@pytest.mark.parametrize("version", COMPACT_ENCODINGS)
def test_compact_payload_written_again_is_the_same(tmp_path: Path, compact_states: list[State], version: int):
    files = compact_files(version, compact_changes(version, compact_states[version - 1]))
    assert [name for name, _ in files] == sorted(p.name for p in folder_of(version, COMPACT).glob("*.safetensors"))
    for name, blocks in files:
        data = b"".join(plan_file(name, blocks).chunks())
        golden = folder_of(version, COMPACT) / name
        if COMPACT_EXPECTED["zstd"] == list(zstandard.ZSTD_VERSION):
            assert data == golden.read_bytes()
        (tmp_path / name).write_bytes(data)
        found, expected = arrays_of(tmp_path / name), arrays_of(golden)
        assert {key: array for key, (_, array) in found.items()} == {key: array for key, (_, array) in expected.items()}
        assert {key: spec.dtype for key, (spec, _) in found.items()} == {
            k: spec.dtype for k, (spec, _) in expected.items()
        }
        assert MappedFile(tmp_path / name).metadata == MappedFile(golden).metadata


def test_compact_run_has_every_encoding_in_a_version_of_its_own():
    alone = {names[0] for names in COMPACT_ENCODINGS.values() if len(names) == 1}
    assert alone == set(ENCODINGS) == set(RunFolder(PosixStore(COMPACT)).read_run().encodings)


def test_compact_run_has_blocks_of_several_tensors_in_several_files():
    metadata = compact_metadata(9)
    assert metadata.format_version == 3
    assert len({entry.file for entry in metadata.tensors if entry.block is not None}) > 1


def merged() -> tuple[DeltaMetadata, list[Change]]:
    """Return what a stager made of versions 8 and 9."""
    metadata = read_folder_metadata(GOLDEN / "merged")
    assert isinstance(metadata, DeltaMetadata)
    return metadata, decode(metadata, GOLDEN / "merged", {spec.name: spec for spec in COMPACT_SPECS})


def test_merged_delta_has_exactly_its_changes(compact_states: list[State]):
    expected = [change for change, _ in merged_changes(compact_states[7], compact_states[9])]
    assert_same_changes(merged()[1], expected)
    assert {change.absolute is None for change in expected} == {True, False}


def test_merged_delta_leads_over_two_versions_without_the_digests_of_old_values(compact_states: list[State]):
    metadata, changes = merged()
    assert {entry.old_digest for entry in metadata.tensors} == {None}
    state = {name: bits.copy() for name, bits in compact_states[7].items()}
    for patch in resolve_all(metadata, changes, compact_states[7].__getitem__):
        state[patch.spec.name][patch.positions] = patch.values
    assert same_state(state, compact_states[9])
    assert metadata.state_digest == COMPACT_STATE_DIGESTS[9]


def test_merged_metadata_written_again_is_byte_equal():
    data = (GOLDEN / "merged" / "metadata.json").read_bytes()
    assert DeltaMetadata.from_json(data, file="f").to_json() == data


def test_merged_payload_written_again_is_byte_equal(compact_states: list[State]):
    [(name, blocks)] = compact_files(0, merged_changes(compact_states[7], compact_states[9]))
    assert b"".join(plan_file(name, blocks).chunks()) == (GOLDEN / "merged" / name).read_bytes()


def parts_states() -> list[State]:
    """Return the state at every version of `parts`, from the changes that went into the files."""
    states = [base_state(COMPACT_SPECS)]
    for version in PARTS_ENCODINGS:
        state = {name: bits.copy() for name, bits in states[-1].items()}
        for change, _, _ in parts_changes(version, states[-1]):
            bits = state[change.spec.name]
            is_difference = isinstance(change, TensorDifference)
            bits[change.positions] = change.values + (bits[change.positions] if is_difference else change.values * 0)
        states.append(state)
    return states


@pytest.mark.parametrize("version", PARTS_ENCODINGS)
def test_golden_parts_are_one_change_a_tensor(version: int):
    metadata = RunFolder(PosixStore(PARTS)).read_metadata(RunFolder(PosixStore(PARTS)).read_version(version))
    changes = decode(metadata, folder_of(version, PARTS), {spec.name: spec for spec in COMPACT_SPECS})
    assert len(metadata.tensors) > len(metadata.by_tensor) == len(changes)
    before, after = parts_states()[version - 1 : version + 1]
    state = {name: bits.copy() for name, bits in before.items()}
    for patch in resolve_all(metadata, changes, before.__getitem__):
        state[patch.spec.name][patch.positions] = patch.values
        assert np.all(np.diff(patch.positions) > 0)
    assert same_state(state, after)
    digest = format_digest(state_digest((spec, after[spec.name]) for spec in COMPACT_SPECS))
    assert digest == metadata.state_digest == PARTS_EXPECTED["state_digests"][version]


@pytest.mark.parametrize("version", PARTS_ENCODINGS)
def test_parts_payload_written_again_is_byte_equal(version: int):
    files = parts_files(parts_changes(version, parts_states()[version - 1]))
    written = {name: b"".join(plan_file(name, blocks).chunks()) for name, blocks in files}
    assert written == {path.name: path.read_bytes() for path in folder_of(version, PARTS).glob("*.safetensors")}


CONSTANTS = {
    "bf16": (
        TensorSpec("model.layers.0.weight", (2, 3), "BF16"),
        [0x3F80, 0xBF80, 0, 0x8000, 0x7FC1, 0xFF80],
        "f88eab85407a57b7",
    ),
    "f32": (TensorSpec("w", (2,), "F32"), [0x3F800000, 0xFFFFFFFF], "413a4b524b6e3a9f"),
    "u8": (TensorSpec("w", (1,), "U8"), [255], "f2d4201076d8742d"),
    "i64": (TensorSpec("step", (), "I64"), [2**63], "913515c5d9b70fc2"),
    "empty": (TensorSpec("void", (0, 4), "BF16"), [], "0000000000000000"),
    "é": (TensorSpec("é", (1,), "F16"), [1], "34f09dac417ea0a4"),
}


@pytest.mark.parametrize(("spec", "values", "expected"), CONSTANTS.values(), ids=CONSTANTS)
def test_tensor_digest_is_the_constant(spec: TensorSpec, values: list[int], expected: str):
    assert format_digest(tensor_digest(spec, np.array(values, dtype=spec.element.bits))) == expected


def test_tensor_key_is_the_constant():
    assert f"{tensor_key(TensorSpec('model.layers.0.weight', (2, 3), 'BF16')):016x}" == "8c6bff7ec96e4a4a"


def test_patch_digest_past_2_to_32_is_the_constant():
    spec = TensorSpec("far", (2**40,), "BF16")
    positions = np.array([0, 2**31, 2**32 + 1, 2**40 - 1], dtype=np.int64)
    assert format_digest(patch_digest(spec, positions, np.array([1, 2, 3, 4], np.uint16))) == "9e056749aa2be58f"
