# SPDX-License-Identifier: Apache-2.0
"""Owners: which rank publishes which shard, so that every element of the checkpoint is published once.

Where ranks hold the same elements (replicas, HSDP, parameters that tensor parallelism leaves alone) one of them
publishes, the one with the least to do. That nothing is left out or doubled is checked by counting and proven by a
digest: the parts of the base checkpoint that the ranks will publish must add up to the whole.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import xxhash

from trainer_hooks.sharded.baseline import ShardBaseline
from trainer_hooks.sharded.source import ShardPlan
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import SourceError
from vllm_delta_snapshot.format.digest import add_digests, format_digest, slice_digest, tensor_digest
from vllm_delta_snapshot.types import TensorSpec

__all__ = ["assign", "claims", "cover_of", "details_of", "explain", "is_covered", "share_digest"]

_LISTED: Final = 50

JSON = Any


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


def assign(claimed: Sequence[JSON], specs: Mapping[str, TensorSpec], base_model: str) -> list[list[int]]:
    """Decide who publishes what.

    Args:
        claimed: the `claims` of every rank.
        specs: the tensors of the base checkpoint.
        base_model: where it is, for messages.

    Returns:
        For each rank the numbers of the shards that it publishes.

    Raises:
        SourceError: the shards of all ranks together are not the base checkpoint; every misfit is named.
    """
    if len({claim["table"] for claim in claimed}) > 1:
        raise SourceError("the ranks were given different base checkpoints", file=base_model)
    _check_names(claimed, specs, base_model)
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
    return [sorted(numbers) for numbers in owned]


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


def _check_names(claimed: Sequence[JSON], specs: Mapping[str, TensorSpec], base_model: str) -> None:
    known = np.zeros(len(specs), np.bool_)
    for claim in claimed:
        known |= np.unpackbits(np.frombuffer(bytes.fromhex(claim["known"]), np.uint8), count=len(specs)).astype(bool)
    misfits = dict.fromkeys(misfit for claim in claimed for misfit in claim["misfits"])
    missing = [name for name, is_known in zip(specs, known, strict=True) if not is_known]
    wrong = [*misfits, *(f"{name} is missing" for name in missing)]
    if wrong:
        raise _misfit("the tensors are not those of the base checkpoint", wrong, base_model)


def _misfit(what: str, wrong: Sequence[str], base_model: str) -> SourceError:
    more = f" and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
    return SourceError(
        what,
        file=base_model,
        found="; ".join(wrong[:_LISTED]) + more,
        hint="Publish by checkpoint names: every tensor of the base, each element from one rank or from equal copies.",
    )
