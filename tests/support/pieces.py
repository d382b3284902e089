"""Pieces of places from pairs of views, as a recorder would describe them."""

from __future__ import annotations

import numpy as np
import torch

from vllm_delta_snapshot.host.places import Segment, Table


def ramp(*shape: int) -> torch.Tensor:
    """Return a contiguous tensor whose elements are their own positions."""
    return torch.arange(int(np.prod(shape))).reshape(shape)


def segment_of(source: torch.Tensor, target: torch.Tensor, storage: int = 0) -> Segment:
    """Return the segment of a copy from one view to another of the same shape."""
    return Segment(
        storage,
        tuple(source.shape),
        int(source.storage_offset()),
        tuple(source.stride()),
        int(target.storage_offset()),
        tuple(target.stride()),
    )


def table_of(*pairs: tuple[int, int], storage: int = 0) -> Table:
    """Return the table of pairs of positions: of the checkpoint and of the storage."""
    return Table(storage, np.array([p for p, _ in pairs], np.int64), np.array([t for _, t in pairs], np.int64))
