# SPDX-License-Identifier: Apache-2.0
"""An optional compiled kernel for the two hot loops of the diff: find what differs, and digest it.

Used where numba is installed (extra ``[fast]``) and ``DELTA_SNAPSHOT_KERNEL`` is not ``0``; its results are those of
numpy, bit for bit. Compiling takes about a second for each element width, in every process; `warm_up` does it ahead.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.format.digest import GOLDEN, MIX_1, MIX_2, VALUE
from vllm_delta_snapshot.types import TensorSpec, position_dtype

__all__ = ["Kernel", "load_kernel"]

_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)
_LOADING: Final = threading.Lock()


class Kernel:
    """The compiled functions.

    Args:
        find: writes positions, old and new values of what differs between two arrays; returns how many.
        digest: returns the sum of the digest terms of values at positions.
    """

    def __init__(self, find: Callable[..., int], digest: Callable[..., int]) -> None:
        self._find = find
        self._digest = digest

    @staticmethod
    def takes(current: Bits, baseline: Bits) -> bool:
        """Say whether two arrays can be compared eight bytes at a time."""
        arrays = (current, baseline)
        return all(array.ctypes.data % 8 == 0 and array.flags.c_contiguous for array in arrays)

    def warm_up(self, specs: Iterable[TensorSpec]) -> None:
        """Compile for the element widths of these tensors, so that the first diff need not. Blocks."""
        for bits, positions in {(spec.element.bits, position_dtype(spec.numel)) for spec in specs}:
            one, other = np.zeros(1, bits), np.ones(1, bits)
            self.find(other, one, np.empty(2, np.int32), np.empty(2, bits), np.empty(2, bits))
            self.digest(0, np.zeros(1, positions), one)

    def find(self, current: Bits, baseline: Bits, positions: NDArray[np.int32], old: Bits, new: Bits) -> int:
        """Compare two arrays of one width; write what differs into buffers of their size, and return how many."""
        return int(self._find(current, baseline, positions, old, new))

    def digest(self, key: int, positions: NDArray[np.signedinteger], values: Bits) -> int:
        """Return what `patch_digest` returns for a tensor with this key."""
        return int(self._digest(np.uint64(key), positions, values))


def load_kernel() -> Kernel | None:
    """Return the kernel; ``None`` where numba is missing or the environment says no."""
    with _LOADING:  # else every thread that asks at the start has one of its own, and compiles it
        return _load_kernel()


@functools.cache
def _load_kernel() -> Kernel | None:
    if os.environ.get("DELTA_SNAPSHOT_KERNEL") == "0" or importlib.util.find_spec("numba") is None:
        return None
    import numba  # type: ignore[import-untyped]

    compiled: Any = numba.njit(nogil=True)
    return Kernel(compiled(_find), compiled(_digest))


def _find(current: Any, baseline: Any, positions: Any, old: Any, new: Any) -> int:
    lanes = 8 // current.itemsize
    words = current.size // lanes
    left, right = current[: words * lanes].view(np.uint64), baseline[: words * lanes].view(np.uint64)
    count = 0
    for word in range(words):
        if left[word] != right[word]:
            for at in range(word * lanes, word * lanes + lanes):
                # Written always, kept if it differs: no branch to mispredict.
                positions[count] = at
                old[count] = baseline[at]
                new[count] = current[at]
                count += current[at] != baseline[at]
    for at in range(words * lanes, current.size):
        if current[at] != baseline[at]:
            positions[count] = at
            old[count] = baseline[at]
            new[count] = current[at]
            count += 1
    return count


def _digest(key: Any, positions: Any, values: Any) -> Any:
    total = np.uint64(0)
    for at in range(positions.size):
        term = np.uint64(positions[at]) * GOLDEN + key
        term ^= np.uint64(values[at]) * VALUE
        term = (term ^ (term >> _S30)) * MIX_1
        term = (term ^ (term >> _S27)) * MIX_2
        total += term ^ (term >> _S31)
    return total
