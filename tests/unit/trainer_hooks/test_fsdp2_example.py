"""The example of FSDP2, as torchrun starts it, in two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.support.tiny_models import make_model
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.runs.materialize import materialize
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import open_store

_ROOT = Path(__file__).parents[3]


def test_both_ranks_publish_what_they_hold_together(tmp_path: Path) -> None:
    base, run, expected = tmp_path / "base", tmp_path / "run", tmp_path / "expected.safetensors"
    make_model("qwen3", base)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
    options = ["--model", str(base), "--sync-dir", str(run), "--steps", "2", "--lr", "1e-3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DELTA_SNAPSHOT_KERNEL": "0"}
    done = subprocess.run(
        [*torchrun, "tests.support.fsdp2_example", str(expected), *options],
        cwd=_ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "version 2" in done.stdout
    materialize(RunFolder(open_store(str(run))), Checkpoint(base), 2, tmp_path / "published")
    published, first = (load_file(folder / "model.safetensors") for folder in (tmp_path / "published", base))
    full = load_file(expected)
    assert published.keys() == full.keys()
    for name, tensor in published.items():
        assert torch.equal(tensor.view(torch.int16), full[name].view(torch.int16)), name
    assert any(not torch.equal(tensor, first[name]) for name, tensor in published.items())
