# SPDX-License-Identifier: Apache-2.0
"""Diff: which elements of a tensor differ from the baseline, bit for bit, in the serving dtype.

Compares unsigned views, so a changed sign of zero is a change and an unchanged NaN is none. Works in cache-sized
chunks: the cast to the serving dtype and the comparison never hold more than one chunk beside the result.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.errors import SourceError
from vllm_delta_snapshot.types import TensorPatch, TensorSpec, position_dtype

__all__ = ["check_castable", "diff_tensor", "tensor_bits"]

CHUNK_ELEMENTS: Final = 1 << 18
"""256 Ki elements: both sides and the mask stay in the cache (docs/design.md, "Diff")."""

_SIGNED: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def diff_tensor(spec: TensorSpec, baseline: Bits, tensor: torch.Tensor) -> TensorPatch | None:
    """Compare a tensor with its baseline. Blocks; on an accelerator it copies chunk by chunk to the host.

    Args:
        spec: the tensor in the base checkpoint.
        baseline: its published bits, shape ``(spec.numel,)``.
        tensor: the trainer's full tensor, any device, any layout of strides, castable to the serving dtype.

    Returns:
        The patch, with arrays of its own; ``None`` if nothing changed.

    Raises:
        SourceError: shape or dtype do not fit (see `check_castable`).
    """
    check_castable(spec, tensor)
    flat = tensor.detach().reshape(-1)
    chunks: list[tuple[NDArray[np.int64], Bits]] = []
    mask = np.empty(min(CHUNK_ELEMENTS, spec.numel), dtype=bool)
    for start in range(0, spec.numel, CHUNK_ELEMENTS):
        current = tensor_bits(flat[start : start + CHUNK_ELEMENTS], spec)
        differs = mask[: current.size]
        np.not_equal(current, baseline[start : start + current.size], out=differs)
        found = np.flatnonzero(differs)
        if found.size:
            chunks.append((found + start, current[found]))
    if not chunks:
        return None
    positions = np.concatenate([found for found, _ in chunks]).astype(position_dtype(spec.numel), copy=False)
    return TensorPatch(spec, positions, np.concatenate([values for _, values in chunks]))


def tensor_bits(flat: torch.Tensor, spec: TensorSpec) -> Bits:
    """Return a flat tensor's bits in the serving dtype, on the host; a view where nothing had to be converted."""
    served = flat.to(getattr(torch, spec.element.torch_name)).cpu().contiguous()
    bits: Bits = served.view(_SIGNED[spec.element.itemsize]).numpy().view(spec.element.bits)
    return bits


def check_castable(spec: TensorSpec, tensor: torch.Tensor) -> None:
    """Check that a trainer's tensor can stand for the checkpoint's.

    Raises:
        SourceError: the shape differs; or a cast to the serving dtype is no plain rounding: between floating point
            and integers, or to fp8, whose values belong to scales that only the quantizer knows.
    """
    if tuple(tensor.shape) != spec.shape:
        raise SourceError(
            "the tensor has another shape than in the base checkpoint",
            tensor=spec.name,
            expected=spec,
            found=f"{tensor.dtype} {list(tensor.shape)}",
        )
    serving = getattr(torch, spec.element.torch_name)
    if tensor.dtype == serving:
        return
    if not (tensor.dtype.is_floating_point and serving.is_floating_point and spec.element.itemsize > 1):
        raise SourceError(
            "the tensor cannot be cast to the serving dtype by rounding alone",
            tensor=spec.name,
            expected=serving,
            found=tensor.dtype,
            hint="Give the tensor in the dtype of the base checkpoint.",
        )
