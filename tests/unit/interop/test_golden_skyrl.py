"""SkyRL deltas that were written once must lead to the same weights for ever (tests/golden/make_skyrl.py)."""

import json
from pathlib import Path

import pytest

from tests.golden.make import CODES, SPECS
from tests.golden.make_skyrl import VERSIONS, states
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.interop.chain import find_chain
from vllm_delta_snapshot.interop.materialize import materialize_chain
from vllm_delta_snapshot.interop.skyrl import open_skyrl_delta
from vllm_delta_snapshot.interop.skyrl_manifest import delta_name
from vllm_delta_snapshot.interop.verify import verify_chain

GOLDEN = Path(__file__).parents[2] / "golden"
SYNC_DIR = GOLDEN / "skyrl"
EXPECTED = json.loads((GOLDEN / "expected_skyrl.json").read_text())["states"]
STATE_DIGESTS = ["3dbcf85ac0e60aee", "99827504c25de275", "b4bcbc40727307d8", "b4bcbc40727307d8"]


@pytest.fixture(scope="module")
def base() -> Checkpoint:
    return Checkpoint(GOLDEN / "base")


@pytest.mark.parametrize("version", [0, *VERSIONS])
def test_golden_chain_materializes_to_exactly_its_bytes(base: Checkpoint, tmp_path: Path, version: int):
    report = materialize_chain(find_chain([SYNC_DIR], version=version), base, tmp_path / "out")
    found = {spec.name: bits.tobytes().hex() for spec, bits in Checkpoint(tmp_path / "out").items()}
    assert found == EXPECTED[version]
    assert report.state_digest == STATE_DIGESTS[version]


def test_golden_chain_verifies(base: Checkpoint):
    found = verify_chain(find_chain([SYNC_DIR]), base)
    assert (found.is_ok, found.not_checked) == (True, [])


def test_expected_states_are_those_that_were_written():
    assert [{name: bits.tobytes().hex() for name, bits in state.items()} for state in states()] == EXPECTED


def test_golden_deltas_cover_every_element_type_and_both_forms_of_checksum():
    delta = open_skyrl_delta(SYNC_DIR / delta_name(1))
    assert {spec.dtype for spec in delta.specs.values()} == set(CODES)
    assert list(delta.specs.values()) == [spec for spec in SPECS if spec.numel]
    algorithms = [{t.algorithm for t in open_skyrl_delta(SYNC_DIR / delta_name(v)).manifest.tensors} for v in VERSIONS]
    assert algorithms == [{"xxh3-128"}, {"sha256"}, set()]
    files = [len(open_skyrl_delta(SYNC_DIR / delta_name(v)).manifest.payload_files) for v in VERSIONS]
    assert files == [1, 2, 0]
