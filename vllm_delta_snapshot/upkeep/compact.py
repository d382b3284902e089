# SPDX-License-Identifier: Apache-2.0
"""Compact: several versions -> one merged delta in the store, for engines that are far behind.

Adds nothing and takes nothing away: who comes by the merged delta ends in the same state, which is compared before the
merged delta appears. Needs no checkpoint. Anybody who may write into the store can do it, anywhere, beside a trainer
and running readers; of two that merge the same versions one wins.
"""

from __future__ import annotations

import logging
import shlex
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import xxhash

from vllm_delta_snapshot.changes.merge import fold
from vllm_delta_snapshot.errors import CorruptFile, OutOfOrder
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.choose import encoding_for
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.format.version import DeltaRecord, MergedRecord
from vllm_delta_snapshot.runs.assemble import assemble_forward
from vllm_delta_snapshot.runs.chain import plan_chain
from vllm_delta_snapshot.runs.delta_folder import DigestedChange, Lineage, WriterNotes, utc_now, write_delta_folder
from vllm_delta_snapshot.runs.own_run import OwnRun
from vllm_delta_snapshot.runs.replay import opened_version
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.types import Change
from vllm_delta_snapshot.upkeep.failed_folder import removed_if_failed
from vllm_delta_snapshot.upkeep.retention import remove_folder
from vllm_delta_snapshot.upkeep.shortcut import commit_shortcut

__all__ = ["CompactReport", "compact"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompactReport:
    """What was merged.

    Attributes:
        base_version: where the merged delta starts.
        version: where it leads.
        deltas: how many deltas it was made of.
        payload_bytes: its bytes.
        merged_bytes: the bytes of what it was made of.
        changed_elements: its changes.
        folder: where it lies in the store.
        existed: whether it was there already; then nothing was written.
    """

    base_version: int
    version: int
    deltas: int
    payload_bytes: int
    merged_bytes: int
    changed_elements: int
    folder: str
    existed: bool = False


def compact(folder: RunFolder, base_version: int, version: int) -> CompactReport:
    """Write the merged delta between two versions. Blocks.

    Args:
        folder: the run.
        base_version: where it starts.
        version: where it leads; at least two versions on.

    Raises:
        OutOfOrder: there is nothing to merge between these versions.
        BrokenChain, BaseMismatch, CorruptFile, UnsupportedFormat: what lies between cannot be had.
        RunMismatch: the folder is another run's by now.
        StoreError, StoreUnavailable: it was not written, or it is not known whether it was; do it again.
    """
    if version < base_version + 2:
        raise OutOfOrder(
            "there is nothing to merge",
            file=folder.store.uri,
            expected="two versions or more",
            found=f"{base_version} to {version}",
            hint=f"See which versions there are: delta-snapshot log {shlex.quote(folder.store.uri)}",
        )
    run = folder.read_run()
    shortcuts = folder.shortcuts()
    own, key = OwnRun(folder.store, run.run_id), layout.merged_key(base_version, version)
    if (base_version, version) in shortcuts.merged:
        if not own.remove_foreign(key):
            return _report(folder.read_merged(base_version, version), (), existed=True)
        shortcuts = folder.shortcuts()
    digest = folder.read_version(base_version).state_digest if base_version else run.base.state_digest
    plan = plan_chain(
        folder.versions(),
        folder.read_delta,
        base_version=base_version,
        base_state_digest=digest,
        version=version,
        shortcuts=shortcuts,
    )
    publication_id = uuid.uuid4().hex
    target = layout.merged_folder(base_version, version, publication_id)
    metadata: list[DeltaMetadata] = []
    steps = fold(_each(folder, plan.steps, metadata))
    lineage = Lineage(run.run_id, version, base_version, digest, run.base.total_elements)
    notes = WriterNotes(base_model=run.base.name, step=metadata[-1].step)
    with removed_if_failed(folder.store, target):
        written = write_delta_folder(
            folder.store, target, publication_id, lineage, _encoded(steps, metadata, run.encodings), lambda: notes
        )
    if written.metadata.state_digest != plan.state_digest:
        remove_folder(folder.store, target)
        raise CorruptFile(
            f"the versions between {base_version} and {version} do not lead there",
            file=folder.store.uri,
            expected=f"state digest {plan.state_digest}",
            found=f"state digest {written.metadata.state_digest}",
            hint=f"Check the run: delta-snapshot verify {folder.store.uri}",
        )
    record = MergedRecord(
        run_id=run.run_id,
        version=version,
        base_version=base_version,
        publication_id=publication_id,
        folder=target,
        metadata_bytes=len(written.data),
        metadata_xxh3_128=xxhash.xxh3_128_hexdigest(written.data),
        payload_bytes=sum(entry.bytes for entry in written.metadata.files),
        changed_elements=written.metadata.changed_elements,
        base_state_digest=digest,
        state_digest=plan.state_digest,
        created_at=utc_now(),
    )
    found = commit_shortcut(own, key, record, lambda: folder.read_merged(base_version, version))
    existed = found.publication_id != publication_id
    if not existed:
        logger.info(
            "merged base=%d version=%d deltas=%d bytes=%d",
            base_version,
            version,
            len(plan.steps),
            record.payload_bytes,
        )
    return _report(found, plan.steps, existed=existed)


def _each(folder: RunFolder, steps: Sequence[DeltaRecord], metadata: list[DeltaMetadata]) -> Iterator[list[Change]]:
    """Yield the changes of each delta, and note its metadata."""
    specs = folder.read_run().specs()
    for record in steps:
        with opened_version(folder, record, specs) as (described, changes):
            metadata.append(described)
            yield changes


def _encoded(
    steps: Sequence[Sequence[Change]], metadata: Sequence[DeltaMetadata], allowed: Sequence[str]
) -> Iterator[DigestedChange]:
    for item in assemble_forward(steps, metadata):
        yield replace(item, encoding=encoding_for(item.change, allowed))


def _report(record: MergedRecord, steps: Sequence[DeltaRecord], *, existed: bool = False) -> CompactReport:
    return CompactReport(
        base_version=record.base_version,
        version=record.version,
        deltas=len(steps),
        payload_bytes=record.payload_bytes,
        merged_bytes=sum(step.payload_bytes for step in steps),
        changed_elements=record.changed_elements,
        folder=record.folder,
        existed=existed,
    )
