"""What goes wrong among processes that publish together, and what each of them sees of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.checkpoints import write_checkpoint
from tests.support.shards import _poke
from trainer_hooks import PartialTensor, ShardedPublisher
from trainer_hooks.compare.shard_baseline import ShardBaseline
from vllm_delta_snapshot.errors import StoreError, StoreUnavailable

SHAPES = {"model.a": (11, 6), "model.b": (5,), "model.c": (4, 3), "model.d": (40, 2)}


class Rows:
    """Tensors of which each rank exports some rows. The steps of all processes are the same.

    Attributes:
        state: all of it.
        trouble: is given each name and tensor, and returns the tensor to export.
    """

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.state = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in SHAPES.items()}
        self.trouble: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, tensor: tensor

    def step(self, number: int) -> None:
        """Change some elements."""
        self.state = {name: _poke(tensor, name, number) for name, tensor in self.state.items()}

    def export(self) -> Iterator[PartialTensor]:
        """Yield this rank's rows; all of them without other processes."""
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        for name, whole in self.state.items():
            tensor = self.trouble(name, whole)
            start, stop = tensor.shape[0] * rank // size, tensor.shape[0] * (rank + 1) // size
            yield PartialTensor(name, tensor[start:stop], (start, *(0,) * (tensor.dim() - 1)))

    def publisher(self, folder: Path, *, timeout_s: float = 30.0, **options: Any) -> ShardedPublisher:
        """Return a publisher into the run of `folder`."""
        return ShardedPublisher(
            self.export,
            sync_dir=str(folder / "run"),
            base=folder / "base",
            threads=1,
            timeout_s=timeout_s,
            **{"asynchronous": False} | options,
        )


def once(target: object, method: str, fault: Callable[..., Any]) -> None:
    """Let the next call of a method be ``fault(real method, arguments)``."""
    real = getattr(target, method)

    def call(*args: Any, **options: Any) -> Any:
        setattr(target, method, real)
        return fault(partial(real, *args, **options), *args)

    setattr(target, method, call)


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_after(call: Callable[[], Any], *_: Any) -> None:
    call()
    _die()


def _raise(error: BaseException, *_: Any) -> None:
    raise error


def _lose_answer(publisher: ShardedPublisher, call: Callable[[], Any], *_: Any) -> None:
    call()
    once(publisher._store, "read", partial(_raise, StoreUnavailable("no answer")))
    raise StoreUnavailable("no answer")


def _other_first(call: Callable[[], Any], key: str, data: bytes) -> None:
    """Another trainer commits the version a moment earlier."""
    store = call.func.__self__  # type: ignore[attr-defined]
    publication = bytes(data).split(b'"publication_id": "')[1][:32]
    store.create(key, data.replace(publication, b"f" * 32))
    call()


def _narrow(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:, :2] if name == "model.c" else tensor


def _boom(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if name == "model.c":
        raise RuntimeError("boom")
    return tensor


def _troubled(publisher: ShardedPublisher, rows: Rows, trouble: Callable[..., torch.Tensor]) -> None:
    """Let the next pass go wrong, and no other."""

    def read(call: Callable[..., Any], *_: Any) -> Any:
        rows.trouble, before = trouble, rows.trouble
        try:
            yield from call()
        finally:
            rows.trouble = before

    once(publisher._source, "read", read)


def _hang(*_: Any) -> None:
    signal.setitimer(signal.ITIMER_REAL, 3.0)  # nobody handles SIGALRM: it ends the process
    signal.pause()


def _held(publisher: ShardedPublisher) -> ShardBaseline:
    return publisher._published.baseline


Arm = Callable[[ShardedPublisher, Rows], None]

FAULTS: dict[str, tuple[int, Arm]] = {
    "an exporter that raises": (1, lambda p, rows: _troubled(p, rows, _boom)),
    "a box of another shape": (2, lambda p, rows: _troubled(p, rows, _narrow)),
    "an upload that fails": (2, lambda p, _: once(p._store, "put", partial(_raise, StoreUnavailable("disk full")))),
    "a commit that fails": (0, lambda p, _: once(p._store, "create", partial(_raise, StoreError("no")))),
    "a commit whose answer is lost": (0, lambda p, _: once(p._store, "create", partial(_lose_answer, p))),
    "a baseline that stops half-way": (
        1,
        lambda p, _: once(p._published.baseline, "advance", partial(_raise, MemoryError())),
    ),
    "another trainer": (0, lambda p, _: once(p._store, "create", _other_first)),
}
"""By name: on which rank, and what sets it up."""

DEATHS: dict[str, tuple[int | None, Arm]] = {
    "rank 1 at the start": (1, lambda p, _: once(p._ranks, "_send", _die)),
    "rank 1 while it writes": (1, lambda p, _: once(p._store, "put", _die)),
    "rank 2 when it has written": (2, lambda p, _: once(p._store, "put", _die_after)),
    "rank 1 before it hears the outcome": (1, lambda p, _: once(_held(p), "advance", _die)),
    "rank 1 falls silent": (1, lambda p, _: once(p._store, "put", _hang)),
    "rank 0 while it writes": (0, lambda p, _: once(p._store, "put", _die)),
    "rank 0 before the commit": (0, lambda p, _: once(p._store, "create", _die)),
    "rank 0 after the commit": (0, lambda p, _: once(p._store, "create", _die_after)),
    "all ranks while they write": (None, lambda p, _: once(p._store, "put", _die)),
    "all ranks before they move on": (None, lambda p, _: once(_held(p), "advance", _die)),
}
"""By name: which rank, or all of them, and what sets it up."""


def attempt(call: Callable[[], Any]) -> dict[str, Any]:
    """Publish, or do something else; say which version came of it, or which error, and how long it took."""
    started = time.monotonic()
    try:
        outcome: dict[str, Any] = {"version": call().version}
    except Exception as error:  # noqa: BLE001
        outcome = {"error": type(error).__name__, "message": str(error)}
    return outcome | {"seconds": time.monotonic() - started}


def begun(folder: Path) -> Rows:
    """Return the weights of all ranks, with their base checkpoint written; collective."""
    rows = Rows()
    if dist.get_rank() == 0:
        write_checkpoint(folder / "base", rows.state)
    dist.barrier()
    return rows


def fault(folder: Path, rank: int | None, arm: Arm) -> dict[str, Any]:
    """Publish, publish with a fault on one rank, and publish twice again."""
    publisher, outcomes = faulty(folder, rank, arm, asynchronous=False)
    return {"outcomes": outcomes, "digest": publisher.state_digest}


def faulty(
    folder: Path, rank: int | None, arm: Arm, *, asynchronous: bool
) -> tuple[ShardedPublisher, list[dict[str, Any]]]:
    """Publish, publish with a fault, and publish twice again; return the publisher and what came of the last three."""
    rows = begun(folder)
    timeout_s = 1.0 if "silent" in folder.name else 30.0
    publisher = rows.publisher(folder, timeout_s=timeout_s, asynchronous=asynchronous)
    rows.step(1)
    publisher.publish()
    publisher.drain()
    rows.step(2)
    if rank in (None, dist.get_rank()):
        arm(publisher, rows)
    outcomes = [attempt(publisher.publish)]
    rows.step(3)
    outcomes += [attempt(publisher.publish), attempt(publisher.publish)]
    return publisher, outcomes


def resumed(folder: Path, steps: int) -> dict[str, Any]:
    """Continue a run with other processes than it was begun by, and publish one more step."""
    rows = Rows()
    for number in range(1, steps + 1):
        rows.step(number)
    publisher = rows.publisher(folder)
    found = publisher.version
    report = publisher.publish().report
    return {"found": found, "version": report.version, "digest": publisher.state_digest}
