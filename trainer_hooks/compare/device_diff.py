# SPDX-License-Identifier: Apache-2.0
"""Where weights that lie on an accelerator are compared with the baseline, which lies on the host.

On the device: the baseline of a piece is copied there, and only positions and new values come back. Or on the host: the
weights of the piece come to pinned memory, cast on the device if they are masters. Either way a piece at a time on a
lane, so memory is bounded on both sides, and the result is that of the diff on the host, bit for bit; what a cast makes
of a NaN is what torch makes of it on the tensor's own device. Streams and their rules are `lanes`'s.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal, get_args

import numpy as np
import torch

from trainer_hooks.compare.diff import (
    CHUNK_ELEMENTS,
    PIECE_ELEMENTS,
    Found,
    Piece,
    find_changes,
    find_in_chunks,
    served,
    tensor_bits,
)
from trainer_hooks.compare.lanes import LANES, Lane, Lanes, stream_lanes
from trainer_hooks.compare.pinned import HostMemory
from vllm_delta_snapshot.dtypes import Bits

__all__ = ["DEVICE_BYTES", "DeviceDiff", "DiffOn", "Pass"]

logger = logging.getLogger(__name__)

DiffOn = Literal["auto", "device", "host"]
"""Where to compare; ``auto`` is the device if it has room."""

DEVICE_BYTES: Final = LANES * PIECE_ELEMENTS * 48
"""What comparing on a device may take there: of a piece at most the baseline, a cast, a mask, and positions and values
of what differs, should all of it: 384 MiB, for elements of eight bytes that all changed."""

Marks = Mapping[torch.device, object]
"""By device, the point in the trainer's stream from which on the weights are what they are."""


class DeviceDiff:
    """See the module. Lives as long as the publisher, and keeps its lanes.

    Args:
        diff_on: where to compare what lies on an accelerator. If the device runs out of memory meanwhile, the rest of
            the pass is compared on the host, whatever this says.
        lanes_of: gives the lanes of a device; ``None`` for tensors that are compared where they are.

    Raises:
        ValueError: there is no such `diff_on`.
    """

    def __init__(
        self, diff_on: DiffOn = "auto", *, lanes_of: Callable[[torch.device], Lanes | None] = stream_lanes
    ) -> None:
        if diff_on not in get_args(DiffOn):
            raise ValueError(f"diff_on must be one of {get_args(DiffOn)}, not {diff_on!r}")
        self._diff_on = diff_on
        self._make_lanes = lanes_of
        self._lanes: dict[torch.device, Lanes | None] = {}

    def begin(self) -> Pass:
        """Return a pass over the weights."""
        return Pass(self)

    def host_memory(self) -> HostMemory:
        """Return the memory to keep a baseline in: pinned if this process uses an accelerator that would read it."""
        return HostMemory(is_pinned=self._diff_on != "host" and _uses_accelerator())

    def lanes_of(self, device: torch.device) -> Lanes | None:
        """Return the lanes of a device, the same each time. Called in the trainer's thread."""
        if device not in self._lanes:
            self._lanes[device] = self._make_lanes(device)
        return self._lanes[device]

    def fits(self, lanes: Lanes) -> bool:
        """Say whether to compare on a device."""
        return self._diff_on == "device" or (self._diff_on == "auto" and lanes.room() >= DEVICE_BYTES)


class Pass:
    """One pass: on each device it compares there, or on the host; from the start, or from where memory ran out.

    Args:
        device_diff: whose.
    """

    def __init__(self, device_diff: DeviceDiff) -> None:
        self._device_diff = device_diff
        self._is_there: dict[torch.device, bool] = {}
        self._lock = threading.Lock()

    def mark(self, pieces: Iterable[Piece]) -> Marks:
        """Note, in the trainer's thread, when the weights of these pieces are there to be read. Does not block."""
        marks: dict[torch.device, object] = {}
        for device in {piece.current.device for piece in pieces}:
            lanes = self._device_diff.lanes_of(device)
            if lanes is not None:
                marks[device] = lanes.mark()
                if device not in self._is_there:
                    self._is_there[device] = self._device_diff.fits(lanes)
        return marks

    def find(self, piece: Piece, marks: Marks) -> list[Found]:
        """Find what differs. Any thread; blocks until nothing reads the piece any more.

        Args:
            piece: one of those that were marked.
            marks: what `mark` returned.
        """
        device = piece.current.device
        lanes = self._device_diff.lanes_of(device) if device in marks else None
        if lanes is None or piece.baseline.size == 0:
            return find_in_chunks(piece)
        with lanes.take() as lane:
            found = self._find_there(lane, marks[device], piece)
            if found is not None:
                return [found]
            current = _fetch(lane, marks[device], piece)
        return [find_changes(0, current, piece.baseline)]

    def read(self, piece: Piece, marks: Marks) -> Bits:
        """Bring a piece's elements to the host, in the serving dtype. Any thread; blocks, and as `find` otherwise."""
        device = piece.current.device
        lanes = self._device_diff.lanes_of(device) if device in marks else None
        if lanes is None or piece.baseline.size == 0:
            return tensor_bits(piece.current, piece.spec)
        with lanes.take() as lane:
            return _fetch(lane, marks[device], piece)

    def _find_there(self, lane: Lane, mark: object, piece: Piece) -> Found | None:
        """Compare on the device, unless it has no room."""
        device = piece.current.device
        if not self._is_there[device]:
            return None
        try:
            return _compare_there(lane, mark, piece)
        except torch.cuda.OutOfMemoryError as error:
            with self._lock:
                if self._is_there[device]:
                    logger.warning("%s has no room to compare there; going on on the host: %s", device, error)
                self._is_there[device] = False
        return None


def _compare_there(lane: Lane, mark: object, piece: Piece) -> Found:
    with lane.follow(mark):
        now = served(piece.current, piece.spec)
        before = torch.empty(now.shape, dtype=now.dtype, device=now.device)
        lane.copy(before, torch.from_numpy(np.ascontiguousarray(piece.baseline).view(np.uint8)).view(now.dtype))
        at = torch.nonzero(now != before).flatten()  # waits: the host learns how many
        positions, new = lane.host_buffer(at.numel(), torch.int32), lane.host_buffer(at.numel(), now.dtype)
        lane.copy(positions, at.to(torch.int32))
        lane.copy(new, now.index_select(0, at))
    where = positions.numpy().copy()  # nothing that was found keeps pinned memory
    return where, piece.baseline.take(where, mode="clip"), _bits(new, piece).copy()


def _fetch(lane: Lane, mark: object, piece: Piece) -> Bits:
    """Bring the weights of a piece to the host, in the serving dtype; casts take a chunk of the device at a time."""
    size = piece.baseline.size
    with lane.follow(mark):
        staged = lane.host_buffer(size, served(piece.current[:0], piece.spec).dtype)
        for start in range(0, size, CHUNK_ELEMENTS):
            end = start + CHUNK_ELEMENTS
            lane.copy(staged[start:end], served(piece.current[start:end], piece.spec))
    return _bits(staged, piece)


def _bits(staged: torch.Tensor, piece: Piece) -> Bits:
    bits: Bits = staged.numpy().view(piece.spec.element.bits)
    return bits


def _uses_accelerator() -> bool:
    """Say whether this process has begun to use one; asking does not make it begin."""
    return any(
        hasattr(torch, name) and getattr(torch, name).is_available() and getattr(torch, name).is_initialized()
        for name in ("cuda", "xpu")
    )
