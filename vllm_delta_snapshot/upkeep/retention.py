# SPDX-License-Identifier: Apache-2.0
"""Retention: what of a run may go, and taking it away.

Three things always hold. The newest version can be reached from the base or from an anchor that stays; a sampler that
has acknowledged a version can go on from it; and nothing that a record names disappears while the record says that it
is there: the mark, or the deletion of the record, comes first. The records of versions stay for ever: they are small,
and keep a number from being used twice by a trainer that was thought dead.

Deleting is idempotent: what was interrupted is finished by doing it again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from vllm_delta_snapshot.errors import ChainError, FormatError, ObjectExists, ObjectNotFound
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.anchor import PrunedMark
from vllm_delta_snapshot.runs.acks import Acknowledgement, read_acknowledgements
from vllm_delta_snapshot.runs.chain import Shortcuts, Step, plan_steps
from vllm_delta_snapshot.runs.delta_folder import utc_now
from vllm_delta_snapshot.runs.own_run import OwnRun
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import Store
from vllm_delta_snapshot.store.base import HasFolders

__all__ = ["PrunePlan", "RetentionPolicy", "plan_pruning", "prune", "remove_folder"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """What to keep.

    Attributes:
        keep_versions: the deltas of so many newest versions.
        keep_anchors: so many newest anchors, at least one.
        keep_anchor_every: besides, anchors of versions that are multiples of this; ``None`` for no such.
        ack_max_age_s: an acknowledgement that is older than this, and not of the newest version, holds nothing back.
        drop_anchors: these anchors go in any case, damaged ones for instance, unless one is the only way.
    """

    keep_versions: int = 100
    keep_anchors: int = 2
    keep_anchor_every: int | None = None
    ack_max_age_s: float = 86400.0
    drop_anchors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What may go.

    Attributes:
        newest: the newest version.
        up_to: deltas of versions up to this one go; 0 for none.
        was_pruned: up to where they are gone already.
        anchors: versions of the anchors that go.
        merged: merged deltas that go.
        folders: folders that go: of those deltas, and what losers and crashes left behind.
        held_by: why no more goes, for people.
    """

    newest: int
    up_to: int
    was_pruned: int
    anchors: tuple[int, ...]
    merged: tuple[Step, ...]
    folders: tuple[str, ...]
    held_by: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.anchors or self.merged or self.folders) and self.up_to <= self.was_pruned


def plan_pruning(folder: RunFolder, policy: RetentionPolicy) -> PrunePlan:
    """Find out what may go; deletes nothing. Blocks.

    Raises:
        DeltaSnapshotError: the run cannot be read.
    """
    run_id = folder.read_run().run_id
    existing, shortcuts = folder.versions(), folder.shortcuts()
    # Or nothing is deleted: a record, mark or acknowledgement that lies must not make all others old.
    newest = folder.newest()
    problem = folder.mark_problem()
    if problem is not None:
        raise problem
    acknowledgements = read_acknowledgements(folder.store, run_id, newest=newest)
    held_by: list[str] = []
    kept_anchors = _anchors_to_keep(folder, shortcuts.anchors, policy)
    strange = _unreadable(folder, set(shortcuts.anchors) - set(policy.drop_anchors), held_by)
    left = Shortcuts(merged=shortcuts.merged, pruned=shortcuts.pruned)
    if policy.drop_anchors and not any(_leads(existing, start, newest, left) for start in {0, *kept_anchors}):
        kept_anchors |= set(shortcuts.anchors)
        held_by.append("no anchor can be dropped: one of them is the only way to the newest version")
    limit = newest - policy.keep_versions
    for name, said in sorted(acknowledgements.items()):
        if said.version < limit and _is_live(said, policy.ack_max_age_s):
            limit = said.version
            held_by.append(f"sampler {name} is at version {said.version}")
    up_to = _highest_safe(existing, kept_anchors, shortcuts, max(0, limit), newest)
    if up_to < limit:
        held_by.append(
            f"from version {up_to} on the deltas are the only way to version {newest}: there is no newer anchor"
        )
    merged = _useless_merged(existing, kept_anchors, shortcuts, up_to, newest)
    return PrunePlan(
        newest=newest,
        up_to=up_to,
        was_pruned=shortcuts.pruned,
        anchors=tuple(version for version in shortcuts.anchors if version not in kept_anchors | strange),
        merged=merged,
        folders=(
            *_delta_folders(folder, existing, up_to),
            *_leftovers(folder.store, shortcuts, min(kept_anchors, default=0), up_to),
        ),
        held_by=tuple(held_by),
    )


def prune(folder: RunFolder, plan: PrunePlan) -> int:
    """Delete what a plan names. Blocks; returns how many objects were deleted.

    Raises:
        RunMismatch: the folder is another run's by now; nothing of that one was deleted.
        StoreError, StoreUnavailable: not everything was deleted; doing it again goes on.
    """
    store, deleted = folder.store, 0
    own = OwnRun(store, folder.read_run().run_id)
    if plan.up_to > plan.was_pruned:
        mark = PrunedMark(run_id=own.run_id, version=plan.up_to, created_at=utc_now())
        with contextlib.suppress(ObjectExists):  # of a try before this one
            own.create(layout.pruned_key(plan.up_to), mark.to_json())
    for version in plan.anchors:
        own.check()  # names of anchors and merged deltas are those of any run
        deleted += _remove_recorded(store, layout.anchor_key(version), _anchor_folders(store, version))
    for step in plan.merged:
        own.check()
        deleted += _remove_recorded(store, layout.merged_key(*step), _merged_folders(store, step))
    own.check()
    for name in plan.folders:
        deleted += remove_folder(store, name)
    for name in store.list(layout.PRUNED_FOLDER):
        mark_of = layout.version_of_key(name)
        if mark_of is None or own.remove_foreign(layout.pruned_key(mark_of)):
            continue
        if mark_of < max(plan.up_to, plan.was_pruned):
            store.delete(layout.pruned_key(mark_of))
    logger.info("pruned up_to=%d objects=%d", plan.up_to, deleted)
    return deleted


def remove_folder(store: Store, folder: str) -> int:
    """Delete the objects of a folder, metadata.json first, and the folder; return how many there were.

    Raises:
        StoreError, StoreUnavailable: not all of them were deleted.
    """
    names = sorted(store.list(folder), key=lambda name: name != layout.METADATA_NAME)
    for name in names:
        store.delete(f"{folder}/{name}")
    if isinstance(store, HasFolders):
        store.remove_empty(folder)
    return len(names)


def _remove_recorded(store: Store, key: str, folders: Iterable[str]) -> int:
    """Delete a record, and then what it named and whatever lies beside it for the same."""
    store.delete(key)
    return 1 + sum(remove_folder(store, folder) for folder in folders)


def _anchors_to_keep(folder: RunFolder, anchors: Iterable[int], policy: RetentionPolicy) -> set[int]:
    """Return the anchors that stay. One that is not whole counts for none, and goes."""
    wanted = set(anchors) - set(policy.drop_anchors)
    good = [version for version in sorted(wanted, reverse=True) if _is_whole(folder, version)]
    kept = set(good[: max(1, policy.keep_anchors)])
    if policy.keep_anchor_every:
        kept |= {version for version in good if version % policy.keep_anchor_every == 0}
    return kept


def _unreadable(folder: RunFolder, anchors: Iterable[int], held_by: list[str]) -> set[int]:
    """Return the anchors of which not even the record can be believed: what lies there is for somebody to look at."""
    found = set()
    for version in anchors:
        try:
            folder.read_anchor(version)
        except (ChainError, FormatError) as error:
            found.add(version)
            held_by.append(
                f"anchor {version} cannot be read ({error}); "
                f"to delete it: delta-snapshot prune {folder.store.uri} --drop-anchor {version} --yes"
            )
    return found


def _is_whole(folder: RunFolder, version: int) -> bool:
    """Say whether an anchor's files are all there, in their sizes."""
    try:
        record = folder.read_anchor(version)
        metadata = folder.read_anchor_metadata(record)
        return all(folder.store.size(f"{record.folder}/{entry.name}") == entry.bytes for entry in metadata.files)
    except (ChainError, FormatError, ObjectNotFound) as error:
        logger.warning("anchor %d is damaged: %s", version, error)
        return False


def _is_live(said: Acknowledgement, max_age_s: float) -> bool:
    return time.time() - said.applied_at <= max_age_s


def _highest_safe(existing: list[int], anchors: set[int], shortcuts: Shortcuts, limit: int, newest: int) -> int:
    """Return up to where deltas may go, so that the newest version can still be reached by who has no weights yet."""
    candidates = {limit, shortcuts.pruned, *anchors, *(end for _, end in shortcuts.merged)}
    for up_to in sorted((number for number in candidates if number <= max(limit, shortcuts.pruned)), reverse=True):
        left = Shortcuts(merged=shortcuts.merged, pruned=up_to)
        if any(_leads(existing, start, newest, left) for start in {0, *anchors}):
            return up_to
    return shortcuts.pruned


def _leads(existing: list[int], start: int, version: int, shortcuts: Shortcuts) -> bool:
    try:
        plan_steps(existing, start, version, shortcuts)
    except ChainError:
        return False
    return True


def _useless_merged(
    existing: list[int], anchors: set[int], shortcuts: Shortcuts, up_to: int, newest: int
) -> tuple[Step, ...]:
    """Return merged deltas that nobody takes: they start where nobody can be, or lie on nobody's way."""
    left = Shortcuts(merged=shortcuts.merged, pruned=up_to)
    used: set[Step] = set()
    for start in {0, *anchors}:
        if _leads(existing, start, newest, left):
            used.update(plan_steps(existing, start, newest, left))
    return tuple(step for step in shortcuts.merged if step[0] < up_to and step not in used)


def _delta_folders(folder: RunFolder, existing: list[int], up_to: int) -> Iterable[str]:
    """Yield the delta folders of pruned versions, and those that lost: others than the records of versions name."""
    known = set(existing)
    for name in folder.store.list(layout.DELTAS_FOLDER):
        path = f"{layout.DELTAS_FOLDER}/{name}"
        version = layout.version_of_delta(path)
        if version is None or version not in known:  # not ours, or perhaps being written
            continue
        if version <= up_to or path != folder.read_version(version).folder:
            yield path


def _leftovers(store: Store, shortcuts: Shortcuts, oldest_anchor: int, up_to: int) -> Iterable[str]:
    """Yield folders of anchors and merged deltas that no record names, and that nobody would want: too old for that.

    A newer one may be being written.
    """
    for name in store.list(layout.ANCHORS_FOLDER):
        path = f"{layout.ANCHORS_FOLDER}/{name}"
        version = layout.version_of_anchor(path)
        if version is not None and version < oldest_anchor and version not in shortcuts.anchors:
            yield path
    for name in store.list(layout.MERGED_FOLDER):
        path = f"{layout.MERGED_FOLDER}/{name}"
        step = layout.step_of_merged(path)
        if step is not None and step[1] <= up_to and step not in shortcuts.merged:
            yield path


def _anchor_folders(store: Store, version: int) -> list[str]:
    paths = (f"{layout.ANCHORS_FOLDER}/{name}" for name in store.list(layout.ANCHORS_FOLDER))
    return [path for path in paths if layout.version_of_anchor(path) == version]


def _merged_folders(store: Store, step: Step) -> list[str]:
    paths = (f"{layout.MERGED_FOLDER}/{name}" for name in store.list(layout.MERGED_FOLDER))
    return [path for path in paths if layout.step_of_merged(path) == step]
