# SPDX-License-Identifier: Apache-2.0
"""A worker's part of a checkpoint tensor, a cacheful at a time: which elements, and where they live."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from vllm_delta_snapshot.host.places import Index, Piece, Segment, strided_positions

__all__ = ["LiveBlock", "live_blocks"]

_BLOCK: Final = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class LiveBlock:
    """Some elements of a tensor.

    Attributes:
        positions: which elements of the checkpoint tensor, flat, shape ``(k,)``.
        live: the storage as integers: a view of these elements, or all of it, flat.
        index: where in `live` they are, shape ``(k,)``; ``None`` if they are all of it, in order.
    """

    positions: Index
    live: torch.Tensor
    index: torch.Tensor | None

    def read(self) -> torch.Tensor:
        """Return the live bits, shape ``(k,)``."""
        return self.live.reshape(-1) if self.index is None else self.live.index_select(0, self.index)

    def write(self, bits: torch.Tensor) -> bool:
        """Write bits, shape ``(k,)``, and say whether they are there."""
        if self.index is None:
            self.live.copy_(bits.view(self.live.shape))
        else:
            self.live.index_copy_(0, self.index, bits)
        return bool(torch.equal(self.read(), bits))


def live_blocks(piece: Piece, flat: torch.Tensor) -> Iterator[LiveBlock]:
    """Yield all of a piece.

    Args:
        piece: where the elements are.
        flat: its storage, flat, as integers.
    """
    if not piece.size:
        return
    if isinstance(piece, Segment):
        yield from _strided(flat, piece.dims, piece.source_offset, piece.target_offset)
        return
    for start in range(0, piece.size, _BLOCK):
        target = torch.from_numpy(np.array(piece.target[start : start + _BLOCK])).to(flat.device)
        yield LiveBlock(np.asarray(piece.source[start : start + _BLOCK]), flat, target)


def _strided(flat: torch.Tensor, dims: Sequence[tuple[int, int, int]], source: int, target: int) -> Iterator[LiveBlock]:
    if not dims:
        yield LiveBlock(np.array([source], np.int64), flat[target : target + 1], None)
        return
    step, size, target_step = dims[0]
    inner = math.prod(size for _, size, _ in dims[1:])
    if inner > _BLOCK:
        for number in range(size):
            yield from _strided(flat, dims[1:], source + number * step, target + number * target_step)
        return
    rows = max(1, _BLOCK // inner)
    for first in range(0, size, rows):
        count = min(rows, size - first)
        block = [(step, count, target_step), *dims[1:]]
        sources, shape, targets = zip(*block, strict=True)
        view = flat.as_strided(shape, targets, target + first * target_step)
        yield LiveBlock(strided_positions(source + first * step, shape, sources).reshape(-1), view, None)
