# SPDX-License-Identifier: Apache-2.0
"""Lanes: queues of work on an accelerator beside the trainer's own, and the rules that keep what they read from moving.

An accelerator works through streams, in order within one and in no order between two, while the host runs ahead. A copy
that reads memory which something else writes gives wrong weights and no error. So:

1. A lane starts after a mark in the trainer's current stream, made in the trainer's thread once all that produces the
   weights has been queued there. (A thread has a current stream of its own: asking in a worker is too late.)
2. Whoever works on a lane does not leave before the device has done all of it, with an error or without. So nothing
   that the trainer does afterwards overtakes a read, and no buffer goes back to an allocator, nor a baseline moves,
   under a copy. `record_stream` is for memory that is let go of before the work is done, so nothing here needs it.
3. What a lane copies to the host is looked at only after that.

What is compared, and where, is `device_diff`'s.
"""

from __future__ import annotations

import contextlib
import logging
import queue
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import torch

__all__ = ["LANES", "Lane", "Lanes", "StreamLanes", "stream_lanes"]

logger = logging.getLogger(__name__)

LANES: Final = 2
"""Of a device: while one waits for the host, the other keeps the bus busy."""


class Lane(Protocol):
    """One queue of work on a device, used by one thread at a time."""

    def follow(self, mark: object) -> AbstractContextManager[None]:
        """Queue on this lane what torch is asked for inside, after a mark. Leaving blocks until all of it is done."""
        ...

    def host_buffer(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return host memory to copy into, shape ``(size,)``, pinned if it can be. Only inside `follow`."""
        ...

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy to or from the host. What it wrote may be looked at after `follow` was left. Does not block."""
        ...


class Lanes(Protocol):
    """The lanes of one device."""

    def mark(self) -> object:
        """Return the point that the calling thread's current stream has come to. Does not block."""
        ...

    def room(self) -> int:
        """Return how many bytes could be allocated on the device."""
        ...

    def take(self) -> AbstractContextManager[Lane]:
        """Take a lane, for one thread; it goes back at the end. Blocks until there is one."""
        ...


class StreamLanes:
    """`Lanes` of a device whose torch backend has streams and events, by the names of ``torch.cuda``.

    Args:
        device: with its index.
        module: the backend.
    """

    def __init__(self, device: torch.device, module: Any) -> None:
        self._device = device
        self._module = module
        self._free: queue.SimpleQueue[Lane] = queue.SimpleQueue()
        for _ in range(LANES):
            self._free.put(_StreamLane(device, module))

    def mark(self) -> object:
        """See `Lanes.mark`."""
        event: object = self._module.current_stream(self._device).record_event()
        return event

    def room(self) -> int:
        """See `Lanes.room`. Counts what torch's allocator holds and does not use."""
        free, _ = self._module.mem_get_info(self._device)
        unused = self._module.memory_reserved(self._device) - self._module.memory_allocated(self._device)
        return int(free + unused)

    @contextlib.contextmanager
    def take(self) -> Iterator[Lane]:
        """See `Lanes.take`."""
        lane = self._free.get()
        try:
            yield lane
        finally:
            self._free.put(lane)


class _StreamLane:
    """A side stream."""

    def __init__(self, device: torch.device, module: Any) -> None:
        self._module = module
        self._stream = module.Stream(device=device)
        self._can_pin = True

    @contextlib.contextmanager
    def follow(self, mark: object) -> Iterator[None]:
        self._stream.wait_event(mark)
        # Entered in a worker's thread this also makes the device current; the thread's own would be device 0.
        with self._module.stream(self._stream):
            try:
                yield
            finally:
                self._stream.synchronize()

    def host_buffer(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        if self._can_pin:
            try:
                return torch.empty(size, dtype=dtype, device="cpu", pin_memory=True)
            except RuntimeError as error:
                self._can_pin = False
                logger.warning("cannot pin host memory, so weights come from the device more slowly: %s", error)
        return torch.empty(size, dtype=dtype, device="cpu")

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        # From or to memory that is not pinned it blocks, and is as right.
        into.copy_(source, non_blocking=True)


def stream_lanes(device: torch.device) -> Lanes | None:
    """Return lanes of a device; ``None`` if it is the host, or if its backend has one stream only."""
    module = getattr(torch, device.type, None)
    if device.type in ("cpu", "meta") or not all(hasattr(module, name) for name in _NEEDED):
        return None
    return StreamLanes(device, module)


_NEEDED: Final = ("Stream", "stream", "current_stream", "mem_get_info", "memory_reserved", "memory_allocated")
