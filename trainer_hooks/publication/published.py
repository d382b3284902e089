# SPDX-License-Identifier: Apache-2.0
"""What is published: the run's newest version as this trainer knows it, and how it moves on.

Invariant: version, digest, baseline and fingerprints are those of one committed version. They move together, after its
commit and never before, so a publication that fails loses nothing: the next one is compared with the same baseline and
carries its changes too.

Belongs to one thread at a time: to the publisher's, and between the end of a diff and the end of the publication to the
thread behind it. Nobody compares with a baseline that may be about to move.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from trainer_hooks.compare.audit import Turns
from trainer_hooks.compare.device_diff import DeviceDiff
from trainer_hooks.compare.differ import Differ, Fingerprints
from trainer_hooks.publication.commit import commit, is_committed
from trainer_hooks.publication.kept import KeptChanges
from trainer_hooks.publication.resume import PublishedState
from trainer_hooks.source import ParameterSource
from trainer_hooks.source.unsourced import Unsourced
from vllm_delta_snapshot.format.version import VersionRecord
from vllm_delta_snapshot.runs.delta_folder import Lineage
from vllm_delta_snapshot.runs.own_run import OwnRun

__all__ = ["Attempt", "Head", "Published"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Head:
    """The newest version and its state digest."""

    version: int
    state_digest: str

    def lineage(self, run_id: str, total_elements: int) -> Lineage:
        """Return where the next version starts and leads to."""
        return Lineage(
            run_id=run_id,
            version=self.version + 1,
            base_version=self.version,
            base_state_digest=self.state_digest,
            total_elements=total_elements,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Attempt:
    """A publication whose commit is asked for."""

    record: VersionRecord
    changes: KeptChanges
    fingerprints: Fingerprints


class Published:
    """See the module.

    Args:
        state: what `open_run` found.
        unsourced: what becomes of tensors that the source has not; by default it has all.

    Attributes:
        head: the newest version; replaced as a whole, so any thread may look at it.
        baseline: the weights there.
    """

    def __init__(self, state: PublishedState, unsourced: Unsourced | None = None) -> None:
        self._unsourced = unsourced
        self._start_from(state)

    def _start_from(self, state: PublishedState) -> None:
        self.head = Head(state.version, state.state_digest)
        self.baseline = state.baseline
        self._fingerprints: Fingerprints = {}
        self._attempt: Attempt | None = None
        self._is_moving = False

    def differ(
        self, source: ParameterSource, base_model: str, device_diff: DeviceDiff, audit_every: int | None = None
    ) -> Differ:
        """Return a pass that compares a source with what is published, and audits its turn of that."""
        specs = self.baseline.specs
        turns = Turns.of(audit_every, self.head.version + 1, specs.values())
        return Differ(source, specs, self.baseline, base_model, self._fingerprints, device_diff, turns, self._unsourced)

    def forget(self) -> None:
        """Have the next pass believe no fingerprint."""
        self._fingerprints = {}

    def commit(self, own: OwnRun, attempt: Attempt) -> None:
        """Commit a publication whose files are written, and move to it. Blocks.

        Raises:
            RunMismatch, BrokenChain, VersionConflict: see `trainer_hooks.publication.commit.commit`.
            StoreError: it was not committed.
            StoreUnavailable: nobody knows; `settle` finds out.
        """
        self._attempt = attempt
        commit(own, attempt.record)
        self._adopt(attempt)

    def settle(self, own: OwnRun, reopen: Callable[[], PublishedState]) -> bool:
        """Find out what became of an earlier commit whose answer never came. Blocks only if there was one.

        Args:
            own: the run.
            reopen: opens the run again, where a move to a version was broken off.

        Returns:
            Whether it was committed; then it is adopted.

        Raises:
            RunMismatch, VersionConflict: see `trainer_hooks.publication.commit.is_committed`.
            StoreError, StoreUnavailable: it cannot be found out now; ask again.
        """
        if self._is_moving:
            logger.warning("a publication was interrupted after its commit; reading the run again")
            self._start_from(reopen())
            return True
        attempt = self._attempt
        if attempt is None:
            return False
        found = is_committed(own, attempt.record)
        if found:
            logger.warning("version=%d was committed although its answer was lost", attempt.record.version)
            self._adopt(attempt)
        self._attempt = None
        return found

    def _adopt(self, attempt: Attempt) -> None:
        self._is_moving = True  # and if it stops half-way, nobody knows where: differences cannot be added again
        self.baseline.advance(attempt.changes.changes())
        self.head = Head(attempt.record.version, attempt.record.state_digest)
        self._fingerprints = attempt.fingerprints
        self._attempt = None
        self._is_moving = False
