# SPDX-License-Identifier: Apache-2.0
"""Upkeep of a run: write anchors and merged deltas when they are due, and prune what nobody needs any more.

Looks at the store and nothing else, so it can be done by the publisher's side process, by a cron job or by hand, on any
machine that may write there; doing it twice does nothing more. ``python -m vllm_delta_snapshot.upkeep`` is that side
process: it takes an `UpkeepOrder` as JSON on stdin.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import DeltaSnapshotError
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.runs.chain import Shortcuts, Step
from vllm_delta_snapshot.runs.own_run import OwnRun
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import open_store
from vllm_delta_snapshot.upkeep.anchor import AnchorReport, write_anchor
from vllm_delta_snapshot.upkeep.compact import CompactReport, compact
from vllm_delta_snapshot.upkeep.retention import PrunePlan, RetentionPolicy, plan_pruning, prune

__all__ = ["UpkeepOrder", "UpkeepPolicy", "UpkeepReport", "due_anchor", "due_merges", "upkeep"]


class UpkeepPolicy(BaseModel):
    """When what is done. Nothing by default.

    Attributes:
        anchor_every: an anchor of every version that is a multiple of this.
        anchor_after_ratio: an anchor once the deltas since the last one are so many times a whole checkpoint.
        merge_every: a merged delta of every so many versions, from one multiple of this to the next.
        keep_versions: prune, and keep the deltas of so many newest versions.
        keep_anchors: so many newest anchors stay.
        keep_anchor_every: besides, anchors of versions that are multiples of this stay.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    anchor_every: int | None = Field(default=None, ge=1)
    anchor_after_ratio: float | None = Field(default=None, gt=0)
    merge_every: int | None = Field(default=None, ge=2)
    keep_versions: int | None = Field(default=None, ge=1)
    keep_anchors: int = Field(default=2, ge=1)
    keep_anchor_every: int | None = Field(default=None, ge=1)


class UpkeepOrder(BaseModel):
    """What the side process is told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sync_dir: str
    base: str | None
    single_writer: bool = False
    run_id: str | None = None
    policy: UpkeepPolicy


@dataclass(slots=True)
class UpkeepReport:
    """What was done.

    Attributes:
        anchor: the anchor that was written.
        merged: the merged deltas that were written.
        pruned: what was pruned.
    """

    anchor: AnchorReport | None = None
    merged: list[CompactReport] = field(default_factory=list)
    pruned: PrunePlan | None = None


def upkeep(
    folder: RunFolder, base: Checkpoint | None, policy: UpkeepPolicy, *, scratch: Path | None = None
) -> UpkeepReport:
    """Do what is due. Blocks.

    Args:
        folder: the run.
        base: the base checkpoint, local; ``None`` if it is not at hand.
        policy: when what is done.
        scratch: where an anchor is materialized; by default the temp folder.

    Raises:
        DeltaSnapshotError: something could not be done; what was done before stays, and doing it again goes on.
    """
    report = UpkeepReport()
    _drop_foreign(folder)
    newest, shortcuts = folder.newest(), folder.shortcuts()
    # An anchor beyond the newest version is none: it must not keep others from being due.
    shortcuts = replace(shortcuts, anchors=tuple(version for version in shortcuts.anchors if version <= newest))
    for step in due_merges(newest, shortcuts, policy):
        report.merged.append(compact(folder, *step))
    due = due_anchor(folder, newest, shortcuts, policy)
    if due is not None:
        report.anchor = write_anchor(folder, base, due, scratch=scratch)
    if policy.keep_versions is not None:
        plan = plan_pruning(
            folder,
            RetentionPolicy(
                keep_versions=policy.keep_versions,
                keep_anchors=policy.keep_anchors,
                keep_anchor_every=policy.keep_anchor_every,
            ),
        )
        if not plan.is_empty:
            prune(folder, plan)
            report.pruned = plan
    return report


def _drop_foreign(folder: RunFolder) -> None:
    """Delete the records and marks that a writer of another run left: they hide what is due."""
    own, shortcuts = OwnRun(folder.store, folder.read_run().run_id), folder.shortcuts()
    marks = layout.numbers_of(folder.store.list(layout.PRUNED_FOLDER))
    for key in (
        *(layout.anchor_key(version) for version in shortcuts.anchors),
        *(layout.merged_key(*step) for step in shortcuts.merged),
        *(layout.pruned_key(version) for version in marks),
    ):
        own.remove_foreign(key)


def due_anchor(folder: RunFolder, newest: int, shortcuts: Shortcuts, policy: UpkeepPolicy) -> int | None:
    """Return the version whose anchor is due; ``None`` if none is.

    Raises:
        DeltaSnapshotError: the run cannot be read.
    """
    last = max(shortcuts.anchors, default=0)
    if policy.anchor_every is not None:
        due = newest - newest % policy.anchor_every
        if due > last:
            return due
    if policy.anchor_after_ratio is not None and newest > last:
        checkpoint_bytes = sum(spec.num_bytes for spec in folder.read_run().specs().values())
        since = sum(folder.read_version(version).payload_bytes for version in range(last + 1, newest + 1))
        if since >= policy.anchor_after_ratio * checkpoint_bytes:
            return newest
    return None


def due_merges(newest: int, shortcuts: Shortcuts, policy: UpkeepPolicy) -> Iterator[Step]:
    """Yield the merged deltas that are due: of the versions since the newest anchor, from multiple to multiple."""
    every = policy.merge_every
    if every is None:
        return
    from_version = max(shortcuts.pruned, max(shortcuts.anchors, default=0) - every + 1)
    start = -(-from_version // every) * every
    for base in range(start, newest - every + 1, every):
        if (base, base + every) not in shortcuts.merged:
            yield base, base + every


def main() -> int:
    """Do what the order on stdin says. Returns the exit code; what went wrong is the last line on stderr."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    order = UpkeepOrder.model_validate_json(sys.stdin.read())
    try:
        folder = RunFolder(open_store(order.sync_dir, single_writer=order.single_writer))
        if order.run_id is not None:  # another run may have been begun since this was ordered
            OwnRun(folder.store, order.run_id).check()
        upkeep(folder, None if order.base is None else Checkpoint(order.base), order.policy)
    except DeltaSnapshotError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0
