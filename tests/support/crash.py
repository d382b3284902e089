"""Trainers that are killed: ``python -m tests.support.crash BASE WORK``.

Imports torch once, then forks one trainer for every moment of death: before every single call that changes the file
system, and at random moments. Prints the sync_dirs of the dead as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.support.forks import all_forked, forked
from tests.support.runs import TinyTrainer
from trainer_hooks import DeltaPublisher

CALLS = ("open", "write", "fsync", "link", "unlink", "mkdir", "rename", "replace")


def train(base: Path, sync_dir: Path, steps: int) -> None:
    """Publish `steps` versions, each behind the next step: it is that thread which makes most calls."""
    trainer = TinyTrainer()
    with DeltaPublisher(trainer, sync_dir=str(sync_dir), base=base) as publisher:
        for step in range(1, steps + 1):
            trainer.step(step)
            publisher.publish()
        trainer.step(steps + 1)  # while the last one is under way


def count_calls(last: int | None, report: int) -> None:
    """Count calls that change files; die by SIGKILL instead of making number `last`, or write each to `report`."""
    made = 0

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal made
            if made == last:
                os.kill(os.getpid(), signal.SIGKILL)
            made += 1
            if last is None:
                real_write(report, b".")
            return real(*args, **options)

        return call

    real_write = os.write
    for name in CALLS:
        setattr(os, name, counting(getattr(os, name)))


def killed_at_calls(base: Path, work: Path) -> list[str]:
    """Kill one trainer before each call from the start of a run to its first version."""
    reader, writer = os.pipe()

    def whole() -> None:
        count_calls(None, writer)
        train(base, work / "whole", 1)

    assert forked(whole) == 0
    os.close(writer)
    total = len(os.read(reader, 1 << 16))
    dead = [work / f"call-{last}" for last in range(total)]

    def short(last: int, sync_dir: Path) -> None:
        count_calls(last, -1)
        train(base, sync_dir, 1)

    deaths = all_forked(partial(short, last, sync_dir) for last, sync_dir in enumerate(dead))
    assert [os.WTERMSIG(death) for death in deaths] == [signal.SIGKILL] * total
    return list(map(str, dead))


def killed_at_times(base: Path, work: Path) -> list[str]:
    """Kill trainers at random moments of a run of three versions; some may live to its end."""
    started = time.monotonic()
    assert forked(lambda: train(base, work / "long", 3)) == 0
    length = time.monotonic() - started
    moments = random.Random(0)
    dead = []
    for number in range(6):
        sync_dir = work / f"time-{number}"
        seconds = moments.uniform(0.05, 1.0) * length

        def short(seconds: float = seconds, sync_dir: Path = sync_dir) -> None:
            signal.setitimer(signal.ITIMER_REAL, seconds)  # nobody handles SIGALRM: it ends the process on the spot
            train(base, sync_dir, 3)

        assert os.WTERMSIG(forked(short)) in (signal.SIGALRM, 0)
        dead.append(str(sync_dir))
    return dead


if __name__ == "__main__":
    torch.set_num_threads(1)
    base, work = Path(sys.argv[1]), Path(sys.argv[2])
    train(base, work / "warm", 3)  # what is loaded and compiled at the first use is so once, and not in every child
    sys.stdout.write(json.dumps({"calls": killed_at_calls(base, work), "times": killed_at_times(base, work)}))
