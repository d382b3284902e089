"""A trainer that is interrupted again and again: ``python -m tests.support.interrupts BASE SYNC_DIR SCRATCH``.

Another thread sends SIGINT at random moments while the trainer publishes, waits, drains and audits, and calls again
after each. Ends with a `with` block that nobody interrupts, and checks all that it published. Prints what happened.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import torch

from tests.support.runs import TinyTrainer, assert_same_state, replay
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.errors import NotPublished

STEPS = 40


class Interrupter:
    """Sends SIGINT to this process at random moments, between `begin` and `end`; each is seen before the next comes."""

    def __init__(self) -> None:
        self._moments = random.Random(0)
        self._is_on = threading.Event()
        self._may = threading.Lock()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._is_on.wait()
            time.sleep(self._moments.choice((0.0002, 0.001, 0.004, 0.012)) * self._moments.random())
            with self._may:
                if self._is_on.is_set():
                    self._is_on.clear()
                    os.kill(os.getpid(), signal.SIGINT)

    def begin(self) -> None:
        """Have one come."""
        self._is_on.set()

    def end(self) -> None:
        """Have none come any more; one that was sent comes out here at the latest."""
        while True:
            try:
                with self._may:
                    self._is_on.clear()
                break
            except KeyboardInterrupt:
                continue


def main(base: Path, sync_dir: Path, scratch: Path) -> dict[str, int]:
    """See the module."""
    trainer, seen, interrupter = TinyTrainer(), Counter[str](), Interrupter()
    history = [trainer.state()]
    with DeltaPublisher(trainer, sync_dir=str(sync_dir), base=base, buffer_bytes=64, threads=2) as publisher:
        calls = (
            lambda: publisher.publish(),
            lambda: publisher.publish().wait(),
            lambda: (publisher.publish(), publisher.drain()),
            lambda: (publisher.publish().wait(), publisher.audit()),
        )
        for step in range(1, STEPS + 1):
            trainer.step(step)
            history.append(trainer.state())
            try:
                interrupter.begin()
                calls[step % len(calls)]()
                seen["ended"] += 1
            except KeyboardInterrupt:
                seen["interrupted"] += 1
            finally:
                interrupter.end()
        trainer.step(STEPS + 1)
        history.append(trainer.state())
        try:
            publisher.publish().wait()
        except NotPublished as error:  # only where the guard itself was hit
            seen[str(error)] += 1
    place = 0
    states = replay(sync_dir, base, scratch)
    for state in states:
        while any(state[name].tolist() != history[place][name].tolist() for name in state):
            place += 1
    assert_same_state(states[-1], history[-1])
    return {**seen, "versions": len(states) - 1}


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(main(*map(Path, sys.argv[1:]))))
