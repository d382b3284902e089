"""Processes that publish, and how much memory that took at most."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.checkpoints import write_checkpoint
from trainer_hooks import PartialTensor, ShardedPublisher

SHAPE = (6000, 4096)
SHARD_BYTES = SHAPE[0] * SHAPE[1] * 2 // 2
"""Of two ranks, in bf16."""


def measured(folder: Path) -> dict[str, Any]:
    """Publish a change of a 100th of the elements; return the peak of what Python and numpy held, in bytes."""
    rank = dist.get_rank()
    if rank == 0:
        write_checkpoint(folder / "base", {"w": torch.zeros(SHAPE, dtype=torch.bfloat16)})
    dist.barrier()
    mine = torch.zeros((SHAPE[0] // 2, SHAPE[1]), dtype=torch.float32)

    def export() -> Iterator[PartialTensor]:
        yield PartialTensor("w", mine, (rank * SHAPE[0] // 2, 0))

    tracemalloc.start()
    publisher = ShardedPublisher(
        export, sync_dir=str(folder / "run"), base=folder / "base", threads=1, timeout_s=60, asynchronous=False
    )
    mine.view(-1)[rank::100] = 1.0
    changed = publisher.publish().report.changed_elements
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {"changed": changed, "peak": peak}
