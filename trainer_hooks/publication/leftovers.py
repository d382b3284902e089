# SPDX-License-Identifier: Apache-2.0
"""Remove what publications that failed, or trainers that were killed, have left in the run's folder.

Looks after the first commit of a publisher's life, after the first that follows a failure, and when another trainer was
first; else costs nothing. What goes is proven by records (`upkeep.failed_folder`). What cannot be removed
stays for `delta-snapshot prune`, and holds nothing up.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from trainer_hooks.publication.publication import PublishReport
from vllm_delta_snapshot.errors import DeltaSnapshotError, StoreError, StoreUnavailable, VersionConflict
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import Store
from vllm_delta_snapshot.upkeep.failed_folder import superseded_folders
from vllm_delta_snapshot.upkeep.retention import remove_folder

__all__ = ["Leftovers"]

logger = logging.getLogger(__name__)


class Leftovers:
    """See the module. An observer of publications.

    Args:
        store: the run's.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._is_due = True  # for what the life before this one has left
        self._may_delete = True

    def published(self, report: PublishReport, step: int | None, metrics: Mapping[str, float]) -> None:
        """Remove what this version supersedes, if anything may be there."""
        if self._is_due and self._may_delete:
            self._remove()

    def failed(self, error: DeltaSnapshotError) -> None:
        """Have the next commit look; or look at once, if another's commit was first."""
        self._is_due = True
        if isinstance(error, VersionConflict) and self._may_delete:
            self._remove()

    def _remove(self) -> None:
        try:
            folders = superseded_folders(RunFolder(self._store))
            for folder in folders:
                remove_folder(self._store, folder)
        except StoreUnavailable as error:
            logger.info("folders of failed publications stay for now: %s", error)
        except StoreError as error:
            self._may_delete = False
            logger.info("folders of failed publications stay until they are pruned: %s", error)
        except DeltaSnapshotError as error:
            logger.warning("cannot look for folders of failed publications: %s", error)
        else:
            self._is_due = False
            if folders:
                logger.info("removed folders of failed publications: %d", len(folders))
