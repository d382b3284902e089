"""kill -9 at any point: what is visible is whole, and the next trainer carries on from it exactly."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkpoints import tiny_tensors, write_checkpoint
from tests.support.runs import TinyTrainer, assert_same_state, replay
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store.posix import PosixStore

ROOT = Path(__file__).parents[3]


def check_restart(base: Path, sync_dir: Path, scratch: Path, steps: int) -> int:
    """Check what the dead trainer left, restart it, check again; return the versions that were visible."""
    trainer = TinyTrainer()
    history = [trainer.state()]
    for step in range(1, steps + 1):
        trainer.step(step)
        history.append(trainer.state())
    visible = RunFolder(PosixStore(sync_dir)).versions()
    assert visible == list(range(1, len(visible) + 1))
    if visible:
        for found, expected in zip(replay(sync_dir, base, scratch / "before"), history, strict=False):
            assert_same_state(found, expected)
    trainer.step(steps + 1)
    publisher = DeltaPublisher(trainer, sync_dir=str(sync_dir), base=base, asynchronous=False)
    assert publisher.publish().version == len(visible) + 1
    assert_same_state(replay(sync_dir, base, scratch / "after")[-1], trainer.state())
    return len(visible)


@pytest.mark.slow
def test_trainer_killed_at_any_moment_is_carried_on_exactly(ram_path: Path):
    base = write_checkpoint(ram_path / "base", tiny_tensors())
    command = [sys.executable, "-m", "tests.support.crash", str(base), str(ram_path)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    dead = json.loads(done.stdout)
    assert len(dead["calls"]) > 20
    left = {check_restart(base, Path(line), ram_path / f"scratch{i}", 1) for i, line in enumerate(dead["calls"])}
    assert left == {0, 1}
    for i, line in enumerate(dead["times"]):
        check_restart(base, Path(line), ram_path / f"scratch-time{i}", 3)
