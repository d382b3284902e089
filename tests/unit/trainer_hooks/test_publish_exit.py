"""The interpreter ends while a publication is under way: it is waited for, or given up; never is half of it seen."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkpoints import tiny_tensors, write_checkpoint
from tests.support.exits import WAYS, hangs
from tests.support.runs import TinyTrainer, assert_same_state, replay
from trainer_hooks import DeltaPublisher

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_trainer_that_ends_with_a_publication_under_way_finishes_it_or_gives_it_up(ram_path: Path):
    base = write_checkpoint(ram_path / "base", tiny_tensors())
    command = [sys.executable, "-m", "tests.support.exits", str(base), str(ram_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found == {"ends": 0, "raises": 1 << 8, "raises_in_block": 1 << 8, "exits": 3 << 8, "hangs": 0, "forks": 0}
    assert "publication of version 1 was given up after 0.05 s, as the interpreter ends" in done.stderr
    trainer = TinyTrainer()
    trainer.step(1)
    trainer.step(2)
    published = trainer.state()
    for way in WAYS:
        sync_dir, scratch = ram_path / way.__name__, ram_path / f"scratch-{way.__name__}"
        states = replay(sync_dir, base, scratch)
        assert len(states) == (1 if way is hangs else 2), way
        if way is not hangs:
            assert_same_state(states[-1], published)
        trainer.step(3)
        with DeltaPublisher(trainer, sync_dir=str(sync_dir), base=base) as publisher:
            assert publisher.publish().version == len(states)
        assert_same_state(replay(sync_dir, base, scratch / "again")[-1], trainer.state())
