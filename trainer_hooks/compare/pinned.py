# SPDX-License-Identifier: Apache-2.0
"""The memory that a baseline lies in: pinned, so that an accelerator copies from it at the speed of the bus; or plain.

Arrays are cut from slabs whose size is a power of two, since torch rounds every pinned allocation up to one. A slab
lives as long as an array in it. Where the system pins no more, the rest is plain memory, which is as right and slower.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_delta_snapshot.dtypes import Bits

__all__ = ["HostMemory", "pinned_slab"]

logger = logging.getLogger(__name__)

_SLAB_BYTES: Final = 64 << 20
_ALIGNMENT: Final = 64

Slab = NDArray[np.uint8]


def pinned_slab(num_bytes: int) -> Slab:
    """Return pinned memory, shape ``(num_bytes,)``.

    Raises:
        RuntimeError: the system gives none.
    """
    slab: Slab = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()
    return slab


class HostMemory:
    """See the module.

    Args:
        is_pinned: whether to ask for pinned memory.
        allocate: gives pinned memory, or raises RuntimeError.
    """

    def __init__(self, *, is_pinned: bool, allocate: Callable[[int], Slab] = pinned_slab) -> None:
        self._is_pinned = is_pinned
        self._allocate = allocate
        self._open: list[Slab] = []  # what is left of slabs

    def copy_of(self, bits: Bits) -> Bits:
        """Return a copy of an array, flat."""
        copy = self.empty(bits.size, bits.dtype)
        copy[...] = bits.reshape(-1)
        return copy

    def empty(self, size: int, dtype: np.dtype[np.unsignedinteger]) -> Bits:
        """Return memory to write into, shape ``(size,)``."""
        slab = self._cut(size * dtype.itemsize) if self._is_pinned and size else None
        bits: Bits = np.empty(size, dtype) if slab is None else slab.view(dtype)
        return bits

    def _cut(self, num_bytes: int) -> Slab | None:
        """Return a part of the first slab that has room; ``None`` if no more can be pinned."""
        taken = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        for place, left in enumerate(self._open):
            if left.size >= taken:
                self._open[place] = left[taken:]
                return left[:num_bytes]
        try:
            slab = self._allocate(max(_SLAB_BYTES, 1 << (taken - 1).bit_length()))
        except RuntimeError as error:
            self._is_pinned = False
            logger.warning("cannot pin more host memory, so a part of the baseline is read more slowly: %s", error)
            return None
        self._open.append(slab[taken:])
        return slab[:num_bytes]
