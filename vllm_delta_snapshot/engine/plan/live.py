# SPDX-License-Identifier: Apache-2.0
"""Live weights, read and written bit for bit at positions of a storage.

The only two things a pause does: `gather` and `scatter`, of one storage or of many at once. On the CPU both go through
the positions in pieces, on all cores, and what was written is read back while it is still in the cache, so that this
costs little more than writing. Integer views only: no bit pattern is special.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch

from vllm_delta_snapshot.engine.threads import run_each

__all__ = ["gather", "gather_all", "scatter", "scatter_all", "to_device"]

_CHUNK: Final = 8192
_PART: Final = 1 << 15

Part = tuple[int, int, int]
"""Which storage, and from where to where in its positions."""


def gather(flat: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the elements at `index`.

    Args:
        flat: a storage as integers, flat.
        index: positions, int64, shape ``(k,)``, on the device of `flat`.
    """
    return gather_all([(flat, index)])[0]


def gather_all(wanted: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Return the elements of many storages: see `gather`."""
    found = [torch.empty(index.numel(), dtype=flat.dtype, device=flat.device) for flat, index in wanted]

    def part(item: Part) -> None:
        number, first, last = item
        flat, index = wanted[number]
        if flat.device.type != "cpu":
            torch.index_select(flat, 0, index, out=found[number])
            return
        # The positions were checked; mode="clip" only spares numpy a copy of the output.
        np.take(flat.numpy(), index.numpy()[first:last], out=found[number].numpy()[first:last], mode="clip")

    _run(part, [index for _, index in wanted])
    return found


def scatter(flat: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> bool:
    """Write elements and read them back.

    Args:
        flat: a storage as integers, flat.
        index: distinct positions, int64, shape ``(k,)``, on the device of `flat`.
        values: the same type and device, shape ``(k,)``.

    Returns:
        Whether every element now has its bits.
    """
    return scatter_all([(flat, index, values)])[0]


def scatter_all(writes: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> list[bool]:
    """Write to many storages and read back: see `scatter`. No two writes share a position, or they agree on it."""
    is_right = [True] * len(writes)

    def part(item: Part) -> None:
        number, first, last = item
        flat, index, values = writes[number]
        if flat.device.type != "cpu":
            flat.index_copy_(0, index, values)
            is_right[number] = bool(torch.equal(flat.index_select(0, index), values))
        elif not _scatter_part(flat.numpy(), index.numpy()[first:last], values.numpy()[first:last]):
            is_right[number] = False

    _run(part, [index for _, index, _ in writes])
    return is_right


def _scatter_part(target: np.ndarray[Any, Any], index: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> bool:
    is_right = True
    found = np.empty(min(index.size, _CHUNK), target.dtype)
    for start in range(0, index.size, _CHUNK):
        places, bits = index[start : start + _CHUNK], values[start : start + _CHUNK]
        target[places] = bits  # refuses positions out of range; below, mode="clip" only spares a copy
        np.take(target, places, out=found[: places.size], mode="clip")
        is_right &= bool(np.array_equal(found[: places.size], bits))
    return is_right


def _run(part: Callable[[Part], None], indices: Iterable[torch.Tensor]) -> None:
    """Do every part of every storage; a device's in one piece and in order, the CPU's side by side."""
    parts: list[Part] = []
    for number, index in enumerate(indices):
        size = index.numel()
        if index.device.type != "cpu":
            part((number, 0, size))
            continue
        parts += [(number, first, min(first + _PART, size)) for first in range(0, size, _PART)]
    run_each(lambda bundle: list(map(part, bundle)), _bundles(parts))


def _bundles(parts: Sequence[Part]) -> list[list[Part]]:
    """Put small parts together, so that handing them to a thread costs little."""
    bundles: list[list[Part]] = []
    room = 0
    for item in parts:
        size = item[2] - item[1]
        if size > room:
            bundles.append([])
            room = _PART
        bundles[-1].append(item)
        room -= size
    return bundles


def to_device(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """Return a writable host array of integers as a tensor on `device`; on the CPU it shares memory."""
    signed = array if array.dtype.itemsize == 1 else array.view(f"<i{array.dtype.itemsize}")
    return torch.from_numpy(signed).to(device)
