# SPDX-License-Identifier: Apache-2.0
"""Materialize: base checkpoint + deltas -> a plain Hugging Face folder at version N, bit for bit.

The base's files are copied with their headers, and the patches written into the copies; so shards, order, tokenizer
and configuration are those of the base. The result appears under its name only when its state digest has been
recomputed from its bytes and is the one that the trainer published.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vllm_delta_snapshot.chain import ChainPlan, plan_chain
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import BaseMismatch, DeltaSnapshotError, StageError, VerifyError
from vllm_delta_snapshot.run_folder import RunFolder
from vllm_delta_snapshot.stage.decode import decode
from vllm_delta_snapshot.stage.fetch import fetch
from vllm_delta_snapshot.types import TensorPatch

__all__ = ["PROVENANCE_NAME", "MaterializeReport", "materialize", "patch_checkpoint_copy"]

PROVENANCE_NAME = "delta_snapshot.json"
"""A small file beside the weights that says which version of which run they are. Nothing depends on it."""

Progress = Callable[[int, int], None]
"""Called with (versions applied, versions in all)."""


@dataclass(frozen=True, slots=True)
class MaterializeReport:
    """What was made."""

    folder: str
    run_id: str
    version: int
    state_digest: str
    changed_elements: int


def materialize(
    folder: RunFolder,
    base: Checkpoint,
    version: int,
    out: Path,
    *,
    progress: Progress | None = None,
) -> MaterializeReport:
    """Write version `version` of a run to the new folder `out`. Blocks.

    Args:
        folder: the run.
        base: the base checkpoint, local.
        version: the version; 0 is the base itself.
        out: must not exist, or be empty.
        progress: told after every version.

    Raises:
        BaseMismatch: `base` is not the run's base checkpoint.
        BrokenChain, CorruptFile, UnsupportedFormat: the run cannot lead there.
        VerifyError: the result is not what was published; nothing is left behind.
        StageError: `out` is in use or cannot be written.
    """
    run = folder.read_run()
    specs = dict(run.specs())
    base.check_fits(specs, what=f"run {run.run_id}")
    if base.state_digest != run.base.state_digest:
        raise BaseMismatch(
            "this is not the base checkpoint of the run",
            file=str(base.folder),
            expected=f"state digest {run.base.state_digest} ({run.base.name})",
            found=f"state digest {base.state_digest}",
        )
    plan = plan_chain(
        folder.versions(),
        folder.read_version,
        base_version=0,
        base_state_digest=run.base.state_digest,
        version=version,
    )
    out = out.resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StageError("the output is not an empty folder", file=str(out), hint="Give a new folder.")
    work = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}")
    try:
        changed = _build(folder, base, plan, work, progress)
        _check(work, plan)
        provenance = {"run_id": run.run_id, "version": version, "state_digest": plan.state_digest}
        (work / PROVENANCE_NAME).write_text(json.dumps(provenance, indent=1) + "\n")
        if out.exists():
            out.rmdir()
        work.rename(out)
    except DeltaSnapshotError:
        raise
    except OSError as error:
        raise StageError("cannot write the output", file=str(out), found=error) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return MaterializeReport(str(out), run.run_id, version, plan.state_digest, changed)


def patch_checkpoint_copy(checkpoint: Checkpoint, out: Path, versions: Sequence[Sequence[TensorPatch]]) -> None:
    """Copy a checkpoint's folder to `out` and write patches into the copy, in order.

    Raises:
        OSError: `out` cannot be written.
    """
    _copy(checkpoint, out)
    for patches in versions:
        _write_patches(checkpoint, out, patches)


def _build(folder: RunFolder, base: Checkpoint, plan: ChainPlan, work: Path, progress: Progress | None) -> int:
    specs = dict(folder.read_run().specs())
    _copy(base, work)
    fetched = work / ".fetched"
    changed = 0
    for done, record in enumerate(plan.steps, start=1):
        metadata = folder.read_metadata(record)
        fetch(folder.store, record, metadata, fetched)
        _write_patches(base, work, decode(metadata, fetched, specs))
        changed += metadata.changed_elements
        shutil.rmtree(fetched)
        if progress:
            progress(done, len(plan.steps))
    return changed


def _copy(checkpoint: Checkpoint, out: Path) -> None:
    weights = {file.path.name for file in checkpoint.files}
    out.mkdir(parents=True, exist_ok=True)
    for path in checkpoint.folder.iterdir():
        is_other_weights = path.name.endswith((".safetensors", ".bin", ".pt", ".pth", ".gguf"))
        if path.is_file() and (path.name in weights or not is_other_weights):
            shutil.copyfile(path, out / path.name)


def _write_patches(checkpoint: Checkpoint, out: Path, patches: Sequence[TensorPatch]) -> None:
    place_of = {name: (file.path.name, file.offset(name)) for file in checkpoint.files for name in file.specs}
    opened: dict[str, np.memmap[tuple[int], np.dtype[np.uint8]]] = {}
    for patch in patches:
        if not patch.changed:
            continue
        file, offset = place_of[patch.spec.name]
        if file not in opened:
            opened[file] = np.memmap(out / file, dtype=np.uint8, mode="r+")
        flat = opened[file][offset : offset + patch.spec.num_bytes].view(patch.spec.element.bits)
        flat[patch.positions] = patch.values
    for data in opened.values():
        data.flush()


def _check(work: Path, plan: ChainPlan) -> None:
    found = Checkpoint(work).state_digest
    if found != plan.state_digest:
        raise VerifyError(
            f"version {plan.version} came out with other weights than were published",
            file=str(work),
            expected=f"state digest {plan.state_digest}",
            found=f"state digest {found}",
            hint="Check the run: delta-snapshot verify <sync_dir>",
        )
