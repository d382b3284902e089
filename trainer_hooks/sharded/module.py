# SPDX-License-Identifier: Apache-2.0
"""A sharded module as a source: its parameters and persistent buffers, as far as this rank holds them.

FSDP2 and any other DTensor, FSDP1, DeepSpeed ZeRO-3 and plain parameters, also mixed in one model. The plan maps each
parameter's flat range to checkpoint names, so a shard's positions follow without gathering anything.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping

from torch import nn

from trainer_hooks.fit import misfit_of
from trainer_hooks.names import Given, Names
from trainer_hooks.sharded.places import Held, Place, fsdp1_places, place_of, reshard
from trainer_hooks.sharded.plan import NamePlan, Range, clean_name
from trainer_hooks.sharded.source import Segment, Shard, ShardPlan, ShardRead
from trainer_hooks.source import unwrap
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
        self._module = unwrap(module)
        self._given = Given(names)
        self._places: list[Place] = []

    def plan(self, specs: Mapping[str, TensorSpec]) -> ShardPlan:
        """See `ShardSource.plan`."""
        reshard(self._module)
        names = NamePlan(_inside(self._module), self._given)
        flat = fsdp1_places(self._module)
        self._places = []
        shards: list[Shard] = []
        published: dict[Hashable, str] = {}
        strangers: list[tuple[str, Hashable]] = []
        known: set[str] = set()
        here = list(_held_by(self._module))
        misfits = [
            f"a name is given for {name}, which the model has not"
            for name in self._given.unknown(held.name for held in here)
        ]
        for held in here:
            place = place_of(held, flat)
            ranges = names.of(held.name, place.shape)
            unknown = [item.name for item in ranges if item.name not in specs]
            strangers += [(name, place.identity) for name in unknown]
            if unknown:
                continue
            published[place.identity] = held.name
            problems = [misfit_of(specs[item.name], item.shape, place.dtype) for item in ranges]
            misfits += [problem for problem in problems if problem]
            misfits += [f"{item.name} comes twice" for item in ranges if item.name in known]
            known.update(item.name for item in ranges)
            if not any(problems) and (shard := _shard(held.name, place, ranges)) is not None:
                shards.append(shard)
                self._places.append(place)
        # A tied weight has a second name that the checkpoint need not have.
        misfits += [
            f"{name} is not in the base checkpoint" for name, identity in strangers if identity not in published
        ]
        return ShardPlan(tuple(shards), frozenset(known), tuple(misfits))

    def read(self, owned: Collection[int]) -> Iterator[ShardRead]:
        """See `ShardSource.read`."""
        reshard(self._module)
        for number in sorted(owned):
            place = self._places[number]
            fingerprint = place.fingerprint() if self._skip_frozen else None
            yield ShardRead(number, place.load, fingerprint, stays=True)


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
