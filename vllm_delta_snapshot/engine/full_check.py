# SPDX-License-Identifier: Apache-2.0
"""Compare every live weight of an engine with a version of its run, tensor by tensor, over all workers.

The stager knows the digest of each tensor at every version: that of the checkpoint, moved by each delta. So plain
weights are digested where they lie, in blocks, and no second copy of the model is needed. Layers that are reloaded
are compared with what a reload from the mirror makes of them, one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from vllm_delta_snapshot.engine.agree import agree, gather_from_workers
from vllm_delta_snapshot.engine.bits import bits_of
from vllm_delta_snapshot.engine.fitness import Fitness
from vllm_delta_snapshot.engine.lanes import RunDigest, in_checkpoint_type
from vllm_delta_snapshot.engine.load_plan import LoadPlan
from vllm_delta_snapshot.engine.reload import BitsOf, prove_reload
from vllm_delta_snapshot.engine.threads import run_each
from vllm_delta_snapshot.engine.verify import sum_over_workers
from vllm_delta_snapshot.errors import VerifyError
from vllm_delta_snapshot.format.digest import add_digests, format_digest, patch_digest
from vllm_delta_snapshot.stage.places import Index, Piece, Segment, strided_positions
from vllm_delta_snapshot.types import TensorSpec

__all__ = ["check_all", "digest_live"]

_BLOCK: Final = 1 << 16
_SHOWN: Final = 5


def check_all(
    model: Any, fitness: Fitness, expected: Mapping[str, str], *, version: int, bits: BitsOf | None, config: Any
) -> int:
    """Compare all live weights. Collective over the engine's workers; blocks, in time with the model's size.

    Args:
        model: the live model.
        fitness: where its weights are.
        expected: by checkpoint name, the digest of the whole tensor at the version.
        version: for the message.
        bits: the checkpoint at that version, for layers that are reloaded.
        config: vLLM's configuration of the engine.

    Returns:
        How many tensors cannot be compared, because the engine keeps them in a type that loses bits.

    Raises:
        VerifyError: weights differ; names the tensors and layers.
        DeltaSnapshotError: another worker could not look.
    """
    failure: BaseException | None = None
    digests: Sequence[RunDigest] = ()
    layers: Mapping[str, str] = {}
    try:
        digests = digest_live(fitness.plan, fitness.specs)
        if fitness.reload.modules and bits is not None:
            layers = prove_reload(model, fitness.reload, fitness.specs, bits, config)
    except BaseException as error:  # noqa: BLE001 - the other workers must not wait for this one
        failure = error
    agree(failure)
    found = sum_over_workers(gather_from_workers(digests))
    wrong = []
    unknown = 0
    for name, choice in fitness.choices.items():
        if choice.way not in ("scatter", "loader"):
            continue
        total = found.get(name, 0)
        if total is None:
            unknown += 1
        elif format_digest(total) != expected[name]:
            wrong.append(f"{name}: digest {expected[name]} expected, {format_digest(total)} found")
    for rank, of_worker in enumerate(gather_from_workers(dict(layers))):
        wrong += [f"{layer} on worker {rank}: {reason}" for layer, reason in of_worker.items()]
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise VerifyError(
            f"live weights are not those of version {version}: {len(wrong)} of {len(fitness.choices)} differ",
            tensor="; ".join(wrong[:_SHOWN]) + more,
            hint="Restart the engine; it catches up by itself.",
        )
    return unknown


def digest_live(plan: LoadPlan, specs: Mapping[str, TensorSpec]) -> list[RunDigest]:
    """Return the digest of every piece that this worker holds, in the checkpoint's type."""

    def digest(item: tuple[str, Piece]) -> RunDigest:
        name, piece = item
        spec = specs[name]
        storage = plan.storages[piece.storage]
        total = 0
        for positions, values in _blocks(piece, storage.flat):
            bits = in_checkpoint_type(values, spec.dtype, storage.dtype)
            if bits is None:
                return name, piece.box, None
            total = add_digests(total, patch_digest(spec, positions, bits_of(bits)))
        return name, piece.box, total

    return run_each(digest, [item for item in plan.places if item[1].size and item[0] not in plan.problems])


def _blocks(piece: Piece, flat: torch.Tensor) -> Iterator[tuple[Index, torch.Tensor]]:
    """Yield positions in the checkpoint tensor and the live values there, a cacheful at a time."""
    if isinstance(piece, Segment):
        yield from _strided(flat, piece.dims, piece.source_offset, piece.target_offset)
        return
    for start in range(0, piece.size, _BLOCK):
        target = torch.from_numpy(np.array(piece.target[start : start + _BLOCK])).to(flat.device)
        yield np.asarray(piece.source[start : start + _BLOCK]), flat.index_select(0, target)


def _strided(
    flat: torch.Tensor, dims: Sequence[tuple[int, int, int]], source: int, target: int
) -> Iterator[tuple[Index, torch.Tensor]]:
    if not dims:
        yield np.array([source], np.int64), flat[target : target + 1]
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
        yield strided_positions(source + first * step, shape, sources).reshape(-1), view.reshape(-1)
