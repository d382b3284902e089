"""Golden files: bytes that were written once must be read, and written again, the same for ever.

If one of these fails, the format changed: restore it, or make a new format version (tests/golden/make.py).
"""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.golden.make import MAX_FILE_BYTES, SPECS, base_state, patches_of
from tests.support.tensors import assert_same_patches
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.dtypes import ALL_CODES
from vllm_delta_snapshot.format.container import encode_delta
from vllm_delta_snapshot.format.digest import format_digest, patch_digest, tensor_digest, tensor_key
from vllm_delta_snapshot.format.encodings import encoding_of
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.format.run import RunInfo
from vllm_delta_snapshot.format.safetensors_io import NamedBits, file_chunks
from vllm_delta_snapshot.format.version import VersionRecord
from vllm_delta_snapshot.materialize import materialize
from vllm_delta_snapshot.run_folder import RunFolder
from vllm_delta_snapshot.stage.decode import decode
from vllm_delta_snapshot.store.posix import PosixStore
from vllm_delta_snapshot.types import TensorSpec

GOLDEN = Path(__file__).parents[1] / "golden"
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


def folder_of(version: int) -> Path:
    return RUN / "deltas" / f"{version:08d}-{version:08x}"


def test_golden_run_is_read_whole():
    folder = RunFolder(PosixStore(RUN))
    assert folder.versions() == VERSIONS
    assert list(folder.read_run().specs().values()) == SPECS


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_version_has_exactly_its_patches(version: int):
    folder = RunFolder(PosixStore(RUN))
    metadata = folder.read_metadata(folder.read_version(version))
    found = decode(metadata, folder_of(version), folder.read_run().specs())
    assert_same_patches(found, patches_of(version))


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
    limit = MAX_FILE_BYTES.get(version, 10**9)
    planned = encode_delta(patches_of(version), encoding_of("raw"), max_file_bytes=limit)
    assert len(planned) > 1 or version != 4
    written = {file.name: b"".join(file.chunks()) for file in planned}
    assert written == {path.name: path.read_bytes() for path in folder_of(version).glob("*.safetensors")}


@pytest.mark.parametrize("version", VERSIONS)
def test_metadata_written_again_is_byte_equal(version: int):
    data = (folder_of(version) / "metadata.json").read_bytes()
    assert DeltaMetadata.from_json(data, file="f").to_json() == data


@pytest.mark.parametrize("version", VERSIONS)
def test_version_record_written_again_is_byte_equal(version: int):
    data = (RUN / "versions" / f"{version:08d}.json").read_bytes()
    assert VersionRecord.from_json(data, file="f").to_json() == data


def test_run_written_again_is_byte_equal():
    data = (RUN / "run.json").read_bytes()
    assert RunInfo.from_json(data, file="f").to_json() == data


def test_checkpoint_written_again_is_byte_equal():
    tensors = [NamedBits(spec, base_state()[spec.name]) for spec in SPECS]
    data = b"".join(file_chunks(tensors, {"format": "pt"}))
    assert data == (GOLDEN / "base" / "model.safetensors").read_bytes()


def test_golden_files_cover_every_element_type():
    assert {spec.dtype for spec in SPECS} == set(ALL_CODES)


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
