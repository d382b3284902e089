# SPDX-License-Identifier: Apache-2.0
"""What is published, as one rank of several knows it: the newest version, this rank's part of it, and how both move.

Invariant: version, digest, baseline and fingerprints are those of one committed version. They move together, after its
commit and never before. Where moving stops half-way the version is already the new one, and the run is read again.

Belongs to one thread at a time, as `trainer_hooks.publication.published`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from trainer_hooks.compare.audit import Turns
from trainer_hooks.compare.device_diff import DeviceDiff
from trainer_hooks.compare.shard_baseline import ShardBaseline
from trainer_hooks.compare.shard_differ import ShardDiffer, ShardFingerprints
from trainer_hooks.publication.commit import is_committed
from trainer_hooks.publication.kept import KeptChanges
from trainer_hooks.publication.published import Head
from trainer_hooks.publication.shard_audit import ShardAudit
from trainer_hooks.publication.shard_opening import Opened, bring
from trainer_hooks.source.shards import Shard, ShardSource
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import VerifyError
from vllm_delta_snapshot.format.digest import add_digests
from vllm_delta_snapshot.format.version import VersionRecord
from vllm_delta_snapshot.runs.own_run import OwnRun
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.types import TensorSpec

__all__ = ["ShardAttempt", "ShardPublished"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class ShardAttempt:
    """What one rank wrote of a publication whose outcome it does not know yet.

    Attributes:
        changes: what it wrote.
        fingerprints: those of the pass that found it.
        move: what it adds to this rank's part of the state digest.
    """

    changes: KeptChanges
    fingerprints: ShardFingerprints
    move: int


class ShardPublished:
    """See the module.

    Args:
        opened: what `open_sharded` found.

    Attributes:
        head: the newest version; replaced as a whole, so any thread may look at it.
        baseline: this rank's elements there.
        attempt: what may be committed next.
        tie: tied weights that must stay equal.
        record: on rank 0, a commit that was asked for and whose answer did not come.
    """

    def __init__(self, opened: Opened) -> None:
        self.head = Head(opened.version, opened.state_digest)
        self.baseline: ShardBaseline = opened.baseline
        self.attempt: ShardAttempt | None = None
        self.record: VersionRecord | None = None
        self._shards = opened.shards
        self._owned: Mapping[int, Shard] = opened.owned
        self._kept = opened.kept
        self.tie = opened.unsourced.tie
        self._digest = opened.baseline.digest()
        self._fingerprints: ShardFingerprints = {}
        self._is_moving = False

    def differ(self, source: ShardSource, device_diff: DeviceDiff, turns: Turns | None = None) -> ShardDiffer:
        """Return a pass that compares a source with what is published, and audits its turn of that."""
        sourced = {number: shard for number, shard in self._owned.items() if number not in self._kept}
        return ShardDiffer(source, sourced, self.baseline, self._fingerprints, device_diff, turns, self.tie)

    def audit(self, source: ShardSource, specs: Mapping[str, TensorSpec]) -> ShardAudit:
        """Return a pass that audits all that this rank holds. The next comparison believes no fingerprint."""
        self._fingerprints = {}
        return ShardAudit(source, self._shards, self._owned, self.baseline, specs, self._kept)

    def mend(self, folder: RunFolder, base: Checkpoint) -> bool:
        """Make this rank's part whole again if moving it was interrupted; say whether it was. Blocks if so.

        Raises:
            VerifyError: the run does not lead to what this rank published.
            BrokenChain, CorruptFile, StoreUnavailable: the run cannot be read.
        """
        if not self._is_moving:
            return False
        logger.warning("a publication was interrupted after its commit; reading the run again")
        bring(self.baseline, folder, base, self.head.version)
        if self.baseline.digest() != self._digest:
            raise VerifyError(
                "the run does not lead to the state that this rank published",
                file=folder.store.uri,
                hint=f"Find the damage: delta-snapshot verify {folder.store.uri}; then start the trainer again.",
            )
        self._fingerprints = {}
        self._is_moving = False
        return True

    def find_out(self, own: OwnRun) -> str | None:
        """On rank 0: find out what became of a commit whose answer never came. Blocks only if there was one.

        Returns:
            The state digest of the version that was committed; ``None`` if none was.

        Raises:
            RunMismatch, VersionConflict: see `trainer_hooks.publication.commit.is_committed`.
            StoreError, StoreUnavailable: it cannot be found out now; ask again.
        """
        if (record := self.record) is None:
            return None
        found = is_committed(own, record)
        self.record = None
        return record.state_digest if found else None

    def adopt(self, state_digest: str) -> None:
        """Move to the version that was attempted and is committed."""
        attempt = self.attempt
        assert attempt is not None  # noqa: S101 - a version is committed when all ranks have written
        self._is_moving = True  # before the version: where moving stops, differences cannot be added again
        self.head = Head(self.head.version + 1, state_digest)
        self._digest = add_digests(self._digest, attempt.move)
        self.attempt = None
        self.baseline.advance(attempt.changes.changes())
        self._fingerprints = attempt.fingerprints
        self._is_moving = False
