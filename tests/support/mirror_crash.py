"""Stagers that are killed at their mirror: ``python -m tests.support.mirror_crash BASE LARGE STEPS WORK``.

Forks one process for every moment of death: before each line that the modules of the mirror run, and at random moments.
STEPS holds the pickled steps of the two checkpoints. Prints the folders that the dead left as JSON.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from tests.support.forks import all_forked, forked
from tests.support.mirrors import Step, mirror_of, reopened
from vllm_delta_snapshot.checkpoint import patch_files
from vllm_delta_snapshot.host import mirror, mirror_marker

TRACED = {mirror.__file__, mirror_marker.__file__, patch_files.__file__}


def run_lines(action: Callable[[], object], last: int | None) -> int:
    """Run `action`, and die by SIGKILL before line number `last`; return how many lines it ran.

    A line counts the first two times: what a loop does once more is nothing new.
    """
    seen = 0
    visits: Counter[tuple[str, int]] = Counter()

    def local(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal seen
        line = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and visits[line] < 2:
            visits[line] += 1
            if seen == last:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1
        return local

    sys.settrace(lambda frame, event, arg: local if frame.f_code.co_filename in TRACED else None)
    try:
        action()
    finally:
        sys.settrace(None)
    return seen


def killed_at_lines(
    action: Callable[[Path], object], prepare: Callable[[Path], object], work: Path, *, every: int = 1
) -> list[str]:
    """Kill `action` once before each line, or every so many, each time on a folder that `prepare` made."""
    reader, writer = os.pipe()
    prepare(work / "whole")
    assert forked(lambda: os.write(writer, b"%d" % run_lines(lambda: action(work / "whole"), None))) == 0
    moments = range(0, int(os.read(reader, 100)), every)
    dead = [work / f"line-{last}" for last in moments]

    def deaths() -> Iterator[Callable[[], object]]:
        for last, folder in zip(moments, dead, strict=True):
            prepare(folder)
            yield partial(run_lines, partial(action, folder), last)

    assert [os.WTERMSIG(death) for death in all_forked(deaths())] == [signal.SIGKILL] * len(dead)
    return list(map(str, dead))


def killed_at_times(action: Callable[[Path], object], prepare: Callable[[Path], object], work: Path) -> list[str]:
    """Kill `action` at random moments; it may live to its end."""
    prepare(work / "whole")
    started = time.monotonic()
    assert forked(lambda: action(work / "whole")) == 0
    length = time.monotonic() - started
    moments = random.Random(0)
    dead = []
    for number in range(8):
        folder = work / f"time-{number}"
        prepare(folder)
        seconds = moments.uniform(0.0, 1.0) * length + 1e-4

        def short(seconds: float = seconds, folder: Path = folder) -> None:
            signal.setitimer(signal.ITIMER_REAL, seconds)  # nobody handles SIGALRM: it ends the process on the spot
            action(folder)

        assert os.WTERMSIG(forked(short)) in (signal.SIGALRM, 0)
        dead.append(str(folder))
    return dead


def copier(source: Path) -> Callable[[Path], object]:
    """Return what makes a copy of a folder."""
    return lambda folder: shutil.copytree(source, folder)


def tear(folder: Path, step: Step) -> None:
    """Leave a mirror as a death amid a step does: the journal written, and one of the patches."""
    torn = reopened(folder)
    marker = mirror_marker.read_marker(folder)
    target = mirror_marker.Target(version=step.version, state_digest=step.state_digest)
    mirror_marker.write_marker(folder, marker.model_copy(update={"advancing_to": target}))
    patch_files.write_patches(torn.checkpoint, folder, step.patches[:1])


def main(base: Path, large: Path, steps: Path, work: Path) -> dict[str, list[str]]:
    """Kill what makes a mirror, and what advances copies of one that is clean, torn, or large."""
    mirror_of(base, work / "clean")
    mirror_of(large, work / "large")
    small, big = pickle.loads(steps.read_bytes())
    shutil.copytree(work / "clean", work / "torn")
    tear(work / "torn", small)

    def advance(folder: Path) -> None:
        small.take(reopened(folder))

    return {
        "create": killed_at_lines(
            lambda f: mirror_of(base, f / "mirror"), lambda f: f.mkdir(parents=True), work / "c", every=3
        ),
        "advance": killed_at_lines(advance, copier(work / "clean"), work / "a", every=2),
        "finish": killed_at_lines(advance, copier(work / "torn"), work / "f", every=2),
        "large": killed_at_times(lambda f: big.take(reopened(f)), copier(work / "large"), work / "t"),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*map(Path, sys.argv[1:]))))
