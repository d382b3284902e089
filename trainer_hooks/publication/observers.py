# SPDX-License-Identifier: Apache-2.0
"""Observers: told of every publication, such as metrics and experiment trackers. What they raise stops no training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from trainer_hooks.publication.publication import PublishReport
from vllm_delta_snapshot.errors import DeltaSnapshotError

__all__ = ["PublishObserver", "tell"]

logger = logging.getLogger(__name__)


class PublishObserver(Protocol):
    """Is told what a publisher does, before anybody who waits for the publication.

    On the thread that commits: unless the publisher is told to do all in the caller's, that is one behind it.
    """

    def published(self, report: PublishReport, step: int | None, metrics: Mapping[str, float]) -> None:
        """A version was committed.

        Args:
            report: what it is.
            step: the optimizer step, as given to `publish`.
            metrics: what else was given to it.
        """
        ...

    def failed(self, error: DeltaSnapshotError) -> None:
        """A publication failed. One that was skipped or given up did not."""
        ...


def tell(observers: Iterable[PublishObserver], what: Callable[[PublishObserver], None]) -> None:
    """Tell every observer. One that fails is named in the log, and the next one is told."""
    for observer in observers:
        try:
            what(observer)
        except Exception:  # a tracker that is down must not stop the training that it watches
            logger.warning("observer=%s failed", type(observer).__name__, exc_info=True)
