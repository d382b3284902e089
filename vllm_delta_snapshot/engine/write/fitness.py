# SPDX-License-Identifier: Apache-2.0
"""Fitness: can this engine be updated, and each tensor in which way? Decided once, at init, by what is there.

Never by model name. Layers: what they are (`engine.plan.layers`). Places: every tensor of the checkpoint has an exact
place on some worker (`engine.plan.load_plan`, `index_probe`). Bits: the live weights at sampled positions are those of
the checkpoint, which finds every layout that the first two do not know. Memory: what is written through the plan
is there when read, and can be undone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.engine.agree import agree, gather_from_workers
from vllm_delta_snapshot.engine.log import logger
from vllm_delta_snapshot.engine.plan.belongings import address_of, identities_of
from vllm_delta_snapshot.engine.plan.compiled import refuse_folded_weights
from vllm_delta_snapshot.engine.plan.derived import DerivedPlan, find_derived, find_unexplained
from vllm_delta_snapshot.engine.plan.layers import examine_layers, refuse_layers
from vllm_delta_snapshot.engine.plan.live import gather, scatter
from vllm_delta_snapshot.engine.plan.load_plan import LoadPlan, PlanSummary, record_load_plan, with_probed_places
from vllm_delta_snapshot.engine.plan.moving import refuse_moving
from vllm_delta_snapshot.engine.plan.unread import choose_unread, unread_by_all
from vllm_delta_snapshot.engine.ways import Choice, Way, refuse_tensors, summary_of, table_of
from vllm_delta_snapshot.engine.write.lanes import ready_lanes
from vllm_delta_snapshot.engine.write.reload import ReloadPlan, out_of_reach, prove_reload, watched_loaders
from vllm_delta_snapshot.errors import ApplyError, BaseMismatch, TensorRefused
from vllm_delta_snapshot.host.mapping import map_update
from vllm_delta_snapshot.types import Positions, TensorPatch, TensorSpec, position_dtype

__all__ = ["Fitness", "check_fitness", "check_live_bits", "check_memory", "choose_ways"]

_SAMPLE_BLOCKS: Final = 16
_SAMPLE_BLOCK: Final = 256
_PROBED: Final = 1024


@dataclass(frozen=True, slots=True)
class Fitness:
    """What was found out.

    Attributes:
        plan: where this worker holds the checkpoint's tensors.
        specs: the checkpoint's tensors.
        choices: by name, the way in which each is served.
        reload: the layers of this worker that are reloaded.
        derived: the layers of this worker that compute tensors from weights.
    """

    plan: LoadPlan
    specs: Mapping[str, TensorSpec]
    choices: Mapping[str, Choice] = field(default_factory=dict)
    reload: ReloadPlan = field(default_factory=ReloadPlan)
    derived: DerivedPlan = field(default_factory=DerivedPlan)

    @property
    def skipped(self) -> frozenset[str]:
        """The tensors that updates leave out."""
        return frozenset(name for name, choice in self.choices.items() if choice.way in ("skip", "unread"))

    def refreshed(self, model: torch.nn.Module, config: Any = None) -> Fitness:
        """Return this with a current plan: recorded again if the model's tensors were re-created since.

        Args:
            model: the live model.
            config: vLLM's configuration of the engine.

        Raises:
            TensorRefused: a layer or tensor that was fit is not any more.
            ApplyError: the model's loader cannot be watched.
        """
        if self.plan.is_current(model):
            return self
        logger.info("parameters were re-created: recording their places again")
        plan, reload = _record(model, self.specs)
        derived, refused = find_derived(model, _reached(plan, reload), config, proves=False)
        refuse_layers(refused)
        plan = plan.without(self.skipped)
        exact = [name for name in self.plan.places.pieces if self.plan.is_exact(name)]
        plan = with_probed_places(model, plan, [self.specs[name] for name in exact if not plan.is_exact(name)])
        lost = [name for name in exact if not plan.is_exact(name)]
        if lost:
            raise TensorRefused("tensors lost their exact place when they were re-created", tensor=", ".join(lost[:5]))
        return Fitness(plan, self.specs, self.choices, reload, derived)


def check_fitness(
    model: Any,
    folder: Path,
    skip: Iterable[str],
    *,
    way: Way = "scatter",
    are_weights_as_loaded: bool,
    has_mirror: bool = False,
    config: Any = None,
    refuses: bool = True,
) -> Fitness:
    """Make all checks and choose. Collective over the engine's workers; every weight is afterwards what it was.

    Args:
        model: the live `torch.nn.Module`.
        folder: the checkpoint it was loaded from.
        skip: patterns of names that the user declared skippable.
        way: how plain weights are written.
        are_weights_as_loaded: whether the live weights should still be the checkpoint's. After updates they are not;
            then their bits cannot be compared with it, and were when the engine was first initialized.
        has_mirror: whether there will be a mirror of the checkpoint to reload layers from.
        config: vLLM's configuration of the engine.
        refuses: whether a tensor without a way is an error; else its choice says so.

    Raises:
        TensorRefused: layers or tensors that cannot be updated exactly; named.
        CompatibilityError: compiled code may hold weights of its own.
        BaseMismatch: the live weights are not the checkpoint's.
        ApplyError: the model's loader cannot be watched, or another worker found one of these.
        ObjectNotFound, CorruptFile, UnsupportedFormat: the checkpoint cannot be read.
    """
    skip = list(skip)
    failure: BaseException | None = None
    plan, reload, derived, reloads = LoadPlan(), ReloadPlan(), DerivedPlan(), {}
    try:
        refuse_folded_weights(config)
        refuse_moving(config)
        checkpoint = Checkpoint(folder)
        plan, reload = _record(model, checkpoint.specs)
    except BaseException as error:  # noqa: BLE001 - the other workers must not wait for this one
        failure = error
    agree(failure)  # before what follows, which may have collectives of vLLM's
    try:
        reloads = _reload_reasons(model, plan, reload, checkpoint, has_mirror, are_weights_as_loaded, config)
        reached = _reached(plan, reload)
        derived, refused = find_derived(model, reached, config)
        unexplained = find_unexplained(model, reached, reload.modules, config)
        refused |= {path: why for path, why in unexplained.items() if not any(fnmatchcase(path, p) for p in skip)}
        refuse_layers(refused)
    except BaseException as error:  # noqa: BLE001 - the other workers must not wait for this one
        failure = error
    agree(failure)
    summaries: list[PlanSummary] = gather_from_workers(plan.summary(reloads))
    unread = unread_by_all(summaries)
    rearranged = [
        spec
        for spec in checkpoint.specs.values()
        if spec.name not in unread
        and why_no_place(spec, summaries)
        and not any(spec.name in s.problems or spec.name in s.reloads for s in summaries)
    ]
    if rearranged:
        plan = with_probed_places(model, plan, rearranged)
        summaries = gather_from_workers(plan.summary(reloads))
    choices = choose_ways(summaries, checkpoint.specs, skip, way, choose_unread(unread, checkpoint, config))
    if refuses:
        refuse_tensors(choices)
    plan = plan.without(name for name, choice in choices.items() if choice.way in ("skip", "unread", "refused"))
    compared = 0
    try:
        compared = check_live_bits(plan, checkpoint) if are_weights_as_loaded else 0
        check_memory(plan)
    except BaseException as error:  # noqa: BLE001 - the other workers must not wait for this one
        failure = error
    agree(failure)
    for row in table_of(choices):
        logger.info("way=%s tensors=%d example=%s %s", row[0], row[2], row[3], row[1])
    logger.info("fit for updates: %s elements_compared=%d", summary_of(choices), compared)
    if derived.modules:
        logger.info("computed again after updates: %s", ", ".join(derived.modules))
    return Fitness(plan, checkpoint.specs, choices, reload, derived)


def _reached(plan: LoadPlan, reload: ReloadPlan) -> frozenset[int]:
    """Return where the storages begin that updates write or reload."""
    reloaded = [t for module in reload.modules.values() for t in [*module.parameters(), *module.buffers()]]
    return frozenset(address_of(tensor) for tensor in [*(s.flat for s in plan.storages), *reloaded]) - {0}


def _record(model: Any, specs: Mapping[str, TensorSpec]) -> tuple[LoadPlan, ReloadPlan]:
    layers = examine_layers(model)
    refuse_layers(layers.refused)
    modules = {name: layers.modules[name] for name in layers.quantized}
    reload = ReloadPlan(modules, layers.quantized, others=identities_of(model))
    plan = record_load_plan(
        model,
        specs,
        reasons=layers.reason_of_storages(),
        watching=lambda stand_ins: watched_loaders(reload, stand_ins),
    )
    return plan, reload


def _reload_reasons(
    model: Any,
    plan: LoadPlan,
    reload: ReloadPlan,
    checkpoint: Checkpoint,
    has_mirror: bool,
    are_weights_as_loaded: bool,
    config: Any,
) -> dict[str, str]:
    """Return the layer that each tensor is reloaded with, after proving that it can be; problems go into the plan."""
    reasons = out_of_reach(reload)
    if reload.modules and not has_mirror:
        reasons = dict.fromkeys(reload.modules, "can only be reloaded from a mirror, so it needs a run to follow")
    elif reload.modules and are_weights_as_loaded:
        reasons = prove_reload(model, reload, checkpoint.specs, checkpoint.bits, config)
    problems: Any = plan.problems
    reloads = {}
    for layer, names in reload.tensors.items():
        described = f"{layer} ({reload.methods[layer]})"
        for name in names:
            if layer in reasons:
                problems.setdefault(name, f"{described}: {reasons[layer]}")
            reloads[name] = described
    return reloads


def choose_ways(
    summaries: Sequence[PlanSummary],
    specs: Mapping[str, TensorSpec],
    skip: Iterable[str],
    way: Way,
    unread: Mapping[str, Choice] | None = None,
) -> dict[str, Choice]:
    """Choose for every tensor.

    Args:
        summaries: one of each worker of the engine.
        specs: the tensors of the checkpoint.
        skip: patterns of names that the user declared skippable.
        way: how plain weights are written.
        unread: the choices for tensors that no worker's loader reads.

    Returns:
        The choice for each tensor, by name.
    """
    patterns = list(skip)
    choices: dict[str, Choice] = {}
    for name, spec in specs.items():
        reason = why_no_place(spec, summaries)
        layer = next((summary.reloads[name] for summary in summaries if name in summary.reloads), None)
        is_problem = any(name in summary.problems for summary in summaries)
        if layer is not None and not is_problem:
            choices[name] = Choice("reload", layer)
        elif reason is None:
            choices[name] = Choice(way)
        elif any(fnmatchcase(name, pattern) for pattern in patterns):
            choices[name] = Choice("skip", reason)
        else:
            choices[name] = (unread or {}).get(name, Choice("refused", reason))
    return choices


def why_no_place(spec: TensorSpec, summaries: Sequence[PlanSummary]) -> str | None:
    """Return why the workers together have not an exact place for each element; ``None`` if they have."""
    for summary in summaries:
        if spec.name in summary.problems:
            return summary.problems[spec.name]
    # Workers hold equal slices (replicas) or disjoint ones; so the distinct slices add up to the whole.
    boxes = frozenset().union(*(summary.boxes.get(spec.name, frozenset()) for summary in summaries))
    covered = sum(size for _, size in boxes)
    if covered == spec.numel:
        return None
    if covered == 0:
        return "the engine's loader copies none of it to where it could be patched, but reads it, or puts it aside"
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
        for live in ready_lanes(plan, map_update([patch], plan.places)):
            compared += live.lane.size
            if not live.holds_new():
                raise BaseMismatch(
                    "live weights are not those of the checkpoint, so this layer is laid out in another way, or the "
                    "engine was loaded from something else",
                    file=str(checkpoint.folder),
                    tensor=name,
                    hint="Start the engine from this checkpoint with load_format=auto; if it was, this layer's backend "
                    "re-lays out its weights and cannot be patched in place.",
                )
    return compared


def check_memory(plan: LoadPlan) -> None:
    """Write, read and undo at some positions of every storage, through the plan.

    Raises:
        ApplyError: a storage does not hold what is written to it.
    """
    ends: dict[int, set[int]] = {}
    name_of: dict[int, str] = {}
    for name, piece in plan.places:
        if piece.size:
            name_of.setdefault(piece.storage, name)
            ends.setdefault(piece.storage, set()).update(piece.extent)
    for number, positions in ends.items():
        flat = plan.storages[number].flat
        index = torch.tensor(sorted(positions)[:_PROBED], dtype=torch.int64, device=flat.device)
        old = gather(flat, index)
        try:
            is_written = scatter(flat, index, ~old)
        finally:
            is_old = scatter(flat, index, old)
        if not (is_written and is_old):
            raise ApplyError("live weights do not keep what is written to them", tensor=name_of[number])


def _sample(spec: TensorSpec) -> Positions:
    """Return positions in blocks spread over a tensor; all of them if it is small."""
    if spec.numel <= _SAMPLE_BLOCKS * _SAMPLE_BLOCK:
        return np.arange(spec.numel, dtype=position_dtype(spec.numel))
    starts = np.linspace(0, spec.numel - _SAMPLE_BLOCK, _SAMPLE_BLOCKS).astype(np.int64)
    positions = (starts[:, None] + np.arange(_SAMPLE_BLOCK)).reshape(-1)
    return np.unique(positions).astype(position_dtype(spec.numel))
