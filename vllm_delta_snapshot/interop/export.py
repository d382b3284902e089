# SPDX-License-Identifier: Apache-2.0
"""Export: what changes between two versions of a run, or of a SkyRL chain, as a folder that OpenRL reads.

OpenRL's deltas hold absolute values. Where a run holds differences, the values are rebuilt from the base checkpoint,
for the tensors concerned only (in memory), and every step of it is proven by its digests.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_delta_snapshot.changes.merge import merge
from vllm_delta_snapshot.changes.resolve import resolve_entry
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import OutOfOrder
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.openrl_write import PlannedOpenRLDelta, plan_openrl_delta
from vllm_delta_snapshot.format.version import DeltaRecord
from vllm_delta_snapshot.interop.chain import ForeignChain
from vllm_delta_snapshot.interop.replay import Overlay, merge_chain
from vllm_delta_snapshot.runs.replay import check_base, opened_version, plan_from_base
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.types import Change, TensorDifference, TensorPatch
from vllm_delta_snapshot.util.new_folder import new_folder

__all__ = ["ExportReport", "export_chain", "export_run"]

Progress = Callable[[int, int], None]
"""Called with (versions rebuilt, versions in all)."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was written."""

    folder: str
    base_version: int
    version: int
    changed_tensors: int
    changed_elements: int
    payload_bytes: int


def export_run(
    folder: RunFolder,
    out: Path,
    *,
    after: int,
    version: int,
    find_base: Callable[[], Checkpoint],
    progress: Progress | None = None,
) -> ExportReport:
    """Write what changes between two versions of a run to the new folder `out`. Blocks.

    Args:
        folder: the run.
        out: must not exist, or be empty.
        after: the version that the delta starts from.
        version: the version that it leads to.
        find_base: returns the base checkpoint; asked only if the run holds differences.
        progress: told after every version that had to be rebuilt.

    Raises:
        OutOfOrder: `version` is not after `after`.
        BrokenChain, CorruptFile, LimitExceeded, StoreUnavailable: the run cannot lead there.
        BaseMismatch, SourceError: the base is not the run's base checkpoint.
        UnsupportedFormat: a changed tensor is not of floating point, or the run cannot be read.
        StageError: `out` is in use or cannot be written.
    """
    _check_order(after, version)
    run = folder.read_run()
    steps = plan_from_base(folder, version).steps
    with contextlib.ExitStack() as opened:  # uncompressed changes are views of the files
        of_versions = [opened.enter_context(opened_version(folder, step, run.specs())) for step in steps[after:]]
        merged = [change for change in merge(changes for _, changes in of_versions) if change.changed]
        names = {change.spec.name for change in merged if isinstance(change, TensorDifference)}
        state = _rebuild(folder, steps, names, find_base, progress) if names else None
        planned = plan_openrl_delta(
            [_absolute(change, state) for change in merged],
            total_elements=run.base.total_elements,
            base_model=of_versions[-1][0].base_model,
            model_id=f"{run.run_id}@{version}",
        )
        return _write(planned, out, after, version)


def export_chain(chain: ForeignChain, base: Checkpoint, out: Path, *, after: int) -> ExportReport:
    """Write what changes in a SkyRL chain after version `after` to the new folder `out`. Blocks.

    Args:
        chain: the chain, from its base to the version to export.
        base: the checkpoint that it starts from.
        out: must not exist, or be empty.
        after: the version that the delta starts from.

    Raises:
        OutOfOrder: the chain does not lead past `after`, or starts after it.
        BrokenChain, CorruptFile, UnsupportedFormat, LimitExceeded, ObjectNotFound, StoreUnavailable: it cannot be read,
            or holds a changed tensor that is not of floating point.
        StageError: `out` is in use or cannot be written.
    """
    version, start = chain.version or 0, chain.base_version or 0
    _check_order(after, version)
    if after < start:
        raise OutOfOrder(
            "the chain starts later",
            file=str(chain.deltas[0].folder),
            expected=f"a delta from version {start} or later",
            found=after,
            hint=f"Name it: --from {start}",
        )
    patches = merge_chain(chain, base, after=after)
    planned = plan_openrl_delta(patches, total_elements=base.total_elements, base_model=None, model_id=None)
    return _write(planned, out, after, version)


def _check_order(after: int, version: int) -> None:
    if version <= after:
        raise OutOfOrder(
            "a delta leads to a later version",
            expected=f"a version after {after}",
            found=f"version {version}",
            hint="Version 0 is the base checkpoint itself; name a later version, or an earlier one with --from.",
        )


def _rebuild(
    folder: RunFolder,
    steps: Sequence[DeltaRecord],
    names: Collection[str],
    find_base: Callable[[], Checkpoint],
    progress: Progress | None,
) -> Overlay:
    """Return the state after all steps, of these tensors."""
    base = find_base()
    check_base(folder.read_run(), base)
    state = Overlay(base)
    for done, step in enumerate(steps, start=1):
        with opened_version(folder, step, base.specs) as (metadata, changes):
            for entry, change in zip(metadata.by_tensor, changes, strict=True):
                if entry.name in names:
                    state.write(resolve_entry(entry, change, state.bits))
        if progress:
            progress(done, len(steps))
    return state


def _absolute(change: Change, state: Overlay | None) -> TensorPatch:
    if isinstance(change, TensorPatch):
        return change
    assert state is not None  # noqa: S101 - it was rebuilt for the tensors of all differences
    return TensorPatch(change.spec, change.positions, state.bits(change.spec.name)[change.positions])


def _write(planned: PlannedOpenRLDelta, out: Path, after: int, version: int) -> ExportReport:
    out = out.resolve()  # now: it may be the current folder, which is replaced
    with new_folder(out) as work:
        _write_file(work / planned.payload.name, planned.payload.chunks())
        _write_file(work / layout.METADATA_NAME, [memoryview(planned.metadata.to_json())])
    return ExportReport(
        folder=str(out),
        base_version=after,
        version=version,
        changed_tensors=len(planned.metadata.layer_names),
        changed_elements=planned.metadata.changed_elements,
        payload_bytes=planned.payload.num_bytes,
    )


def _write_file(path: Path, chunks: Iterable[memoryview]) -> None:
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
