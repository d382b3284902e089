"""DeepSpeed ZeRO-3: real processes train and publish. Skipped without DeepSpeed, as in `make test-fast`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.shard_zero3 import SIZE, STEPS
from tests.support.tensors import bits_of
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.runs.materialize import materialize
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store.posix import PosixStore

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed (requirements/adapters.txt)")
pytestmark = pytest.mark.slow  # processes of several ranks


def test_zero3_publishes_what_it_gathers(ram_path: Path):
    command = [sys.executable, "-m", "tests.support.shard_zero3", str(ram_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, text=True, check=True)
    ranks = json.loads(done.stdout.splitlines()[-1])
    base = Checkpoint(ram_path / "base")
    assert len(ranks) == SIZE
    assert sum(rank["elements"] for rank in ranks) == base.total_elements
    for rank in ranks:
        assert "the gathered copy of the parameter has other values than its partition" in rank["refused"]
        assert "norm.bias" in rank["refused"]
    for version in range(1, STEPS + 1):
        materialize(RunFolder(PosixStore(ram_path / "run")), base, version, ram_path / f"out-{version}")
        found = Checkpoint(ram_path / f"out-{version}")
        expected = load_file(ram_path / f"expected-{version}.safetensors")
        wrong = [name for name in expected if bits_of(expected[name]).tolist() != found.bits(name).tolist()]
        assert (set(found.specs), wrong) == (set(expected), [])
