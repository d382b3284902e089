"""The `Trainer` callback without a server, on two ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_models import make_model
from tests.support.tiny_tokenizer import save_tokenizer
from trainer_hooks.integrations.transformers import DeltaSnapshotCallback
from vllm_delta_snapshot.run_folder import RunFolder
from vllm_delta_snapshot.store import open_store

ROOT = Path(__file__).parents[2]


def steps_of(sync_dir: Path) -> list[int | None]:
    """Return the optimizer step of each version."""
    folder = RunFolder(open_store(str(sync_dir)))
    return [folder.read_metadata(folder.read_version(version)).step for version in folder.versions()]


def test_two_ranks_of_ddp_publish_once(tmp_path: Path) -> None:
    base, sync_dir = tmp_path / "base", tmp_path / "run"
    make_model("qwen3", base)
    save_tokenizer(base)
    example = ["-m", "examples.transformers_trainer", "--model", str(base), "--sync-dir", str(sync_dir)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, *example, "--steps", "3", "--every", "2", "--lr", "1e-3"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert steps_of(sync_dir) == [2, 3]
    assert sorted(line for line in done.stdout.splitlines() if "version" in line) == [
        "step 3, version 2",
        "step 3, version None",
    ]


@pytest.mark.parametrize("every", [0, -1])
def test_interval_that_is_none_is_refused(every: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        DeltaSnapshotCallback(sync_dir="/nowhere", base="/nowhere", every=every)
