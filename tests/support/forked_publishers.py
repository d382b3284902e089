"""Children that were forked off a trainer in the middle of a publication: ``python -m tests.support.forked_publishers
BASE WORK``.

Each makes one use of the publisher that it inherited, says what it was told, and ends by the interpreter's own exit.
The parent then finishes what was under way, and publishes once more. Prints what all said.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.support.gates import PATIENCE_S, GatedStore
from tests.support.runs import TinyTrainer
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.errors import DeltaSnapshotError
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store.posix import PosixStore
from vllm_delta_snapshot.util.scratch import scratch_folder


def _leave(publisher: DeltaPublisher, *error: Any) -> None:
    publisher.__exit__(*(error or (None, None, None)))


USES: dict[str, Callable[[DeltaPublisher, Any], object]] = {
    "publish": lambda publisher, publication: publisher.publish(),
    "sync": lambda publisher, publication: publisher.sync(mock.Mock()),
    "audit": lambda publisher, publication: publisher.audit(),
    "drain": lambda publisher, publication: publisher.drain(),
    "hook": lambda publisher, publication: publisher.hook(torch.optim.SGD([torch.ones(1, requires_grad=True)])),
    "wait_applied": lambda publisher, publication: publisher.wait_applied(["a"], version=0),
    "load_state_dict": lambda publisher, publication: publisher.load_state_dict(publisher.state_dict()),
    "wait": lambda publisher, publication: publication.wait(),
    "done": lambda publisher, publication: publication.done(),
    "close": lambda publisher, publication: publisher.close(),
    "leaves the block": lambda publisher, publication: _leave(publisher),
    "fails in the block": lambda publisher, publication: _leave(publisher, ValueError, ValueError("no"), None),
}


def main(base: Path, work: Path) -> None:
    """See the module."""
    trainer, store = TinyTrainer(), GatedStore(PosixStore(work / "run"))
    with mock.patch("trainer_hooks.publisher.open_store", return_value=store):
        publisher = DeltaPublisher(trainer, sync_dir=store.uri, base=base, max_file_bytes=40)
    store.shut()
    trainer.step(1)
    publication = publisher.publish()
    assert store.is_reached.wait(PATIENCE_S)
    with scratch_folder(parent=work) as scratch:
        gc.freeze()  # or every child, as it ends, goes through what it shares with the others, and copies it
        reader, writer = os.pipe()
        children = {}
        for name, use in USES.items():
            child = os.fork()
            if child == 0:
                signal.alarm(int(PATIENCE_S))
                try:
                    use(publisher, publication)
                    said = "nothing"
                except DeltaSnapshotError as error:
                    said = type(error).__name__
                os.write(writer, f"{name}|{said}\n".encode())
                sys.exit(0)  # through the block above, and all that runs when an interpreter ends
            children[name] = child
        os.close(writer)
        with os.fdopen(reader) as lines:
            said = dict(line.rstrip("\n").split("|") for line in lines)
        ends = {name: os.waitpid(child, 0)[1] for name, child in children.items()}
        is_there = scratch.is_dir()
    store.open()
    publication.wait()
    trainer.step(2)
    publisher.publish()
    publisher.close()
    versions = RunFolder(PosixStore(work / "run")).versions()
    sys.stdout.write(json.dumps({"children": ends, "said": said, "versions": versions, "scratch stays": is_there}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
