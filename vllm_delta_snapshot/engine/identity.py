# SPDX-License-Identifier: Apache-2.0
"""Is a request meant for this engine? Whoever names a version names its run, and the state that it leads to if known.

Invariant: no request that names a version of another run, or of another state under the same number, is answered with
success. Numbers alone say nothing: two runs of one base both have a version 3.
"""

from __future__ import annotations

from vllm_delta_snapshot.engine.messages import DeltaSnapshotUpdateInfo
from vllm_delta_snapshot.engine.write.updates import Weights
from vllm_delta_snapshot.errors import CompatibilityError, OutOfOrder, RunMismatch

__all__ = ["check_identity", "check_serves", "served"]


def served(at: Weights) -> str:
    """Return which weights an engine serves, as messages say it: ``serves <run id>@<version>``. Drivers look for it."""
    return f"serves {at.run_id}@{at.version}"


def check_identity(info: DeltaSnapshotUpdateInfo, at: Weights, *, sync_dir: str) -> None:
    """Check that a request is about the run that this engine follows, and about the state that it knows.

    Args:
        info: the request.
        at: which weights the engine has; of no run (``""``) nothing is checked, since it knows no versions.
        sync_dir: where its run lies.

    Raises:
        CompatibilityError: a version is named without its run.
        RunMismatch: the run is another, or the engine's own version leads to another state there.
    """
    if not at.run_id or (info.version is None and info.run is None):
        return
    if info.run is None:
        raise CompatibilityError(
            f"the request names version {info.version} without its run, which could be another's",
            expected='{"version": N, "run": run id}',
            found=served(at),
            hint="Upgrade vllm-delta-snapshot where the driver runs (trainer, sync, follow), or give it run_id=.",
        )
    if info.run != at.run_id:
        raise RunMismatch(
            "this engine follows another run",
            file=sync_dir,
            expected=f"run {info.run}",
            found=f"it {served(at)}",
            hint="To move it to the other run of the same base: delta-snapshot sync SYNC_DIR --server URL --switch-run "
            "(or follow --switch-run); or restart it.",
        )
    if info.version == at.version and info.digest is not None and info.digest != at.state_digest:
        raise RunMismatch(
            f"the run has another version {info.version} than the one that this engine serves",
            file=sync_dir,
            expected=f"state digest {info.digest}",
            found=f"it {served(at)} with state digest {at.state_digest}",
            hint="The run's folder was replaced by a copy that went another way. Restart the engine.",
        )


def check_serves(info: DeltaSnapshotUpdateInfo, at: Weights) -> None:
    """Check that the engine has the very version that is named. `check_identity` comes before.

    Raises:
        OutOfOrder: it has another one.
    """
    if info.version != at.version:
        raise OutOfOrder(
            "the engine is not at that version",
            expected=f"version {info.version}",
            found=f"it {served(at)}",
            hint="Another driver moved it. Let one driver alone bring an engine to versions.",
        )
