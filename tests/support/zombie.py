"""A trainer that is stopped right before its commit: ``python -m tests.support.zombie URI BASE``.

Says "stopping" and stops itself (SIGSTOP). When it is woken up it commits, and says how that ended; then it publishes
once more, as a trainer would that noticed nothing.
"""

from __future__ import annotations

import os
import signal
import sys

from tests.support.runs import TinyTrainer
from trainer_hooks import DeltaPublisher
from trainer_hooks.publication import published
from vllm_delta_snapshot.errors import DeltaSnapshotError


def main(uri: str, base: str) -> None:
    """Publish version 1, fall asleep before the commit of version 2, and go on when woken up."""
    trainer = TinyTrainer()
    zombie = DeltaPublisher(trainer, sync_dir=uri, base=base, asynchronous=False)
    trainer.step(1)
    zombie.publish()
    real = published.commit

    def asleep(*args: object) -> None:
        published.commit = real
        sys.stdout.write("stopping\n")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGSTOP)
        real(*args)

    published.commit = asleep
    for step in (2, 3):
        trainer.step(step)
        try:
            sys.stdout.write(f"version {zombie.publish().version}\n")
        except DeltaSnapshotError as error:
            sys.stdout.write(f"{type(error).__name__}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
