# SPDX-License-Identifier: Apache-2.0
"""Replay a run from its base, or from an anchor: the plan of the way there, and each delta's changes in turn.

For those who walk a run as a whole (a trainer that resumes, materialize, verify). The stager keeps what it fetched and
does not use this.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_delta_snapshot.changes.decode import decode, iter_decoded, naming
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import BaseMismatch, BrokenChain, ChainError, DeltaSnapshotError, FormatError
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.anchor import AnchorRecord
from vllm_delta_snapshot.format.metadata import DeltaMetadata, TensorEntry
from vllm_delta_snapshot.format.run import RunInfo
from vllm_delta_snapshot.format.version import DeltaRecord
from vllm_delta_snapshot.runs.chain import ChainPlan, Shortcuts, plan_chain
from vllm_delta_snapshot.runs.fetch import fetch
from vllm_delta_snapshot.runs.fetch_anchor import fetch_anchor
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.types import Change, TensorSpec
from vllm_delta_snapshot.util.scratch import scratch_folder

__all__ = [
    "RunPlan",
    "check_base",
    "opened_start",
    "opened_version",
    "plan_from_base",
    "plan_run",
    "streamed_entries",
    "streamed_version",
]


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The cheapest way to a version.

    Attributes:
        anchor: the checkpoint in the store to start from; ``None`` to start from the base.
        chain: the deltas from there on.
    """

    anchor: AnchorRecord | None
    chain: ChainPlan


def check_base(run: RunInfo, base: Checkpoint) -> None:
    """Check that a checkpoint is the one that a run starts from. The first time reads every byte of it.

    Raises:
        SourceError: its tensors are others.
        BaseMismatch: its weights are others.
    """
    base.check_fits(dict(run.specs()), what=f"run {run.run_id}")
    if base.state_digest != run.base.state_digest:
        raise BaseMismatch(
            "this is not the base checkpoint of the run",
            file=str(base.folder),
            expected=f"state digest {run.base.state_digest} ({run.base.name})",
            found=f"state digest {base.state_digest}",
            hint=f"Give the checkpoint that the run was started from: --base {shlex.quote(run.base.name)}",
        )


def plan_from_base(folder: RunFolder, version: int) -> ChainPlan:
    """Return every version's own delta from the base to `version`.

    Raises:
        OutOfOrder, BrokenChain, BaseMismatch: see `plan_chain`.
        CorruptFile, UnsupportedFormat, LimitExceeded, StoreUnavailable: a record cannot be read.
    """
    return plan_chain(
        folder.versions(),
        folder.read_delta,
        base_version=0,
        base_state_digest=folder.read_run().base.state_digest,
        version=version,
        shortcuts=Shortcuts(pruned=folder.pruned()),
    )


def plan_run(folder: RunFolder, version: int, *, start: tuple[int, str] | None, may_jump: bool = True) -> RunPlan:
    """Find the way to `version` that has the fewest bytes to fetch: from what is at hand, or from an anchor.

    Args:
        folder: the run.
        version: the version wanted.
        start: version and state digest of the weights at hand; ``None`` if there are none.
        may_jump: whether an anchor serves, in place of what is at hand.

    Raises:
        OutOfOrder, BrokenChain, BaseMismatch: see `plan_chain`: no way is left.
        CorruptFile, UnsupportedFormat, LimitExceeded, StoreUnavailable: a record cannot be read.
    """
    existing, shortcuts = folder.versions(), folder.shortcuts()

    def chain_from(base_version: int, state_digest: str) -> ChainPlan:
        return plan_chain(
            existing,
            folder.read_delta,
            base_version=base_version,
            base_state_digest=state_digest,
            version=version,
            shortcuts=shortcuts,
        )

    found: list[tuple[int, RunPlan]] = []
    problem: DeltaSnapshotError | None = None
    damaged: DeltaSnapshotError | None = None
    if start is not None:
        try:
            plan = RunPlan(None, chain_from(*start))
            found.append((plan.chain.payload_bytes, plan))
        except ChainError as error:
            problem = error
    first = -1 if start is None else start[0]
    anchors = [number for number in shortcuts.anchors if may_jump and first < number <= version]
    for number in reversed(anchors):
        try:
            record = folder.read_anchor(number)
            digest = folder.read_version(number).state_digest
            _check_anchor(folder, record, digest)
        except (ChainError, FormatError) as error:  # it went since it was listed, or is damaged: another may do
            damaged = damaged or error
            continue
        try:
            plan = RunPlan(record, chain_from(number, digest))
        except (ChainError, FormatError) as error:
            problem = problem or error
            continue
        found.append((record.payload_bytes + plan.chain.payload_bytes, plan))
        break
    if not found:
        # Of an anchor that is damaged can be said what to do; without it, that deltas were pruned only follows.
        raise (
            damaged
            or problem
            or BrokenChain(
                f"there is no anchor to reach version {version} from, and no base checkpoint at hand",
                file=folder.store.uri,
                hint="Say where the base is: --base FOLDER",
            )
        )
    return min(found, key=lambda pair: pair[0])[1]


def _check_anchor(folder: RunFolder, record: AnchorRecord, state_digest: str) -> None:
    """Check that an anchor's record is of the state that its version has."""
    if record.state_digest != state_digest:
        raise BaseMismatch(
            f"the anchor of version {record.version} is of another state than the version",
            file=f"{folder.store.uri}/{layout.anchor_key(record.version)}",
            expected=f"state digest {state_digest}",
            found=f"state digest {record.state_digest}",
            hint=f"Delete it: delta-snapshot prune {folder.store.uri} --drop-anchor {record.version} --yes",
        )


@contextlib.contextmanager
def opened_start(
    folder: RunFolder, plan: RunPlan, base: Checkpoint | None, *, scratch: Path | None = None
) -> Iterator[Checkpoint]:
    """Give the checkpoint that a plan starts from: the base, or the anchor, whose local files are gone afterwards.

    Args:
        folder: the run.
        plan: the plan.
        base: the base checkpoint, checked; needed if the plan starts from it.
        scratch: where to put an anchor's files meanwhile; by default the temp folder.

    Raises:
        CorruptFile, SourceError, BrokenChain, UnsupportedFormat, StageError, StoreUnavailable: see `fetch_anchor`.
    """
    if plan.anchor is None:
        if base is None:
            raise BrokenChain(
                "the way starts from the base checkpoint, which is not at hand",
                file=folder.store.uri,
                hint="Say where the base is: --base FOLDER",
            )
        yield base
        return
    with scratch_folder(parent=scratch) as temporary:
        yield fetch_anchor(folder, plan.anchor, temporary)


@contextlib.contextmanager
def opened_version(
    folder: RunFolder, record: DeltaRecord, specs: Mapping[str, TensorSpec], *, scratch: Path | None = None
) -> Iterator[tuple[DeltaMetadata, list[Change]]]:
    """Fetch, check and decode one version; its local files are gone afterwards.

    Args:
        folder: the run.
        record: the version.
        specs: the run's tensors.
        scratch: where to put its files meanwhile; by default the temp folder.

    Raises:
        CorruptFile, UnsupportedFormat, StageError, StoreUnavailable: see `fetch` and `decode`.
    """
    with _fetched(folder, record, scratch) as (metadata, local):
        with naming(local, folder.store.uri, record.folder):
            changes = decode(metadata, local, specs)
        yield metadata, changes


@contextlib.contextmanager
def streamed_version(
    folder: RunFolder, record: DeltaRecord, specs: Mapping[str, TensorSpec]
) -> Iterator[Iterator[Change]]:
    """As `opened_version`, a few blocks at a time in memory; the parts of a tensor come one by one.

    Raises:
        CorruptFile, UnsupportedFormat, StageError, StoreUnavailable: see `fetch` and `iter_decoded`.
    """
    with streamed_entries(folder, record, specs) as entries:
        yield (change for _, change in entries)


@contextlib.contextmanager
def streamed_entries(
    folder: RunFolder, record: DeltaRecord, specs: Mapping[str, TensorSpec], *, scratch: Path | None = None
) -> Iterator[Iterator[tuple[TensorEntry, Change]]]:
    """As `streamed_version`, each change with what metadata says of it.

    Raises:
        CorruptFile, UnsupportedFormat, StageError, StoreUnavailable: see `fetch` and `iter_decoded`.
    """
    with _fetched(folder, record, scratch) as (metadata, local):
        yield _entries(folder, record, metadata, local, specs)


def _entries(
    folder: RunFolder, record: DeltaRecord, metadata: DeltaMetadata, local: Path, specs: Mapping[str, TensorSpec]
) -> Iterator[tuple[TensorEntry, Change]]:
    decoded = iter_decoded(metadata, local, specs)
    while True:
        with naming(local, folder.store.uri, record.folder):
            found = next(decoded, None)
        if found is None:
            return
        yield metadata.tensors[found[0]], found[1]


@contextlib.contextmanager
def _fetched(folder: RunFolder, record: DeltaRecord, scratch: Path | None) -> Iterator[tuple[DeltaMetadata, Path]]:
    metadata = folder.read_metadata(record)
    with scratch_folder(parent=scratch) as temporary:
        fetch(folder.store, record, metadata, temporary)
        yield metadata, temporary
