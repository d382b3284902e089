# SPDX-License-Identifier: Apache-2.0
"""The load plan: where each checkpoint element lies in this worker, recorded by watching the model's own loader.

So name mapping, fusing, slicing and padding are the model's own, whatever the model, and no weight changes while
recording. Invariant: a tensor has a place here only if each of its elements that this worker holds is one copy,
unchanged or converted by its type alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_delta_snapshot.engine.bits import keeps_bits, torch_dtype_of
from vllm_delta_snapshot.engine.plan.index_probe import probe_index
from vllm_delta_snapshot.engine.plan.recorder import LiveStorage, LiveStorages, Recorder, StandIns, tensors_of
from vllm_delta_snapshot.errors import ApplyError
from vllm_delta_snapshot.host.places import Box, PlaceMap
from vllm_delta_snapshot.types import TensorSpec

__all__ = ["Fingerprint", "LoadPlan", "PlanSummary", "fingerprint_of", "record_load_plan"]

Fingerprint = tuple[tuple[str, int, torch.Size, tuple[int, ...], torch.dtype], ...]
"""Where a model's tensors lie: name, address, shape, stride, type."""


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """A worker's plan without the places, to tell other workers.

    Attributes:
        boxes: by checkpoint name, which elements have an exact place there, and how many they are.
        problems: why a tensor has none.
        reloads: by checkpoint name, the layer that is reloaded when the tensor changes.
        unread: what the loader never read there.
    """

    boxes: Mapping[str, frozenset[tuple[Box, int]]]
    problems: Mapping[str, str]
    reloads: Mapping[str, str] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Where every checkpoint tensor goes in this worker.

    Attributes:
        places: by checkpoint name; a tensor without any is not on this worker.
        storages: the live storages that the places number.
        problems: by checkpoint name, why a tensor has no exact place.
        fingerprint: where the model's tensors lay when this was recorded.
        unread: by checkpoint name, what the loader was given and never read.
    """

    places: PlaceMap = field(default_factory=lambda: PlaceMap({}))
    storages: Sequence[LiveStorage] = ()
    problems: Mapping[str, str] = field(default_factory=dict)
    fingerprint: Fingerprint = ()
    unread: frozenset[str] = frozenset()

    def is_current(self, model: torch.nn.Module) -> bool:
        """Say whether the model's tensors still lie where they lay; else the places point into dead memory."""
        return self.fingerprint == fingerprint_of(model)

    def is_exact(self, name: str) -> bool:
        """Say whether a tensor is on this worker, and every element has its place."""
        return bool(self.places.pieces.get(name)) and name not in self.problems

    def loses_bits(self, specs: Mapping[str, TensorSpec]) -> bool:
        """Say whether some tensor is kept in a type from which the checkpoint's bits cannot be had back."""
        return any(
            not keeps_bits(torch_dtype_of(specs[name].element.torch_name), self.storages[piece.storage].dtype)
            for name, piece in self.places
            if name in specs
        )

    def without(self, names: Iterable[str]) -> LoadPlan:
        """Return a plan in which these tensors have no places."""
        left_out = frozenset(names)
        pieces = {name: pieces for name, pieces in self.places.pieces.items() if name not in left_out}
        return LoadPlan(PlaceMap(pieces), self.storages, self.problems, self.fingerprint, self.unread)

    def summary(self, reloads: Mapping[str, str] | None = None) -> PlanSummary:
        """Return the plan without places, to tell other workers.

        Args:
            reloads: see `PlanSummary`.
        """
        boxes = {
            name: frozenset((piece.box, piece.size) for piece in pieces)
            for name, pieces in self.places.pieces.items()
            if self.is_exact(name)
        }
        return PlanSummary(boxes, dict(self.problems), dict(reloads or {}), self.unread)


def fingerprint_of(model: torch.nn.Module) -> Fingerprint:
    """Return where a model's tensors lie. Cheap: no tensor is read."""
    return tuple((name, t.data_ptr(), t.shape, tuple(t.stride()), t.dtype) for name, t in tensors_of(model))


def record_load_plan(
    model: Any,
    specs: Mapping[str, TensorSpec],
    *,
    reasons: Mapping[int, str] | None = None,
    watching: Any = None,
) -> LoadPlan:
    """Run the model's loader over stand-ins for every tensor of the checkpoint. Changes no weight.

    Args:
        model: the live `torch.nn.Module`; its `load_weights` takes pairs of checkpoint name and tensor.
        specs: the tensors of the checkpoint.
        reasons: by address of a storage, why its content is not the checkpoint's (see `Layers`).
        watching: called with the stand-ins; a context in which the loader runs (see `engine.write.reload`).

    Raises:
        ApplyError: the loader fails on stand-ins, or rebinds parameters instead of writing into them.
    """
    stand_ins = StandIns(specs.values())
    live = LiveStorages(model, reasons or {})
    recorder = Recorder(stand_ins, live)
    fingerprint = fingerprint_of(model)
    context: AbstractContextManager[None] = nullcontext() if watching is None else watching(stand_ins)
    before = {name: tensor.data for name, tensor in tensors_of(model)}
    try:
        with torch.no_grad(), context, recorder:
            model.load_weights(iter(stand_ins.tensors.items()))
    except Exception as error:
        raise ApplyError(
            "the model's loader fails on a dry run, so its weights cannot be patched",
            found=f"{type(error).__name__}: {error}",
        ) from error
    finally:
        rebound = _put_back(model, before)
    if rebound:
        raise ApplyError(
            "the model's loader replaces parameters instead of writing into them",
            tensor=", ".join(rebound[:5]),
            hint="This model cannot be updated in place.",
        )
    exact = {name: pieces for name, pieces in recorder.pieces.items() if name not in recorder.problems}
    unread = stand_ins.unread(name for name in specs if not recorder.concerns(name))
    return LoadPlan(PlaceMap(exact), live.storages, recorder.problems, fingerprint, unread)


def with_probed_places(model: Any, plan: LoadPlan, specs: Iterable[TensorSpec]) -> LoadPlan:
    """Return a plan that also knows tensors which the loader rearranges before it copies. Changes no weight.

    Args:
        model: the live model.
        plan: what is known.
        specs: the tensors to find.
    """
    live = LiveStorages(model, {})
    live.adopt(plan.storages)
    pieces = dict(plan.places.pieces)
    problems = dict(plan.problems)
    for spec in specs:
        found = probe_index(model, spec, live)
        if isinstance(found, str):
            problems[spec.name] = found
            pieces.pop(spec.name, None)
        elif found:
            pieces[spec.name] = found
    return LoadPlan(PlaceMap(pieces), live.storages, problems, plan.fingerprint, plan.unread)


def _put_back(model: torch.nn.Module, before: Mapping[str, torch.Tensor]) -> list[str]:
    rebound = []
    for name, tensor in tensors_of(model):
        old = before.get(name)
        if old is not None and (old.data_ptr(), old.shape) != (tensor.data_ptr(), tensor.shape):
            tensor.data = old
            rebound.append(name)
    return rebound
