# SPDX-License-Identifier: Apache-2.0
"""Materialize: base checkpoint, or an anchor, + deltas -> a plain Hugging Face folder at version N, bit for bit.

The start's files are copied with their headers, and the patches written into the copies; so shards, order, tokenizer
and configuration are those of the base. The result appears under its name only when its state digest has been
recomputed from its bytes and is the one that the trainer published.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm_delta_snapshot.changes.resolve import resolve_all
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.checkpoint.patch_files import copy_checkpoint, write_patches
from vllm_delta_snapshot.errors import BrokenChain, VerifyError
from vllm_delta_snapshot.runs.fetch_anchor import fetch_anchor
from vllm_delta_snapshot.runs.replay import RunPlan, check_base, opened_version, plan_run
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.util.new_folder import new_folder

__all__ = ["PROVENANCE_NAME", "MaterializeReport", "materialize"]

PROVENANCE_NAME = "delta_snapshot.json"
"""A small file beside the weights that says which version of which run they are. Nothing depends on it."""

Progress = Callable[[int, int], None]
"""Called with (deltas applied, deltas in all)."""


@dataclass(frozen=True, slots=True)
class MaterializeReport:
    """What was made.

    Attributes:
        folder: where it lies.
        run_id: the run.
        version: the version that it is.
        state_digest: its state digest.
        changed_elements: elements of all deltas that were applied.
        anchor: the version of the anchor that it was made from; ``None`` if from the base.
    """

    folder: str
    run_id: str
    version: int
    state_digest: str
    changed_elements: int
    anchor: int | None = None


def materialize(
    folder: RunFolder,
    base: Checkpoint | None,
    version: int,
    out: Path,
    *,
    progress: Progress | None = None,
) -> MaterializeReport:
    """Write version `version` of a run to the new folder `out`. Blocks.

    Args:
        folder: the run.
        base: the base checkpoint, local; ``None`` if it is not at hand: then there has to be an anchor.
        version: the version; 0 is the base itself.
        out: must not exist, or be empty.
        progress: told after every delta.

    Raises:
        BaseMismatch: `base` is not the run's base checkpoint.
        BrokenChain, CorruptFile, UnsupportedFormat: the run cannot lead there.
        VerifyError: the result is not what was published; nothing is left behind.
        StageError: `out` is in use or cannot be written.
    """
    run = folder.read_run()
    plan = plan_run(folder, version, start=None if base is None else (0, run.base.state_digest))
    if plan.anchor is None and base is not None:
        check_base(run, base)
    out = out.resolve()  # now: it may be the current folder, which is replaced
    with new_folder(out) as work:
        changed = _build(folder, base, plan, work, progress)
        _check(work, plan)
        provenance = {"run_id": run.run_id, "version": version, "state_digest": plan.chain.state_digest}
        (work / PROVENANCE_NAME).write_text(json.dumps(provenance, indent=1) + "\n")
    anchor = None if plan.anchor is None else plan.anchor.version
    return MaterializeReport(str(out), run.run_id, version, plan.chain.state_digest, changed, anchor)


def _build(folder: RunFolder, base: Checkpoint | None, plan: RunPlan, work: Path, progress: Progress | None) -> int:
    if plan.anchor is not None:
        made = fetch_anchor(folder, plan.anchor, work)
    elif base is not None:
        copy_checkpoint(base, work)
        made = Checkpoint(work)  # mapped, so that it shows what is written
    else:
        raise BrokenChain("a way from the base without the base", file=folder.store.uri)  # `plan_run` makes none
    changed = 0
    for done, record in enumerate(plan.chain.steps, start=1):
        with opened_version(folder, record, made.specs, scratch=work) as (metadata, changes):
            write_patches(made, work, resolve_all(metadata, changes, made.bits))
        changed += metadata.changed_elements
        if progress:
            progress(done, len(plan.chain.steps))
    return changed


def _check(work: Path, plan: RunPlan) -> None:
    found = Checkpoint(work).state_digest
    if found != plan.chain.state_digest:
        raise VerifyError(
            f"version {plan.chain.version} came out with other weights than were published",
            file=str(work),
            expected=f"state digest {plan.chain.state_digest}",
            found=f"state digest {found}",
            hint="Check the run: delta-snapshot verify <sync_dir>",
        )
