# SPDX-License-Identifier: Apache-2.0
"""Live weights, read and written bit for bit at positions of a storage.

The only two things a pause does: `gather` and `scatter`. On the CPU both go through the positions in pieces that stay
in the cache, so that reading back what was written costs little more than writing it. Integer views only: no bit
pattern is special.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from vllm_delta_snapshot.engine.threads import run_in_parts

__all__ = ["gather", "scatter", "to_device"]

_CHUNK: Final = 8192
_LEAST: Final = 1 << 16


def gather(flat: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the elements at `index`.

    Args:
        flat: a storage as integers, flat.
        index: positions, int64, shape ``(k,)``, on the device of `flat`.
    """
    if flat.device.type != "cpu":
        return flat.index_select(0, index)
    out = torch.empty(index.numel(), dtype=flat.dtype)
    source, where, found = flat.numpy(), index.numpy(), out.numpy()

    def part(first: int, last: int) -> None:
        # The positions were checked; mode="clip" only spares numpy a copy of the output.
        np.take(source, where[first:last], out=found[first:last], mode="clip")

    run_in_parts(part, index.numel(), least=_LEAST)
    return out


def scatter(flat: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> bool:
    """Write elements and read them back.

    Args:
        flat: a storage as integers, flat.
        index: distinct positions, int64, shape ``(k,)``, on the device of `flat`.
        values: the same type and device, shape ``(k,)``.

    Returns:
        Whether every element now has its bits.
    """
    if flat.device.type != "cpu":
        flat.index_copy_(0, index, values)
        return bool(torch.equal(flat.index_select(0, index), values))
    target, where, new = flat.numpy(), index.numpy(), values.numpy()

    def part(first: int, last: int) -> bool:
        is_right = True
        for start in range(first, last, _CHUNK):
            places = where[start : min(start + _CHUNK, last)]
            bits = new[start : min(start + _CHUNK, last)]
            target[places] = bits
            is_right &= bool(np.array_equal(target[places], bits))
        return is_right

    return all(run_in_parts(part, index.numel(), least=_LEAST))


def to_device(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """Return a writable host array of integers as a tensor on `device`; on the CPU it shares memory."""
    signed = array if array.dtype.itemsize == 1 else array.view(f"<i{array.dtype.itemsize}")
    return torch.from_numpy(signed).to(device)
