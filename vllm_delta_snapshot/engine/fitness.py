# SPDX-License-Identifier: Apache-2.0
"""Fitness: can this engine be updated in place? Decided once, at init, by what is there and never by model name.

Three checks. Layers: none is quantized and none computes from a packed copy. Places: every tensor of the checkpoint
has an exact place on some worker. Bits: the live weights at sampled positions are those of the checkpoint, which finds
every layout that the first two do not know (shuffled, transposed, padded, converted, or simply other weights).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.engine.agree import agree, gather_from_workers
from vllm_delta_snapshot.engine.cpu import is_plain_linear
from vllm_delta_snapshot.engine.live import map_patch
from vllm_delta_snapshot.engine.load_plan import LoadPlan, PlanSummary, record_load_plan
from vllm_delta_snapshot.engine.log import logger
from vllm_delta_snapshot.errors import BaseMismatch, TensorRefused
from vllm_delta_snapshot.types import Positions, TensorPatch, TensorSpec, position_dtype

__all__ = ["Fitness", "check_fitness", "check_layers", "check_live_bits", "check_places"]

_SAMPLE_BLOCKS: Final = 16
_SAMPLE_BLOCK: Final = 256


@dataclass(frozen=True, slots=True)
class Fitness:
    """What was found out.

    Attributes:
        plan: where this worker holds the checkpoint's tensors.
        specs: the checkpoint's tensors.
        skipped: the tensors that updates leave out, and why.
    """

    plan: LoadPlan
    specs: Mapping[str, TensorSpec]
    skipped: Mapping[str, str]

    def refreshed(self, model: torch.nn.Module) -> Fitness:
        """Return this with a current plan: recorded again if the model's tensors were re-created since.

        Raises:
            TensorRefused: a layer or tensor that was fit is not any more.
            ApplyError: the model's loader cannot be watched.
        """
        if self.plan.is_current(model):
            return self
        logger.info("parameters were re-created: recording their places again")
        check_layers(model)
        plan = record_load_plan(model, self.specs)
        lost = [name for name in self.plan.segments if self.plan.is_exact(name) and not plan.is_exact(name)]
        if lost:
            raise TensorRefused("tensors lost their exact place when they were re-created", tensor=", ".join(lost[:5]))
        return Fitness(plan, self.specs, self.skipped)


def check_fitness(model: Any, folder: Path, skip: Iterable[str], *, are_weights_as_loaded: bool) -> Fitness:
    """Make all three checks. Collective over the engine's workers; writes no weight.

    Args:
        model: the live `torch.nn.Module`.
        folder: the checkpoint it was loaded from.
        skip: patterns of names that the user declared skippable.
        are_weights_as_loaded: whether the live weights should still be the checkpoint's. After updates they are not;
            then their bits cannot be compared with it, and were when the engine was first initialized.

    Raises:
        TensorRefused: layers or tensors that cannot be updated exactly; named.
        BaseMismatch: the live weights are not the checkpoint's.
        ApplyError: the model's loader cannot be watched, or another worker found one of these.
        ObjectNotFound, CorruptFile, UnsupportedFormat: the checkpoint cannot be read.
    """
    failure: BaseException | None = None
    plan = LoadPlan()
    try:
        check_layers(model)
        checkpoint = Checkpoint(folder)
        plan = record_load_plan(model, checkpoint.specs)
    except BaseException as error:  # noqa: BLE001 - the other workers must not wait for this one
        failure = error
    agree(failure)
    summaries: list[PlanSummary] = gather_from_workers(plan.summary())
    skipped = check_places(summaries, checkpoint.specs, skip)
    for name, reason in skipped.items():
        logger.warning("updates will skip tensor=%s: %s", name, reason)
    compared = check_live_bits(plan, checkpoint) if are_weights_as_loaded else 0
    logger.info("fit for updates in place: tensors=%d elements_compared=%d", len(plan.segments), compared)
    return Fitness(plan, checkpoint.specs, skipped)


def check_layers(model: torch.nn.Module) -> None:
    """Refuse models with quantized or packed layers.

    Raises:
        TensorRefused: some layer's loaded form is not the checkpoint's; names the layers.
    """
    refused = []
    for name, module in model.named_modules():
        reason = _why_not_plain(module)
        if reason:
            refused.append(f"{name} ({reason})")
    if refused:
        more = f" and {len(refused) - 5} more" if len(refused) > 5 else ""
        raise TensorRefused(
            "layers whose loaded form is not the checkpoint's cannot be patched in place",
            tensor=", ".join(refused[:5]) + more,
            hint="Serve the model unquantized.",
        )


def check_places(
    summaries: Sequence[PlanSummary], specs: Mapping[str, TensorSpec], skip: Iterable[str]
) -> dict[str, str]:
    """Check that every tensor has an exact place on at least one worker.

    Args:
        summaries: one of each worker of the engine.
        specs: the tensors of the checkpoint.
        skip: patterns of names that the user declared skippable.

    Returns:
        Why each skipped tensor was skipped, by name.

    Raises:
        TensorRefused: names every tensor that has no place and is not skippable.
    """
    patterns = list(skip)
    refused: dict[str, str] = {}
    skipped: dict[str, str] = {}
    for name, spec in specs.items():
        reason = _why_no_place(spec, summaries)
        if reason is not None:
            target = skipped if any(fnmatchcase(name, pattern) for pattern in patterns) else refused
            target[name] = reason
    if refused:
        listed = "; ".join(f"{name}: {reason}" for name, reason in list(refused.items())[:5])
        more = f"; and {len(refused) - 5} more" if len(refused) > 5 else ""
        raise TensorRefused(
            f"{len(refused)} tensors of the checkpoint have no exact place in this engine",
            tensor=listed + more,
            hint='If the engine rightly has no use for them, name them in init_info: {"skip": ["pattern*"]}.',
        )
    return skipped


def _why_no_place(spec: TensorSpec, summaries: Sequence[PlanSummary]) -> str | None:
    """Return why the workers together have not an exact place for each element; ``None`` if they have."""
    for summary in summaries:
        if spec.name in summary.problems:
            return summary.problems[spec.name]
    # Workers hold equal slices (replicas) or disjoint ones; so the distinct slices add up to the whole.
    boxes = frozenset().union(*(summary.boxes.get(spec.name, frozenset()) for summary in summaries))
    covered = sum(math.prod(shape) for _, shape, _ in boxes)
    if covered == spec.numel:
        return None
    if covered == 0:
        return "the engine does not load it, or converts it on the way"
    return f"the engine copies {covered} of its {spec.numel} elements"


def check_live_bits(plan: LoadPlan, checkpoint: Checkpoint) -> int:
    """Compare live weights with the checkpoint at sampled positions of every tensor on this worker.

    Returns:
        The number of elements compared.

    Raises:
        BaseMismatch: names the first tensor whose live weights are not the checkpoint's.
    """
    compared = 0
    for name, spec in checkpoint.specs.items():
        if not plan.is_exact(name) or spec.numel == 0:
            continue
        positions = _sample(spec)
        patch = TensorPatch(spec, positions, checkpoint.bits(name)[positions])
        mapped = map_patch(plan, patch)
        compared += sum(place.size for place in mapped.places)
        if not mapped.matches():
            raise BaseMismatch(
                "live weights are not those of the checkpoint, so this layer is laid out in another way, or the engine "
                "was loaded from something else",
                file=str(checkpoint.folder),
                tensor=name,
                hint="Start the engine from this checkpoint with load_format=auto; if it was, this layer's backend "
                "re-lays out its weights and cannot be patched in place.",
            )
    return compared


def _sample(spec: TensorSpec) -> Positions:
    """Return positions in blocks spread over a tensor; all of them if it is small."""
    if spec.numel <= _SAMPLE_BLOCKS * _SAMPLE_BLOCK:
        return np.arange(spec.numel, dtype=position_dtype(spec.numel))
    starts = np.linspace(0, spec.numel - _SAMPLE_BLOCK, _SAMPLE_BLOCKS).astype(np.int64)
    positions = (starts[:, None] + np.arange(_SAMPLE_BLOCK)).reshape(-1)
    return np.unique(positions).astype(position_dtype(spec.numel))


def _why_not_plain(module: torch.nn.Module) -> str | None:
    method: Any = getattr(module, "quant_method", None)
    if method is not None and not isinstance(method, _plain_methods()):
        return f"quantization method {type(method).__name__}"
    if not is_plain_linear(module):
        return "computes from a packed copy"
    return None


def _plain_methods() -> tuple[type, ...]:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    # A KV cache method holds scales of the cache, not weights.
    return (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod, BaseKVCacheMethod)
