# SPDX-License-Identifier: Apache-2.0
"""Start a run, or continue one: the published state is rebuilt from the store, whatever the trainer remembers.

A trainer that restarts diffs its weights against what the engines have, not against what it thinks it sent, and
numbers go on after the newest version: no change is lost, no number used twice.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from trainer_hooks.compare.baseline import Baseline
from trainer_hooks.compare.pinned import HostMemory
from vllm_delta_snapshot.changes.resolve import resolve_all
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import (
    BaseMismatch,
    ObjectExists,
    ObjectNotFound,
    RunMismatch,
    SourceError,
    StoreError,
    UnsupportedFormat,
    VerifyError,
)
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.choose import POLICIES, encodings_of
from vllm_delta_snapshot.format.digest import format_digest, state_digest
from vllm_delta_snapshot.format.run import BaseIdentity, RunInfo
from vllm_delta_snapshot.format.wire import SpecEntry
from vllm_delta_snapshot.runs.chain import ChainPlan, newest_in_line
from vllm_delta_snapshot.runs.delta_folder import TOOL, utc_now
from vllm_delta_snapshot.runs.foreign import OwnRecords
from vllm_delta_snapshot.runs.own_run import OwnRun
from vllm_delta_snapshot.runs.replay import opened_start, opened_version, plan_run
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store.base import Store, SweepsUploads

__all__ = ["PublishedState", "find_run", "open_run", "policy_of"]

logger = logging.getLogger(__name__)

_CUT_OFF_S: Final = 86400.0


@dataclass(frozen=True, slots=True, eq=False)
class PublishedState:
    """What the run's newest version is.

    Attributes:
        run: its run.json.
        version: the newest version; 0 if only the base exists.
        state_digest: the state digest there.
        baseline: the weights there.
    """

    run: RunInfo
    version: int
    state_digest: str
    baseline: Baseline


def open_run(
    folder: RunFolder, base: Checkpoint, policy: str | None = None, memory: HostMemory | None = None
) -> PublishedState:
    """Create the run if there is none, else rebuild its newest state.

    Blocks. Reads the base, and every delta or an anchor and those after it.

    Args:
        folder: where the run lives or will live.
        base: the base checkpoint.
        policy: the encodings to publish in (see `choose`); ``None`` for those of the run, and all for a new one.
        memory: where the baseline will lie; by default plain memory.

    Raises:
        RunMismatch: the folder belongs to a run with another base checkpoint, or one without these encodings.
        UnsupportedFormat: there is no such policy, or the run has encodings that are not known here.
        ExclusiveCreateUnsupported, StoreError, StoreUnavailable: the store cannot be used.
        BrokenChain, CorruptFile, VerifyError: the run there is damaged.
    """
    run = find_run(folder, base, base.state_digest, policy)
    newest = folder.newest()
    plan = plan_run(folder, newest, start=(0, base.state_digest))
    with opened_start(folder, plan, base) as start:
        baseline = Baseline(start, memory)
    _replay(folder, baseline, plan.chain)
    return PublishedState(run, newest, plan.chain.state_digest, baseline)


def find_run(folder: RunFolder, base: Checkpoint, base_digest: str, policy: str | None = None) -> RunInfo:
    """Create the run if there is none, else check that it is this base's. Blocks.

    Args:
        folder: where the run lives or will live.
        base: the base checkpoint; its weights are not read.
        base_digest: its state digest.
        policy: see `open_run`.

    Raises:
        RunMismatch, UnsupportedFormat, ExclusiveCreateUnsupported, StoreError, StoreUnavailable: see `open_run`.
    """
    wanted = encodings_of(policy or "auto")
    try:
        run = folder.read_run()
    except ObjectNotFound:
        run = _create_run(folder, base, base_digest, wanted)
    _check_base(folder, run, base, base_digest)
    _drop_foreign(folder, run)
    if policy is not None and not set(wanted) <= set(run.encodings):
        raise RunMismatch(
            "the run was started with other encodings, and its engines with them",
            file=f"{folder.store.uri}/{layout.RUN_KEY}",
            expected=" ".join(run.encodings),
            found=f"{policy}: {' '.join(wanted)}",
            hint="Leave the encoding out, or give the run a sync_dir of its own.",
        )
    _sweep(folder.store)
    return run


def _drop_foreign(folder: RunFolder, run: RunInfo) -> None:
    """Take the place of records that writers left which outlived their runs: they come after this run's own.

    Raises:
        RunMismatch: there are several, and none of this run: run.json may be the wrong one, so nothing is deleted.
    """
    versions = folder.versions()
    own, error = OwnRecords(folder.store).versions(versions, lambda: run.run_id)
    foreign = versions[len(own) :]
    if error is not None and not own and len(foreign) > 1:
        raise RunMismatch(
            f"all {len(foreign)} versions here are of another run than run.json",
            file=f"{folder.store.uri}/{layout.RUN_KEY}",
            expected=error.found,
            found=f"run {run.run_id}",
            hint="If run.json is the wrong one, restore it from a copy (docs/operations.md). If a run before this one "
            "left the versions, delete their records: "
            + ", ".join(layout.version_key(version) for version in foreign[:8]),
        )
    OwnRun(folder.store, run.run_id).drop_foreign(layout.version_key(version) for version in reversed(foreign))


def _sweep(store: Store) -> None:
    """Abort uploads of this run that were cut off, a day ago or more: nobody will end those."""
    if not isinstance(store, SweepsUploads):
        return
    try:
        swept = store.sweep(older_than_s=_CUT_OFF_S)
    except StoreError as error:
        logger.warning("cannot look for uploads that were cut off: %s", error)
    else:
        if swept:
            logger.info("aborted uploads that were cut off: %d", swept)


def policy_of(encodings: Sequence[str]) -> str:
    """Return the policy that a run was started with.

    Raises:
        UnsupportedFormat: it allows encodings that no policy of this writer keeps to.
    """
    for policy in POLICIES:
        if set(encodings_of(policy)) == set(encodings):
            return policy
    raise UnsupportedFormat(
        "the run was started with encodings that this version does not choose by itself",
        found=" ".join(encodings),
        hint="Give the publisher an encoding, one of these.",
    )


def _create_run(folder: RunFolder, base: Checkpoint, base_digest: str, encodings: tuple[str, ...]) -> RunInfo:
    versions = folder.versions()
    if newest_in_line(versions, ()) or folder.shortcuts().anchors:
        try:
            return folder.read_run()  # which came since, and before them
        except ObjectNotFound as error:
            raise RunMismatch(
                "run.json is gone, and versions of a run are still there",
                file=f"{folder.store.uri}/{layout.RUN_KEY}",
                found=f"versions up to {versions[-1] if versions else 0}",
                hint="Restore it from a copy. Or, if that run is over, delete the rest of the folder too; or give this "
                "run a sync_dir of its own.",
            ) from error
    folder.store.check_exclusive_create()
    run = RunInfo(
        run_id=str(uuid.uuid4()),
        created_at=utc_now(),
        tool=TOOL,
        encodings=encodings,
        base=BaseIdentity(
            name=str(base.folder),
            state_digest=base_digest,
            num_tensors=len(base.specs),
            total_elements=base.total_elements,
        ),
        tensors=tuple(SpecEntry.of(spec) for spec in base.specs.values()),
    )
    # "Exists" is ours after a lost reply, or another trainer's: the base is compared either way.
    with contextlib.suppress(ObjectExists):
        folder.store.create(layout.RUN_KEY, run.to_json())
    return folder.read_run()


def _check_base(folder: RunFolder, run: RunInfo, base: Checkpoint, base_digest: str) -> None:
    file = f"{folder.store.uri}/{layout.RUN_KEY}"
    if run.base.state_digest != base_digest:
        raise RunMismatch(
            "the folder belongs to a run with another base checkpoint",
            file=file,
            expected=f"{base.folder} with state digest {base_digest}",
            found=f"{run.base.name} with state digest {run.base.state_digest} (run {run.run_id})",
            hint="Give every run a sync_dir of its own, or the base it was started with.",
        )
    try:
        base.check_fits(dict(run.specs()), what="run.json")
    except SourceError as error:
        # Names are part of the digest: a run that has the same digest and other names was changed afterwards.
        raise RunMismatch(
            "the run's table of tensors is not that of the base checkpoint, whose state digest it has",
            file=file,
            expected=f"the tensors of {base.folder}",
            found=error.found,
            hint="run.json was changed after the run was started: restore it from a copy (docs/operations.md).",
        ) from error


def _replay(folder: RunFolder, baseline: Baseline, plan: ChainPlan) -> None:
    if not plan.steps:
        return
    for record in plan.steps:
        with opened_version(folder, record, baseline.specs) as (metadata, changes):
            try:
                baseline.advance(resolve_all(metadata, changes, baseline.bits))
            except BaseMismatch as error:
                raise VerifyError(
                    f"version {record.version} does not have the state it claims",
                    file=folder.store.uri,
                    tensor=error.tensor,
                    expected=error.expected,
                    found=error.found,
                    hint="It was published by a trainer whose baseline was wrong; start a new run.",
                ) from error
    found = format_digest(state_digest(baseline.items()))
    if found != plan.state_digest:
        raise VerifyError(
            f"version {plan.version} does not have the state it claims",
            file=folder.store.uri,
            expected=f"state digest {plan.state_digest}",
            found=found,
            hint=f"Find the damage: delta-snapshot verify {folder.store.uri}",
        )
