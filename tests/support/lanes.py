"""Lanes on the CPU that are as late as a GPU's may be: what is read too early has other bits.

A trainer's stream does its work when somebody waits for it and not before; a copy to the host is done when the lane is
left, and until then its target holds rubbish.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

from trainer_hooks.compare.device_diff import DEVICE_BYTES
from trainer_hooks.compare.lanes import LANES, Lane

__all__ = ["LateLanes", "LateStream"]

RUBBISH = 0x5A


class LateStream:
    """The trainer's stream: work that is queued."""

    def __init__(self) -> None:
        self._work: list[Callable[[], object]] = []
        self._done = 0
        self._lock = threading.Lock()

    def queue(self, work: Callable[[], object]) -> None:
        """Have something done later."""
        self._work.append(work)

    def mark(self) -> int:
        """Return how far the queue goes."""
        return len(self._work)

    def run_to(self, mark: int) -> None:
        """Do what was queued before a mark."""
        with self._lock:
            while self._done < mark:
                self._work[self._done]()
                self._done += 1


class LateLanes:
    """See the module.

    Args:
        stream: the trainer's.
        room: how many bytes the device says it has.
        out_of_memory_after: how many copies to the device succeed before its memory is at an end.
    """

    def __init__(
        self, stream: LateStream | None = None, *, room: int = DEVICE_BYTES, out_of_memory_after: int | None = None
    ) -> None:
        self.stream = stream or LateStream()
        self.handed_out: list[torch.Tensor] = []
        self.memories: set[int] = set()
        self.busy = 0
        self.copies = {"to device": 0, "to host": 0}
        self._room = room
        self._left = out_of_memory_after
        self._free = threading.Semaphore(LANES)

    def mark(self) -> object:
        return self.stream.mark()

    def room(self) -> int:
        return self._room

    @contextlib.contextmanager
    def take(self) -> Iterator[Lane]:
        with self._free:
            yield _LateLane(self)

    def spend(self) -> None:
        """Take one copy's worth of the device's memory."""
        if self._left is not None:
            if self._left == 0:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")
            self._left -= 1

    def spoil(self) -> None:
        """Give all host buffers to somebody else."""
        for buffer in self.handed_out:
            buffer.view(torch.uint8).fill_(RUBBISH)


class _LateLane:
    def __init__(self, lanes: LateLanes) -> None:
        self._lanes = lanes
        self._late: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    @contextlib.contextmanager
    def follow(self, mark: object) -> Iterator[None]:
        assert isinstance(mark, int)
        assert self._late is None, "two at once on one lane"
        self._lanes.stream.run_to(mark)
        self._late = []
        self._lanes.busy += 1
        try:
            yield
        finally:
            for into, source in self._late:
                into.copy_(source)
            self._late = None
            self._lanes.busy -= 1

    def host_buffer(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        assert self._late is not None, "outside of `follow`"
        buffer = torch.empty(size, dtype=dtype)
        buffer.view(torch.uint8).fill_(RUBBISH)
        self._lanes.handed_out.append(buffer)
        self._lanes.memories.add(buffer.untyped_storage().data_ptr())
        return buffer

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        assert self._late is not None, "outside of `follow`"
        if into.untyped_storage().data_ptr() in self._lanes.memories:
            self._lanes.copies["to host"] += 1
            self._late.append((into, source))
        else:
            self._lanes.copies["to device"] += 1
            self._lanes.spend()
            into.copy_(source)
