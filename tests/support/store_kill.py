"""Processes killed between any two requests to a store: ``python -m tests.support.store_kill ROLE URI BASE WORK``.

ROLE ``trainer`` starts a run and publishes one version, once for every moment of death, each in a run of its own under
URI. ROLE ``stager`` follows the run at URI, each in a stage area of its own under WORK. Imports are paid once: every
life is a fork. Prints what the dead left, as JSON: sync_dirs, or folders of stage areas.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import boto3  # noqa: F401 - imported before the forks
import google.cloud.storage  # noqa: F401
import torch

import trainer_hooks.publisher as publisher_module
import vllm_delta_snapshot.host.stager as stager_module
from tests.support.forks import all_forked, forked
from tests.support.runs import TinyTrainer
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.host.area import StageArea, StagerConfig
from vllm_delta_snapshot.host.attachment import Attachment
from vllm_delta_snapshot.host.stager import Stager
from vllm_delta_snapshot.store import open_store

VERBS = ("create", "put", "read", "size", "read_range", "list", "delete")


def mortal(last: int | None, report: int) -> Callable[..., Any]:
    """Return an `open_store` whose store counts requests; it dies instead of making number `last`, or tells each."""
    made = 0

    def opened(*args: Any, **options: Any) -> Any:
        store = open_store(*args, **options)
        for name in VERBS:
            setattr(store, name, counting(getattr(store, name)))
        return store

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal made
            if made == last:
                os.kill(os.getpid(), signal.SIGKILL)
            made += 1
            if last is None:
                os.write(report, b".")
            return real(*args, **options)

        return call

    return opened


def train(uri: str, base: Path, last: int | None, report: int) -> None:
    """Live a trainer's life: start a run, step, publish."""
    publisher_module.open_store = mortal(last, report)
    trainer = TinyTrainer()
    publisher = DeltaPublisher(trainer, sync_dir=uri, base=base, threads=1, asynchronous=False)
    trainer.step(1)
    publisher.publish()


def follow(uri: str, base: Path, work: Path, last: int | None, report: int) -> None:
    """Live a stager's life, up to a staged update."""
    stager_module.open_store = mortal(last, report)
    config = StagerConfig(sync_dir=uri, checkpoint=str(base), retry_interval_s=1e-9)
    area = StageArea.of(work, config)
    Attachment(area)
    stager = Stager(area)
    stager.start()
    stager.step()


def lives(live: Callable[[str, int | None, int], None], name_of: Callable[[object], str]) -> list[str]:
    """Live once to the end, counting, and then to every moment of death; return the names of the dead."""
    reader, writer = os.pipe()
    assert forked(partial(live, name_of("whole"), None, writer)) == 0
    os.close(writer)
    total = len(os.read(reader, 1 << 16))
    dead = [name_of(last) for last in range(total)]
    deaths = list(all_forked(partial(live, name, last, -1) for last, name in enumerate(dead)))
    assert [os.WTERMSIG(death) for death in deaths] == [signal.SIGKILL] * total, deaths
    return dead


def main(role: str, uri: str, base: Path, work: Path) -> list[str]:
    """See the module."""
    torch.set_num_threads(1)
    if role == "trainer":
        return lives(lambda name, last, report: train(name, base, last, report), lambda last: f"{uri}/{last}")
    return lives(
        lambda name, last, report: follow(uri, base, Path(name), last, report), lambda last: str(work / f"stage-{last}")
    )


if __name__ == "__main__":
    role, uri, base, work = sys.argv[1:]
    sys.stdout.write(json.dumps(main(role, uri, Path(base), Path(work))))
