# SPDX-License-Identifier: Apache-2.0
"""Compare two checkpoints, tensor by tensor, bit for bit. Both are mapped; a window of each is in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from vllm_delta_snapshot.audit.comparison import Comparison, TensorComparison
from vllm_delta_snapshot.audit.ulp import distance
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.types import TensorSpec

__all__ = ["compare_checkpoints"]

Progress = Callable[[int, int], None]
"""Called with (tensors compared, tensors in all)."""

_WINDOW: Final = 1 << 22


def compare_checkpoints(a: Checkpoint, b: Checkpoint, *, progress: Progress | None = None) -> Comparison:
    """Compare two checkpoints. Blocks; reads every byte of the tensors that correspond.

    Args:
        a: a checkpoint.
        b: the other one.
        progress: told after every tensor.
    """
    names = sorted({*a.specs, *b.specs})
    found: list[TensorComparison] = []
    total = 0
    for done, name in enumerate(names, start=1):
        spec_a, spec_b = a.specs.get(name), b.specs.get(name)
        if spec_a is None or spec_b is None or spec_a != spec_b:
            found.append(TensorComparison(name, spec_a, spec_b))
        else:
            total += spec_a.numel
            tensor = _compare(spec_a, a.bits(name), b.bits(name))
            found += [tensor] if tensor.changed else []
        if progress:
            progress(done, len(names))
    return Comparison(found, len(names), total)


def _compare(spec: TensorSpec, a: Bits, b: Bits) -> TensorComparison:
    changed, num_nan = 0, 0
    max_ulp: int | None = None
    for start in range(0, spec.numel, _WINDOW):
        one, other = a[start : start + _WINDOW], b[start : start + _WINDOW]
        at = np.flatnonzero(one != other)
        if at.size:
            apart = distance(spec.dtype, one[at], other[at])
            changed += int(at.size)
            num_nan += apart.num_nan or 0
            if apart.max_ulp is not None:
                max_ulp = max(max_ulp or 0, apart.max_ulp)
    return TensorComparison(spec.name, spec, spec, changed, max_ulp, num_nan)
