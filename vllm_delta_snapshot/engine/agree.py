# SPDX-License-Identifier: Apache-2.0
"""Agreement of an engine's workers: all go on, or none does.

Every worker reaches every vote, with its error or without; so no worker is left waiting, and none commits alone.
"""

from __future__ import annotations

from typing import Any

from vllm_delta_snapshot.errors import ApplyError, DeltaSnapshotError, error_of_fields

__all__ = ["agree", "gather_from_workers"]


def agree(error: BaseException | None, state: object = None) -> None:
    """Vote. Collective over the engine's workers; blocks until all have voted.

    Args:
        error: why this worker cannot go on; ``None`` if it can.
        state: what must be the same on all workers.

    Raises:
        BaseException: `error`, on the worker that has one.
        DeltaSnapshotError: the error of the first worker that has one, on the others.
        ApplyError: states differ; names the workers.
    """
    votes = gather_from_workers((None if error is None else _fields_of(error), state))
    if error is not None:
        raise error
    for rank, (fields, _) in enumerate(votes):
        if fields is not None:
            raise error_of_fields(fields | {"what": f"worker {rank}: {fields['what']}"})
    if any(other != state for _, other in votes):
        raise ApplyError(
            "the workers of this engine are not in the same state",
            found="; ".join(f"worker {rank}: {other}" for rank, (_, other) in enumerate(votes)),
            hint="Restart the engine; it catches up by itself.",
        )


def _fields_of(error: BaseException) -> dict[str, str | None]:
    if isinstance(error, DeltaSnapshotError):
        return error.to_fields()
    return ApplyError(f"{type(error).__name__}: {error}").to_fields()


def gather_from_workers(value: Any) -> list[Any]:
    """Return every worker's value, in order of rank. Collective; a single worker returns at once."""
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    if group.world_size == 1:
        return [value]
    import torch.distributed

    values: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values
