"""kill -9 at any point: what is visible is whole, and the next trainer carries on from it exactly."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkpoints import tiny_tensors, write_checkpoint
from tests.support.runs import TinyTrainer, assert_same_state, replay
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.run_folder import RunFolder
from vllm_delta_snapshot.store.posix import PosixStore

ROOT = Path(__file__).parents[2]


def killed(kind: str, folder: Path) -> tuple[Path, list[Path]]:
    base = write_checkpoint(folder / "base", tiny_tensors())
    command = [sys.executable, "-m", "tests.support.crash", kind, str(base), str(folder)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return base, [Path(line) for line in json.loads(done.stdout)]


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
    publisher = DeltaPublisher(trainer, sync_dir=str(sync_dir), base=base)
    assert publisher.publish().version == len(visible) + 1
    assert_same_state(replay(sync_dir, base, scratch / "after")[-1], trainer.state())
    return len(visible)


@pytest.mark.parametrize(("kind", "steps"), [("calls", 1), ("times", 5)])
def test_trainer_killed_at_any_moment_is_carried_on_exactly(ram_path: Path, kind: str, steps: int):
    base, dead = killed(kind, ram_path)
    left = {check_restart(base, sync_dir, ram_path / f"scratch-{sync_dir.name}", steps) for sync_dir in dead}
    if kind == "calls":
        assert left == {0, 1}
