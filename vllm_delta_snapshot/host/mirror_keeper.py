# SPDX-License-Identifier: Apache-2.0
"""Keep the mirror at the version that a worker last asked for; make it anew when it is not what it says.

Part of the stager. The mirror moves only when asked, and never while a worker holds it; so it may stay behind the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import BaseMismatch, BrokenChain, FormatError, MirrorBusy, StoreError, VerifyError
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.host.area import StageArea
from vllm_delta_snapshot.host.mirror import Mirror
from vllm_delta_snapshot.types import TensorPatch

__all__ = ["MirrorKeeper"]

logger = logging.getLogger(__name__)

UpdateBetween = Callable[[int, int], tuple[DeltaMetadata, list[TensorPatch]]]
"""Returns the update from one version to another, staged, of absolute values."""


class MirrorKeeper:
    """See the module.

    Args:
        area: where the mirror lies.
        checkpoint: what it is made from.
        run_id: the run.
        version: the version that the checkpoint is.
    """

    def __init__(self, area: StageArea, checkpoint: Checkpoint, run_id: str, version: int) -> None:
        self._area = area
        self._checkpoint = checkpoint
        self._run_id = run_id
        self._version = version

    def keep(self, target: int, update_between: UpdateBetween) -> None:
        """Bring the mirror to `target`, or as far as can be. Blocks; does nothing while a worker holds it.

        Raises:
            DeltaSnapshotError: it cannot be made or moved.
        """
        try:
            mirror = self._open()
            version = mirror.advancing_to.version if mirror.advancing_to else target
            if version == mirror.version and not mirror.is_torn:
                return
            try:
                metadata, patches = update_between(mirror.version, version)
                mirror.advance(
                    patches,
                    version=version,
                    state_digest=metadata.state_digest,
                    old_digests={entry.name: entry.old_digest for entry in metadata.by_tensor if entry.old_digest},
                )
            except (BaseMismatch, BrokenChain, VerifyError) as error:
                # Its weights are not what its marker says: somebody else wrote them. Or the deltas from where it is on
                # were pruned; from the checkpoint there is an anchor.
                if isinstance(error, BrokenChain) and mirror.version == self._version:
                    raise
                logger.warning("making the mirror anew: %s", error)
                Mirror.remove(self._area.mirror)
            else:
                logger.info("mirror version=%d", version)
        except MirrorBusy:
            logger.debug("the mirror is held; trying again")

    def at(self, version: int) -> Mirror | None:
        """Return the mirror if it is at `version` now; it stands still until the next `keep`."""
        try:
            mirror = Mirror.open(self._area.mirror)
        except (FormatError, StoreError):
            return None  # `keep` makes it anew
        is_there = mirror is not None and mirror.run_id == self._run_id and not mirror.is_torn
        return mirror if mirror is not None and is_there and mirror.version == version else None

    def _open(self) -> Mirror:
        try:
            mirror = Mirror.open(self._area.mirror)
            if mirror is not None and mirror.run_id == self._run_id:
                return mirror
        except (FormatError, StoreError) as error:
            logger.warning("making the mirror anew: %s", error)
        Mirror.remove(self._area.mirror)
        return Mirror.create(
            self._area.mirror,
            self._checkpoint,
            run_id=self._run_id,
            version=self._version,
            state_digest=self._checkpoint.state_digest,
        )
