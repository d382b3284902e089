# SPDX-License-Identifier: Apache-2.0
"""Replay a run from its base: the plan of the way there, and each version's changes in turn.

For those who walk a run as a whole (a trainer that resumes, materialize, verify). The stager keeps what it fetched and
does not use this.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from vllm_delta_snapshot.chain import ChainPlan, plan_chain
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import BaseMismatch
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.format.run import RunInfo
from vllm_delta_snapshot.format.version import VersionRecord
from vllm_delta_snapshot.run_folder import RunFolder
from vllm_delta_snapshot.stage.decode import decode
from vllm_delta_snapshot.stage.fetch import fetch
from vllm_delta_snapshot.types import Change, TensorSpec

__all__ = ["check_base", "opened_version", "plan_from_base"]


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
        )


def plan_from_base(folder: RunFolder, version: int) -> ChainPlan:
    """Return the deltas that lead from the base to `version`.

    Raises:
        OutOfOrder, BrokenChain, BaseMismatch: see `plan_chain`.
        CorruptFile, UnsupportedFormat, LimitExceeded, StoreUnavailable: a record cannot be read.
    """
    return plan_chain(
        folder.versions(),
        folder.read_version,
        base_version=0,
        base_state_digest=folder.read_run().base.state_digest,
        version=version,
    )


@contextlib.contextmanager
def opened_version(
    folder: RunFolder, record: VersionRecord, specs: Mapping[str, TensorSpec], *, scratch: Path | None = None
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
    metadata = folder.read_metadata(record)
    with tempfile.TemporaryDirectory(prefix="delta-snapshot-", dir=scratch) as temporary:
        fetch(folder.store, record, metadata, Path(temporary))
        yield metadata, decode(metadata, Path(temporary), specs)
