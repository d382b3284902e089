# SPDX-License-Identifier: Apache-2.0
"""Repair: an engine whose weights something else has changed gets those of its version again, whole, from the mirror.

The way out where no delta can help: differences are never added to values that are not the published ones, and
absolute values would mend only the positions that they touch. What differs is found by the full check, written over
whole, what layers compute from weights is computed again, and all is checked again. Nothing is
written where vLLM moves weights by itself (EPLB): the first layout would contradict the routing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_delta_snapshot.engine.agree import agree
from vllm_delta_snapshot.engine.plan.live_blocks import live_blocks
from vllm_delta_snapshot.engine.write.fitness import Fitness
from vllm_delta_snapshot.engine.write.full_check import find_wrong
from vllm_delta_snapshot.engine.write.lanes import in_live_type
from vllm_delta_snapshot.engine.write.reload import BitsOf, reload_layers
from vllm_delta_snapshot.errors import ApplyError, WeightsUncertain

__all__ = ["repair"]


def repair(model: Any, fitness: Fitness, expected: Mapping[str, str], *, bits: BitsOf, config: Any) -> list[str]:
    """Write over what differs from a version. Collective over the engine's workers; generation must stand still.

    Tensors that cannot be compared, because the engine keeps them in a type that loses bits, are written over too.

    Args:
        model: the live model.
        fitness: where its weights are.
        expected: by checkpoint name, the digest of the whole tensor at the version.
        bits: the checkpoint at that version.
        config: vLLM's configuration of the engine.

    Returns:
        What was wrong, on all workers, as text.

    Raises:
        WeightsUncertain: afterwards weights still differ, or writing failed on this worker or another.
        DeltaSnapshotError: this worker or another could not look; nothing was written.
    """
    wrong = find_wrong(model, fitness, expected, bits=bits, config=config)
    failure: BaseException | None = None
    try:
        for name in (*wrong.tensors, *wrong.unknown):
            _write_whole(fitness, name, bits)
        reloaded = [layer for layer in wrong.layers if layer in fitness.reload.modules]
        if reloaded:
            reload_layers(model, fitness.reload, reloaded, fitness.specs, bits, config)
        fitness.derived.recompute(fitness.derived.modules, config)
    except BaseException as error:  # noqa: BLE001 - the other workers must not wait for this one
        failure = error
    try:
        agree(failure)
        left = find_wrong(model, fitness, expected, bits=bits, config=config).reasons
    except Exception as error:
        raise WeightsUncertain("a repair failed half-way", found=error, hint="Restart this engine.") from error
    if left:
        raise WeightsUncertain(
            "weights still differ after a repair", tensor="; ".join(left[:5]), hint="Restart this engine."
        )
    return wrong.reasons


def _write_whole(fitness: Fitness, name: str, bits: BitsOf) -> None:
    """Write every element of a tensor that this worker holds."""
    spec = fitness.specs[name]
    content = bits(name)
    for piece in fitness.plan.places.pieces.get(name, ()):
        storage = fitness.plan.storages[piece.storage]
        for block in live_blocks(piece, storage.flat):
            values = in_live_type(content[block.positions], spec.dtype, storage.dtype, storage.flat.device)
            if not block.write(values):
                raise ApplyError("a weight does not hold what was written", tensor=name)
