"""Trainers that want the same version: ``python -m tests.support.racing_trainer URI BASE ROUNDS RACERS`` forks them.

Each round is a run of its own, URI/0 and so on: all open it at once, wait for the others, and publish version 1.
Prints, as JSON, for each round what became of each racer.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import sys
from typing import Any

from tests.support.runs import TinyTrainer
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.errors import DeltaSnapshotError
from vllm_delta_snapshot.store import s3


def race(uri: str, base: str, rounds: int, number: int, barrier: Any, out: Any) -> None:
    """Take part as racer `number`."""
    s3.make_client = functools.cache(s3.make_client)  # which takes longer to make than all else here
    for turn in range(rounds):
        trainer = TinyTrainer()
        publisher = DeltaPublisher(trainer, sync_dir=f"{uri}/{turn}", base=base, threads=1, asynchronous=False)
        trainer.step(number)
        barrier.wait(120)
        try:
            said = str(publisher.publish().version)
        except DeltaSnapshotError as error:
            said = type(error).__name__
        out.put((turn, number, said, publisher.state_digest))


def main(uri: str, base: str, rounds: int, racers: int) -> None:
    """Run the race."""
    context = multiprocessing.get_context("fork")
    barrier, out = context.Barrier(racers), context.Queue()
    started = [context.Process(target=race, args=(uri, base, rounds, n, barrier, out)) for n in range(racers)]
    for racer in started:
        racer.start()
    said = [out.get(timeout=300) for _ in range(rounds * racers)]
    for racer in started:
        racer.join(60)
    sys.stdout.write(json.dumps({"said": said, "exits": [racer.exitcode for racer in started]}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
