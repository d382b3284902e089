# SPDX-License-Identifier: Apache-2.0
"""The matrix product of plain weights on CPUs, at a bearable speed.

Where the processor has no instructions for bf16 or fp16 products, torch falls back to a slow loop. Then, from a few
rows on, it is faster to widen the operands to fp32, in blocks of weight rows that stay in the cache.

Which of the two a layer takes is decided when it is set up, never while it runs: a compiler that traces the layer sees
torch's product, or one opaque operator. Nothing is kept between calls: a widened copy of a weight would be one more
copy that updates do not reach.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Final

import torch

__all__ = ["is_plain_product", "linear_for", "plain_linear", "widened_linear"]

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Takes `x`, a weight and a bias; see `plain_linear`."""

_FEW_ROWS: Final = 4
_BLOCK_ELEMENTS: Final = 1 << 19  # 2 MiB of fp32


def linear_for(dtype: torch.dtype) -> Linear:
    """Return the product to set up a layer with, whose weights and inputs have this type."""
    return torch.nn.functional.linear if _is_fast(dtype) else widened_linear


def is_plain_product(linear: object) -> bool:
    """Say whether a layer that was set up with this computes from the weight that it is given."""
    return linear is torch.nn.functional.linear or linear is widened_linear


def plain_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ weight.T + bias`` in the dtype of `x`. Not to be traced: see `linear_for`.

    Args:
        x: shape ``(..., in)``.
        weight: shape ``(out, in)``, of the dtype of `x`.
        bias: shape ``(out,)``.
    """
    return torch.nn.functional.linear(x, weight, bias) if _is_fast(x.dtype) else _widened(x, weight, bias)


def widened_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return the same as `plain_linear`, widened if there are enough rows; one operator for a compiler."""
    result: torch.Tensor = torch.ops.delta_snapshot.widened_linear(x, weight, bias)
    return result


def _widened(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    rows = x.numel() // max(1, x.shape[-1])
    if rows < _FEW_ROWS or x.dtype != weight.dtype:
        return torch.nn.functional.linear(x, weight, bias)
    wide = x.reshape(rows, -1).float()
    out = torch.empty(rows, weight.shape[0], dtype=x.dtype)
    step = max(1, _BLOCK_ELEMENTS // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        block = slice(start, start + step)
        product = wide @ weight[block].float().t()
        out[:, block] = product if bias is None else product + bias[block].float()
    return out.view(*x.shape[:-1], weight.shape[0])


def _shape_of(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    del bias
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@cache
def _is_fast(dtype: torch.dtype) -> bool:
    """Say whether torch has a fast product of this type on this processor."""
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


_LIBRARY: Final = torch.library.Library("delta_snapshot", "FRAGMENT")  # type: ignore[no-untyped-call]
_SCHEMA: Final = "widened_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor"
_LIBRARY.define(_SCHEMA)  # type: ignore[no-untyped-call]
_LIBRARY.impl("widened_linear", _widened, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("delta_snapshot::widened_linear", _shape_of, lib=_LIBRARY)
