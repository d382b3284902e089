# SPDX-License-Identifier: Apache-2.0
"""Opening: from sources and a base checkpoint to baselines at the run's newest version, over all ranks.

Four rounds, each of which may fail for all: who publishes what; whether that is the base, every element once; which run
this is; and whether the baselines, brought to its newest version, have the state that it claims. Any number of ranks
may continue what any other number began: each rebuilds its own elements from the base and the chain.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from trainer_hooks.compare.pinned import HostMemory
from trainer_hooks.compare.shard_baseline import ShardBaseline
from trainer_hooks.publication.owners import (
    assign,
    claims,
    cover_of,
    details_of,
    explain,
    is_covered,
    share_digest,
    twin_digests,
)
from trainer_hooks.publication.resume import find_run, policy_of
from trainer_hooks.ranks import JSON, Ranks
from trainer_hooks.source.shards import Shard, ShardSource, completed
from trainer_hooks.source.unsourced import Unsourced, check_kept, find_unsourced, unguarded
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import BrokenChain, VerifyError
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.digest import add_digests, format_digest
from vllm_delta_snapshot.runs.replay import opened_start, plan_run, streamed_version
from vllm_delta_snapshot.runs.run_folder import RunFolder

__all__ = ["Opened", "bring", "open_sharded"]


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """What a publisher starts from.

    Attributes:
        run_id: the run.
        policy: the encodings to publish in.
        version: the run's newest version.
        state_digest: the state digest there.
        shards: all that this rank holds, by their numbers in its plan.
        owned: those that it publishes, or keeps.
        kept: of these, those that it keeps: the source has them not.
        baseline: their elements at that version.
        unsourced: what becomes of all tensors that no source has.
    """

    run_id: str
    policy: str
    version: int
    state_digest: str
    shards: Sequence[Shard]
    owned: Mapping[int, Shard]
    kept: frozenset[int]
    baseline: ShardBaseline
    unsourced: Unsourced


def open_sharded(
    ranks: Ranks,
    source: ShardSource,
    base: Checkpoint,
    folder: RunFolder,
    encoding: str | None,
    patterns: Collection[str] = (),
    memory: HostMemory | None = None,
) -> Opened:
    """Start a run, or continue one. Collective; blocks; reads the base and every delta, a part on each rank.

    Args:
        ranks: who they are.
        source: this rank's weights.
        base: the base checkpoint.
        folder: where the run is or will be.
        encoding: what the user gave.
        patterns: which tensors no source need have (`trainer_hooks.source.unsourced`); rank 0's count.
        memory: where the baseline will lie; by default plain memory.

    Raises:
        SourceError: the shards are not the base checkpoint.
        RunMismatch, UnsupportedFormat, StoreError: see `trainer_hooks.publication.resume.open_run`.
        RankFailed: another rank failed.
    """
    plan = None

    def planned() -> JSON:
        nonlocal plan
        plan = source.plan(base.specs)
        return claims(plan, base.specs)

    def decide(claimed: list[JSON]) -> JSON:
        find = partial(find_unsourced, base=base, patterns=patterns)
        shares, lacks = assign(claimed, base.specs, str(base.folder), find)
        return [asdict(of) | {"unsourced": asdict(lacks)} for of in shares]

    share = ranks.round(planned, decide)
    assert plan is not None  # noqa: S101 - or the round had failed
    lacks = Unsourced.of(share["unsourced"])
    kept = frozenset(range(len(plan.shards), len(plan.shards) + len(share["kept"])))
    plan = completed(plan, lacks.copies, [base.specs[name] for name in share["kept"]])
    owned = {number: plan.shards[number] for number in (*share["numbers"], *sorted(kept))}
    baseline, base_digest = _read_base(ranks, base, owned, memory)

    def find(_: list[JSON]) -> JSON:
        run = find_run(folder, base, base_digest, encoding)
        newest = folder.newest()
        return {"run_id": run.run_id, "policy": encoding or policy_of(run.encodings), "newest": newest}

    found = ranks.round(lambda: None, find)
    newest = found["newest"]

    def replay() -> JSON:
        if newest:
            bring(baseline, folder, base, newest)
            held = {of.spec.name: of.bits for number in kept for of in baseline.of(number)}
            check_kept(held, newest, held.__getitem__, base, folder.store.uri)
            digest = folder.read_version(newest).state_digest
        else:
            digest = folder.read_run().base.state_digest
        twins = twin_digests(baseline, lacks.tie if newest else None)
        return {"digest": baseline.digest(), "state_digest": digest, "twins": twins}

    answer = ranks.round(replay, lambda replayed: _check_replayed(replayed, newest))
    if not answer["is_tied"]:
        lacks = unguarded(lacks, newest, is_told=ranks.rank == 0)
    return Opened(found["run_id"], found["policy"], newest, answer["digest"], plan.shards, owned, kept, baseline, lacks)


def bring(baseline: ShardBaseline, folder: RunFolder, base: Checkpoint, version: int) -> None:
    """Make a rank's baseline what it is at a version, whatever it is now. Not collective; blocks.

    In place: from the base or an anchor, and the chain, a few blocks at a time in memory.

    Raises:
        BrokenChain, CorruptFile, StoreUnavailable: the run cannot be read.
    """
    plan = plan_run(folder, version, start=(0, folder.read_run().base.state_digest))
    with opened_start(folder, plan, base) as start:
        baseline.reload(start)
    for record in plan.chain.steps:
        with streamed_version(folder, record, base.specs) as changes:
            baseline.advance(changes)


def _read_base(
    ranks: Ranks, base: Checkpoint, owned: Mapping[int, Shard], memory: HostMemory | None
) -> tuple[ShardBaseline, str]:
    baseline = None

    def read() -> JSON:
        nonlocal baseline
        baseline = ShardBaseline(base, owned, memory)
        return cover_of(baseline, share_digest(base, ranks.rank, ranks.size))

    is_whole, digest = ranks.round(read, lambda covers: {"cover": is_covered(covers, base)})["cover"]
    assert baseline is not None  # noqa: S101 - or the round had failed
    held = baseline
    if not is_whole:

        def refuse(details: list[JSON]) -> JSON:
            raise explain(details, base)

        ranks.round(lambda: details_of(held), refuse)
    return held, digest


def _check_replayed(replayed: list[JSON], version: int) -> JSON:
    expected = {of_rank["state_digest"] for of_rank in replayed}
    if len(expected) > 1:
        raise BrokenChain(
            f"the ranks read different versions {version}",
            file=layout.version_key(version),
            expected="one state digest",
            found=", ".join(sorted(expected)),
            hint="Do all ranks see the same sync_dir? A file system that serves old files to some cannot hold a run.",
        )
    [digest] = expected
    found = format_digest(add_digests(*(of_rank["digest"] for of_rank in replayed)))
    if found != digest:
        raise VerifyError(
            f"version {version} does not have the state it claims",
            expected=f"state digest {digest}",
            found=found,
            hint="Find the damage: delta-snapshot verify <sync_dir>. If there is none, a trainer published it from a "
            "wrong baseline; start a new run.",
        )
    twins = [add_digests(*of) for of in zip(*(of_rank["twins"] for of_rank in replayed), strict=True)]
    return {"digest": str(digest), "is_tied": len(set(twins)) <= 1}
