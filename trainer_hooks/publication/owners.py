# SPDX-License-Identifier: Apache-2.0
"""Owners: which rank publishes which shard, so that every element of the checkpoint is published once.

Where ranks hold the same elements (replicas, HSDP, parameters that tensor parallelism leaves alone) one of them
publishes, the one with the least to do. That nothing is left out or doubled is checked by counting and proven by a
digest: the parts of the base checkpoint that the ranks will publish must add up to the whole.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import xxhash

from trainer_hooks.compare.shard_baseline import ShardBaseline
from trainer_hooks.source.shards import ShardPlan
from trainer_hooks.source.unsourced import Unsourced
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.checkpoint.tied import Tie
from vllm_delta_snapshot.errors import SourceError
from vllm_delta_snapshot.format.digest import add_digests, format_digest, slice_digest, tensor_digest
from vllm_delta_snapshot.types import TensorSpec

__all__ = [
    "Share",
    "assign",
    "claims",
    "cover_of",
    "details_of",
    "explain",
    "is_covered",
    "known_of",
    "share_digest",
    "twin_digests",
]

_LISTED: Final = 50
_HINT: Final = "Publish by checkpoint names: every tensor of the base, each element from one rank or from equal copies."

JSON = Any


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank accounts for.

    Attributes:
        numbers: the shards that it publishes.
        kept: the tensors without a source whose bits it keeps.
    """

    numbers: list[int]
    kept: list[str]


def claims(plan: ShardPlan, specs: Mapping[str, TensorSpec]) -> JSON:
    """Return what a rank tells of its plan: small, whatever the model's size."""
    known = np.array([name in plan.names for name in specs], np.bool_)
    table = "\n".join(f"{name} {spec}" for name, spec in specs.items())
    return {
        "shards": [[shard.key, shard.runs.identity, shard.runs.size, shard.numel] for shard in plan.shards],
        "known": np.packbits(known).tobytes().hex(),
        "misfits": list(plan.misfits),
        "table": xxhash.xxh3_64_hexdigest(table.encode()),
    }


def known_of(claimed: Sequence[JSON], specs: Mapping[str, TensorSpec]) -> set[str]:
    """Return the tensors that some rank knows of; see `assign`."""
    known = np.zeros(len(specs), np.bool_)
    for claim in claimed:
        bits = np.frombuffer(bytes.fromhex(claim["known"]), np.uint8)
        known |= np.unpackbits(bits, count=len(specs)).astype(np.bool_)
    return {name for name, is_known in zip(specs, known, strict=True) if is_known}


def assign(
    claimed: Sequence[JSON],
    specs: Mapping[str, TensorSpec],
    base_model: str,
    find: Callable[[set[str]], Unsourced],
) -> tuple[list[Share], Unsourced]:
    """Decide who publishes what.

    Args:
        claimed: the `claims` of every rank.
        specs: the tensors of the base checkpoint.
        base_model: where it is, for messages.
        find: says what becomes of the tensors that no rank knows of, given those that some rank does.

    Returns:
        For each rank what it accounts for; and what becomes of the tensors that no rank knows of.

    Raises:
        SourceError: the shards of all ranks together are not the base checkpoint; every misfit is named.
    """
    if len({claim["table"] for claim in claimed}) > 1:
        raise SourceError("the ranks were given different base checkpoints", file=base_model)
    unsourced = find(known_of(claimed, specs))
    _check_names(claimed, unsourced, base_model)
    holders: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    covered: Counter[str] = Counter()
    numels: dict[str, int] = {}
    sizes: dict[tuple[str, str], int] = {}
    for rank, claim in enumerate(claimed):
        for number, (key, identity, size, numel) in enumerate(claim["shards"]):
            if (key, identity) not in holders:
                covered[key] += size
            holders[key, identity].append((rank, number))
            sizes[key, identity] = size
            numels[key] = numel
    wrong = [f"{key}: {covered[key]} of {numel} elements" for key, numel in numels.items() if covered[key] != numel]
    if wrong:
        raise _misfit("the shards of all ranks do not make up whole tensors", wrong, base_model)
    owned: list[list[int]] = [[] for _ in claimed]
    load = [0] * len(claimed)
    # Those that only one can publish first, then by size: what is left is spread.
    for shard in sorted(holders, key=lambda shard: (len(holders[shard]) > 1, -sizes[shard])):
        rank, number = min(holders[shard], key=lambda holder: (load[holder[0]], holder[0]))
        owned[rank].append(number)
        load[rank] += sizes[shard]
    kept: list[list[str]] = [[] for _ in claimed]
    for name in sorted(unsourced.kept, key=lambda name: -specs[name].numel):
        rank = load.index(min(load))
        kept[rank].append(name)
        load[rank] += specs[name].numel
    return [Share(sorted(numbers), names) for numbers, names in zip(owned, kept, strict=True)], unsourced


def share_digest(base: Checkpoint, rank: int, size: int) -> int:
    """Return the digest of this rank's share of the checkpoint, cut evenly whatever the shards. Reads it.

    The shares of all ranks add up to the state digest, so nobody reads the whole.
    """
    start, stop = base.total_elements * rank // size, base.total_elements * (rank + 1) // size
    digest = at = 0
    for spec in base.specs.values():
        first, last = max(start, at), min(stop, at + spec.numel)
        if first < last:
            digest = add_digests(digest, slice_digest(spec, first - at, base.bits(spec.name)[first - at : last - at]))
        at += spec.numel
    return digest


def cover_of(baseline: ShardBaseline, share: int) -> JSON:
    """Return what a rank tells of its baseline: its part of the digest twice, as it will publish it and as cut."""
    return {"elements": baseline.elements, "digest": baseline.digest(), "share": share}


def twin_digests(baseline: ShardBaseline, tie: Tie | None) -> list[int]:
    """Return this rank's part of the digests of two tied weights, as if both had one name."""
    if tie is None:
        return []
    digests = dict.fromkeys(tie.names, 0)
    for held in baseline:
        if (name := held.spec.name) in digests:
            alike = replace(held, spec=replace(held.spec, name=tie.embedding))
            digests[name] = add_digests(digests[name], alike.digest())
    return list(digests.values())


def is_covered(covers: Sequence[JSON], base: Checkpoint) -> tuple[bool, str]:
    """Say whether the ranks' baselines are the base, every element once; and return its state digest."""
    digest = add_digests(*(cover["share"] for cover in covers))
    is_whole = sum(cover["elements"] for cover in covers) == base.total_elements
    return is_whole and add_digests(*(cover["digest"] for cover in covers)) == digest, format_digest(digest)


def details_of(baseline: ShardBaseline) -> JSON:
    """Return what a rank tells of every tensor when they do not add up."""
    return [[held.spec.name, held.bits.size, held.digest()] for held in baseline]


def explain(details: Sequence[JSON], base: Checkpoint) -> SourceError:
    """Return the error for baselines that do not add up. Reads the whole checkpoint."""
    elements: Counter[str] = Counter()
    digests: Counter[str] = Counter()
    for of_rank in details:
        for name, size, digest in of_rank:
            elements[name] += size
            digests[name] += digest
    wrong = []
    for name, spec in base.specs.items():
        if elements[name] != spec.numel:
            wrong.append(f"{name}: {elements[name]} of {spec.numel} elements")
        elif add_digests(digests[name]) != tensor_digest(spec, base.bits(name)):
            wrong.append(f"{name}: some elements twice, others never")
    return _misfit("the shards of all ranks overlap or leave elements out", wrong, str(base.folder))


def _check_names(claimed: Sequence[JSON], unsourced: Unsourced, base_model: str) -> None:
    misfits = dict.fromkeys(misfit for claim in claimed for misfit in claim["misfits"])
    wrong = [*misfits, *unsourced.refused]
    if wrong:
        # Where names do not fit at all, it is not that tensors need not be there.
        hint = _HINT if misfits else unsourced.hint
        raise _misfit("the tensors are not those of the base checkpoint", wrong, base_model, hint)


def _misfit(what: str, wrong: Sequence[str], base_model: str, hint: str = _HINT) -> SourceError:
    more = f" and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
    return SourceError(
        what,
        file=base_model,
        found="; ".join(wrong[:_LISTED]) + more,
        hint=hint,
    )
