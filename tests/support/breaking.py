"""Make writing fail in the workers, half-way or by one of the two ways; run in them by `collective_rpc`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def break_writing(worker: Any, rank: int, count: int) -> None:
    """On the worker of this rank, have every update break off after `count` storages, half of the next one written.

    An update of fewer storages is not broken off, nor are those of other workers.
    """
    from vllm_delta_snapshot.engine.write import transaction
    from vllm_delta_snapshot.engine.write.apply import apply
    from vllm_delta_snapshot.engine.write.lanes import LiveLane, write_lanes

    def broken(model: Any, lanes: Sequence[LiveLane], *rest: Any) -> None:
        if count >= len(lanes):
            apply(model, lanes, *rest)
            return
        write_lanes(lanes[:count])
        lanes[count].flat[lanes[count].index[::2]] = lanes[count].new[::2]
        raise RuntimeError("interrupted")

    transaction.apply = broken if worker.rank == rank else apply


def refuse_scattering(worker: Any) -> None:
    """Have every update fail that scatters a storage: what goes through was written by vLLM's loader alone."""
    from vllm_delta_snapshot.engine.write import apply
    from vllm_delta_snapshot.engine.write.lanes import LiveLane

    def refused(lanes: Sequence[LiveLane]) -> list[bool]:
        if lanes:
            raise RuntimeError(f"{len(lanes)} storages would be scattered")
        return []

    apply.write_lanes = refused
