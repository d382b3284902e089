"""Trainers that end with a publication under way: ``python -m tests.support.exits BASE WORK``.

Imports torch once, then forks one trainer for every way to end; the child leaves by the interpreter's own exit. Prints
the exit statuses as JSON. Uploads wait at a gate that is opened when the interpreter begins to end, and not before.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.support.gates import PATIENCE_S, GatedStore
from tests.support.runs import TinyTrainer
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.store.posix import PosixStore

LIMIT_S = 150
"""A child that does not end by itself is ended by a signal, which the parent sees."""


def under_way(base: Path, sync_dir: Path, **options: Any) -> DeltaPublisher:
    """Publish two steps; return while the upload is held, and not all of it encoded. The weights move on."""
    trainer, store = TinyTrainer(), GatedStore(PosixStore(sync_dir))
    with mock.patch("trainer_hooks.publisher.open_store", return_value=store):
        options = {"encoding": "raw", "max_file_bytes": 1, "threads": 2} | options
        publisher = DeltaPublisher(trainer, sync_dir=str(sync_dir), base=base, **options)
    store.shut()
    trainer.step(1)
    trainer.step(2)
    publisher.publish()
    trainer.step(3)
    assert store.is_reached.wait(PATIENCE_S)
    publisher.gate = store  # type: ignore[attr-defined]
    return publisher


def open_at_exit(publisher: Any) -> None:
    """Let the upload go on once the interpreter has begun to end."""
    threading._register_atexit(publisher.gate.open)  # type: ignore[attr-defined]


def ends(base: Path, sync_dir: Path) -> None:
    """End without another word."""
    open_at_exit(under_way(base, sync_dir))


def raises(base: Path, sync_dir: Path) -> None:
    """Fail in the training step."""
    open_at_exit(under_way(base, sync_dir))
    raise FloatingPointError("the loss is not finite")


def raises_in_block(base: Path, sync_dir: Path) -> None:
    """The same within a block, which waits by itself."""
    with under_way(base, sync_dir) as publisher:
        publisher.gate.open()  # type: ignore[attr-defined]
        raise FloatingPointError("the loss is not finite")


def exits(base: Path, sync_dir: Path) -> None:
    """Leave by `sys.exit`."""
    open_at_exit(under_way(base, sync_dir))
    sys.exit(3)


def hangs(base: Path, sync_dir: Path) -> None:
    """End while the store hangs for longer than the publisher waits."""
    under_way(base, sync_dir, drain_timeout_s=0.05)


def forks(base: Path, sync_dir: Path) -> None:
    """Have a child of one's own that ends first, and waits for nobody."""
    publisher = under_way(base, sync_dir)
    if os.fork() == 0:
        signal.alarm(LIMIT_S)
        return
    _, status = os.wait()
    assert status == 0
    open_at_exit(publisher)


WAYS: tuple[Callable[[Path, Path], None], ...] = (ends, raises, raises_in_block, exits, hangs, forks)


def main(base: Path, work: Path) -> None:
    """Fork a child for every way, all at once; they return from here by themselves, the parent when all have."""
    gc.freeze()  # or every child, as it ends, goes through what it shares with the others, and copies it
    children = {}
    for way in WAYS:
        child = os.fork()
        if child == 0:
            signal.alarm(LIMIT_S)
            way(base, work / way.__name__)
            return
        children[way.__name__] = child
    sys.stdout.write(json.dumps({name: os.waitpid(child, 0)[1] for name, child in children.items()}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
