"""What ranks see when they publish behind the step: back-pressure, skipped calls, errors that come later, and ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.shard_faults import Arm, attempt, begun, faulty, once
from trainer_hooks import PublishReport

Scene = Callable[[Path], dict[str, Any]]


class Told:
    """An observer that writes down what it is told."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.failures: list[str] = []

    def published(self, report: PublishReport, step: int | None, metrics: Any) -> None:
        """Note a version."""
        self.versions.append(report.version)

    def failed(self, error: Exception) -> None:
        """Note a failure."""
        self.failures.append(type(error).__name__)


def fault_behind(folder: Path, rank: int | None, arm: Arm) -> dict[str, Any]:
    """As `shard_faults.fault`, behind the step: what fails is raised by a later call."""
    publisher, outcomes = faulty(folder, rank, arm, asynchronous=True)
    outcomes.append(attempt(lambda: publisher.publish().wait()))
    return {"outcomes": outcomes, "digest": publisher.state_digest}


def merged(folder: Path) -> dict[str, Any]:
    """One rank is slow: calls are skipped on all, and the end of the block publishes what they left."""
    rows, told = begun(folder), Told()
    gate = threading.Event()
    with rows.publisher(folder, asynchronous=True, when_busy="merge", observers=[told]) as publisher:
        rows.step(1)
        if dist.get_rank() == 1:
            once(publisher._store, "put", partial(_when, gate))
        calls = [publisher.publish(step=1)]
        for step in (2, 3):
            rows.step(step)
            calls.append(publisher.publish(step=step))
        gate.set()
    skipped = [call.is_skipped for call in calls]
    return {"skipped": skipped, "version": publisher.version, "told": told.versions, "digest": publisher.state_digest}


def one_leaves(folder: Path, leaver: int) -> dict[str, Any]:
    """An error ends the block of one rank, between two steps; the others learn of it at their next call."""
    rows = begun(folder)
    started, error = time.monotonic(), "none"
    try:
        with rows.publisher(folder, asynchronous=True) as publisher:
            rows.step(1)
            publisher.publish()
            rows.step(2)
            if dist.get_rank() == leaver:
                raise ValueError("a bug in the training loop")
            publisher.publish()
    except Exception as caught:  # noqa: BLE001
        error = f"{type(caught).__name__}: {caught}"
    seconds = time.monotonic() - started
    dist.barrier()  # or who is gone altogether would be called so
    return {"error": error, "seconds": seconds, "version": publisher.version}


def hooked(folder: Path) -> dict[str, Any]:
    """An optimizer's hook on every rank; what the trainer's checkpoint remembers is checked by the next publisher."""
    rows = begun(folder)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    publisher = rows.publisher(folder, asynchronous=True)
    publisher.hook(optimizer, every=2)
    for step in range(1, 5):
        rows.step(step)
        parameter.grad = torch.ones(1)
        optimizer.step()
    publisher.close()
    saved = publisher.state_dict()
    resumed = rows.publisher(folder, resume_from=saved)
    refusal = attempt(lambda: rows.publisher(folder, resume_from=saved | {"run_id": "another"}))
    return {"saved": saved, "found": resumed.version, "refusal": refusal}


def ended(folder: Path, how: str) -> dict[str, Any]:
    """The process group goes away while a publication is under way, or when it has been waited for."""
    rows = begun(folder)
    publisher = rows.publisher(folder, asynchronous=True, drain_timeout_s=10.0)
    rows.step(1)
    publisher.publish()
    if how == "closed":
        publisher.close()
    started = time.monotonic()
    dist.destroy_process_group()
    return {"seconds": time.monotonic() - started}


def _when(gate: threading.Event, call: Callable[[], Any], *_: Any) -> Any:
    gate.wait()
    return call()


SCENES: dict[str, Scene] = {
    "calls that are merged": merged,
    "rank 1 leaves": partial(one_leaves, leaver=1),
    "rank 0 leaves": partial(one_leaves, leaver=0),
    "a hook": hooked,
}

ENDS = ("closed", "under way")
"""How a publisher is left when its process group is destroyed."""
