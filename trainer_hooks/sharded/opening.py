# SPDX-License-Identifier: Apache-2.0
"""Opening: from sources and a base checkpoint to baselines at the run's newest version, over all ranks.

Four rounds, each of which may fail for all: who publishes what; whether that is the base, every element once; which run
this is; and whether the baselines, brought to its newest version, have the state that it claims. Any number of ranks
may continue what any other number began: each rebuilds its own elements from the base and the chain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer_hooks.pinned import HostMemory
from trainer_hooks.resume import find_run, policy_of
from trainer_hooks.sharded.baseline import ShardBaseline
from trainer_hooks.sharded.owners import assign, claims, cover_of, details_of, explain, is_covered, share_digest
from trainer_hooks.sharded.ranks import JSON, Ranks
from trainer_hooks.sharded.source import Shard, ShardSource
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import BrokenChain, VerifyError
from vllm_delta_snapshot.format.digest import add_digests, format_digest
from vllm_delta_snapshot.run_folder import RunFolder
from vllm_delta_snapshot.stage.replay import opened_start, plan_run, streamed_version

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
        owned: those that it publishes.
        baseline: their elements at that version.
    """

    run_id: str
    policy: str
    version: int
    state_digest: str
    shards: Sequence[Shard]
    owned: Mapping[int, Shard]
    baseline: ShardBaseline


def open_sharded(
    ranks: Ranks,
    source: ShardSource,
    base: Checkpoint,
    folder: RunFolder,
    encoding: str | None,
    memory: HostMemory | None = None,
) -> Opened:
    """Start a run, or continue one. Collective; blocks; reads the base and every delta, a part on each rank.

    `memory` is where the baseline will lie; by default plain memory.

    Raises:
        SourceError: the shards are not the base checkpoint.
        RunMismatch, UnsupportedFormat, StoreError: see `trainer_hooks.resume.open_run`.
        RankFailed: another rank failed.
    """
    plan = None

    def planned() -> JSON:
        nonlocal plan
        plan = source.plan(base.specs)
        return claims(plan, base.specs)

    numbers = ranks.round(planned, lambda claimed: assign(claimed, base.specs, str(base.folder)))
    assert plan is not None  # noqa: S101 - or the round had failed
    owned = {number: plan.shards[number] for number in numbers}
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
            return {"digest": baseline.digest(), "state_digest": folder.read_version(newest).state_digest}
        return {"digest": baseline.digest(), "state_digest": folder.read_run().base.state_digest}

    digest = ranks.round(replay, lambda replayed: _check_replayed(replayed, newest))
    return Opened(found["run_id"], found["policy"], newest, digest, plan.shards, owned, baseline)


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


def _check_replayed(replayed: list[JSON], version: int) -> str:
    expected = {of_rank["state_digest"] for of_rank in replayed}
    if len(expected) > 1:
        raise BrokenChain(f"the ranks read different versions {version}", found=", ".join(sorted(expected)))
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
    return str(digest)
