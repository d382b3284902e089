# SPDX-License-Identifier: Apache-2.0
"""The matrix product of plain weights on CPUs, at a bearable speed.

Where the processor has no instructions for bf16 or fp16 products, torch falls back to a slow loop. Then, from a few
rows on, it is faster to widen the operands to fp32, in blocks of weight rows that stay in the cache.

Nothing is kept between calls: a widened copy of a weight would be one more copy that updates do not reach.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch

__all__ = ["plain_linear"]

_FEW_ROWS: Final = 4
_BLOCK_ELEMENTS: Final = 1 << 19  # 2 MiB of fp32


def plain_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ weight.T + bias`` in the dtype of `x`.

    Args:
        x: shape ``(..., in)``.
        weight: shape ``(out, in)``, of the dtype of `x`.
        bias: shape ``(out,)``.
    """
    rows = x.numel() // max(1, x.shape[-1])
    if rows < _FEW_ROWS or x.dtype != weight.dtype or _is_fast(x.dtype):
        return torch.nn.functional.linear(x, weight, bias)
    wide = x.reshape(rows, -1).float()
    out = torch.empty(rows, weight.shape[0], dtype=x.dtype)
    step = max(1, _BLOCK_ELEMENTS // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        block = slice(start, start + step)
        product = wide @ weight[block].float().t()
        out[:, block] = product if bias is None else product + bias[block].float()
    return out.view(*x.shape[:-1], weight.shape[0])


@cache
def _is_fast(dtype: torch.dtype) -> bool:
    """Say whether torch has a fast product of this type on this processor."""
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True
