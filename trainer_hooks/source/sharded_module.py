# SPDX-License-Identifier: Apache-2.0
"""A sharded module as a source: its parameters and persistent buffers, as far as this rank holds them.

FSDP2 and any other DTensor, FSDP1, DeepSpeed ZeRO-3 and plain parameters, also mixed in one model. The plan maps each
parameter's flat range to checkpoint names, so a shard's positions follow without gathering anything.

The plan is made once, since all ranks agree on it; what is read is the module as it is. Every pass walks it anew, and
refuses one that has other parameters, held elsewhere, tied or named otherwise than the plan says.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from trainer_hooks.source.fit import misfit_of
from trainer_hooks.source.items import unwrap
from trainer_hooks.source.names import Given, Names
from trainer_hooks.source.places import Held, Place, fsdp1_places, moved, place_of, reshard
from trainer_hooks.source.shard_plan import NamePlan, Range, clean_name
from trainer_hooks.source.shards import Segment, Shard, ShardPlan, ShardRead
from vllm_delta_snapshot.errors import SourceError
from vllm_delta_snapshot.types import TensorSpec

__all__ = ["ShardedModuleSource"]


class ShardedModuleSource:
    """See the module and `ShardSource`.

    Args:
        module: the model, as it is trained.
        names: see `trainer_hooks.ModuleSource`; of parameters without what wrappers put into their names. A function is
            asked about stand-ins without weights, and has to return ranges of consecutive elements of them.
        skip_frozen: see `ShardedPublisher`.
    """

    def __init__(self, module: nn.Module, names: Names | None = None, *, skip_frozen: bool = False) -> None:
        self._skip_frozen = skip_frozen
        self._wrapped = module
        self._given = Given(names)
        self._planned: list[_Planned] = []

    def plan(self, specs: Mapping[str, TensorSpec]) -> ShardPlan:
        """See `ShardSource.plan`."""
        module = unwrap(self._wrapped)
        reshard(module)
        names = NamePlan(_inside(module), self._given)
        flat = fsdp1_places(module)
        self._planned = []
        shards: list[Shard] = []
        published: dict[Hashable, str] = {}
        strangers: list[tuple[str, Hashable]] = []
        known: set[str] = set()
        here = list(_held_by(module))
        misfits = [
            f"a name is given for {name}, which the model has not"
            for name in self._given.unknown(held.name for held in here)
        ]
        for held in here:
            place = place_of(held, flat)
            ranges = names.of(held.name, place.shape)
            planned = _Planned(held.name, place.layout, ranges)
            self._planned.append(planned)
            unknown = [item.name for item in ranges if item.name not in specs]
            strangers += [(name, place.identity) for name in unknown]
            if unknown:
                planned.is_tied = True
                continue
            published[place.identity] = held.name
            problems = [misfit_of(specs[item.name], item.shape, place.dtype) for item in ranges]
            misfits += [problem for problem in problems if problem]
            misfits += [f"{item.name} comes twice" for item in ranges if item.name in known]
            known.update(item.name for item in ranges)
            if not any(problems) and (shard := _shard(held.name, place, ranges)) is not None:
                planned.number = len(shards)
                shards.append(shard)
        # A tied weight has a second name that the checkpoint need not have.
        misfits += [
            f"{name} is not in the base checkpoint" for name, identity in strangers if identity not in published
        ]
        return ShardPlan(tuple(shards), frozenset(known), tuple(misfits))

    def read(self, owned: Collection[int]) -> Iterator[ShardRead]:
        """See `ShardSource.read`."""
        module = unwrap(self._wrapped)
        reshard(module)
        flat = fsdp1_places(module)
        here = {held.name: held for held in _held_by(module)}
        _check_same_names([planned.name for planned in self._planned], here)
        places = {name: place_of(held, flat) for name, held in here.items()}
        self._check_as_planned(places, NamePlan(_inside(module), self._given))
        for planned in self._planned:
            place = places[planned.name]
            if planned.number is not None and planned.number in owned:
                fingerprint = place.fingerprint() if self._skip_frozen else None
                yield ShardRead(planned.number, place.load, fingerprint, stays=True)

    def _check_as_planned(self, places: Mapping[str, Place], names: NamePlan) -> None:
        published = {places[planned.name].identity for planned in self._planned if not planned.is_tied}
        for planned in self._planned:
            place = places[planned.name]
            if place.layout != planned.layout:
                raise moved(planned.name, _said(planned.layout), _said(place.layout))
            if planned.is_tied and place.identity not in published:
                raise SourceError(
                    "the parameter was tied to another one when the publisher was started, and is no longer",
                    tensor=planned.name,
                    hint="The base checkpoint has no such tensor, so it cannot be published: keep it tied.",
                )
            ranges = names.said(planned.name, place.shape)
            if ranges is not None and ranges != planned.ranges:
                raise SourceError(
                    "names says something else of the parameter than when the publisher was started",
                    tensor=planned.name,
                    expected=_listed(planned.ranges),
                    found=_listed(ranges),
                    hint="Start a new publisher; it continues the run.",
                )


@dataclass(slots=True)
class _Planned:
    """A parameter or buffer in the plan.

    Attributes:
        name: its clean name.
        layout: see `Place.layout`.
        ranges: what it becomes in the checkpoint.
        is_tied: whether it is but a second name of another one.
        number: of its shard, if this rank has some of it.
    """

    name: str
    layout: tuple[object, ...]
    ranges: tuple[Range, ...]
    is_tied: bool = False
    number: int | None = None


def _check_same_names(planned: Collection[str], found: Collection[str]) -> None:
    gone, new = (sorted(set(one).difference(other)) for one, other in ((planned, found), (found, planned)))
    if gone or new:
        raise SourceError(
            "the model has other parameters than when the publisher was started",
            tensor=", ".join([*gone, *new][:5]),
            expected=f"{len(planned)} parameters and buffers",
            found=f"{len(gone)} of them gone, {len(new)} new",
            hint="Start a new publisher after a change of the model; it continues the run.",
        )


def _said(layout: Sequence[object]) -> str:
    return ", ".join(map(str, layout))


def _listed(ranges: Sequence[Range]) -> str:
    return ", ".join(f"{of.name} {list(of.shape)} from {of.start}" for of in ranges[:5]) or "not in the checkpoint"


def _held_by(root: nn.Module) -> Iterator[Held]:
    for prefix, module in root.named_modules(remove_duplicate=False):
        persistent = (name for name in module._buffers if name not in module._non_persistent_buffers_set)
        for attribute in (*module._parameters, *persistent):
            if getattr(module, attribute, None) is not None:
                yield Held(module, attribute, clean_name(f"{prefix}.{attribute}" if prefix else attribute))


def _shard(name: str, place: Place, ranges: tuple[Range, ...]) -> Shard | None:
    runs = place.runs()
    if not ranges or not runs.size:
        return None
    segments = []
    for item in ranges:
        cut = runs.cut(item.start, item.stop)
        if cut.runs.size:
            segments.append(Segment(item.name, cut.first, cut.runs))
    # Also without segments, if a rank has only what is not in the checkpoint: it counts for the whole.
    return Shard(name, math.prod(place.shape), runs, tuple(segments))


def _inside(module: nn.Module) -> nn.Module:
    while type(module).__name__ == "FullyShardedDataParallel":
        inner = module.module
        assert isinstance(inner, nn.Module)  # noqa: S101 - as FSDP has it
        module = inner
    return module
