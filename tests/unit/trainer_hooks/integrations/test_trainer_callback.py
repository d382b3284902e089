"""The `Trainer` callback without a server, on two ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from tests.support.tiny_models import make_model, train_step
from tests.support.tiny_tokenizer import save_tokenizer
from trainer_hooks.integrations.transformers import DeltaSnapshotCallback
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import open_store

ROOT = Path(__file__).parents[4]


def steps_of(sync_dir: Path) -> list[int | None]:
    """Return the optimizer step of each version."""
    folder = RunFolder(open_store(str(sync_dir)))
    return [folder.read_metadata(folder.read_version(version)).step for version in folder.versions()]


@pytest.mark.slow
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


def test_resumed_trainer_publishes_what_it_loaded_and_the_best_model_at_the_end(tmp_path: Path) -> None:
    base, sync_dir = tmp_path / "base", tmp_path / "run"
    model = make_model("qwen3", base)
    callback = DeltaSnapshotCallback(sync_dir=str(sync_dir), base=base, every=3)
    args = TrainingArguments(str(tmp_path / "out"), use_cpu=True, report_to="none")
    state, control = TrainerState(global_step=4), TrainerControl()
    callback.on_train_begin(args, state, control, model=model)
    for state.global_step in (5, 6):
        train_step(model, state.global_step)
        callback.on_step_end(args, state, control, model=model)
    train_step(model, 7)
    args.load_best_model_at_end = True  # which was put into the model after the last step was published
    callback.on_train_end(args, state, control, model=model)
    assert steps_of(sync_dir) == [4, 6, 6]
    assert callback.publication is not None
    assert callback.publication.wait().changed_elements > 0


@pytest.mark.parametrize("every", [0, -1])
def test_interval_that_is_none_is_refused(every: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        DeltaSnapshotCallback(sync_dir="/nowhere", base="/nowhere", every=every)
