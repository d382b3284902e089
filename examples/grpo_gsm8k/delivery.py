# SPDX-License-Identifier: Apache-2.0
"""The two ways in which servers come to a version: the trainer brings it, or followers beside them do.

This is all of the example that knows how weights travel.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from trainer_hooks import DeltaPublisher, PublishReport
from vllm_delta_snapshot.drive import DeltaSync


@dataclass(frozen=True, slots=True)
class Delivered:
    """What became of one version.

    Attributes:
        published: sizes, density and seconds of the publication.
        seconds: from the call until the servers serve it, or until it is in the store if nobody waits for them.
        pause_s: longest time that a server stood still; ``None`` if nobody waited for them.
    """

    published: PublishReport
    seconds: float
    pause_s: float | None


class Delivery(Protocol):
    """Publishes the weights as they are, and sees to it that servers sample from them."""

    def begin(self) -> None:
        """Have the servers ready for the first rollouts."""
        ...

    def bring(self, step: int, metrics: Mapping[str, float]) -> Delivered:
        """Publish, and return when the next rollouts may be sampled. Blocks."""
        ...


class Pushed:
    """The trainer tells every server to take the version. Servers and trainer reach each other.

    Args:
        publisher: the run.
        servers: URLs of the servers.
        sync_dir: the run's folder, as the servers reach it.
    """

    def __init__(self, publisher: DeltaPublisher, servers: Sequence[str], sync_dir: str) -> None:
        self._publisher = publisher
        self._fleet = DeltaSync(servers, sync_dir=sync_dir, api_key=os.environ.get("VLLM_API_KEY"))

    def begin(self) -> None:
        """Have the servers look at the run, so that staging begins before the first version.

        Raises:
            DeltaSnapshotError: a server cannot take updates of this checkpoint; it says why.
        """
        self._fleet.init()

    def bring(self, step: int, metrics: Mapping[str, float]) -> Delivered:
        """See `Delivery`. Raises: DeltaSnapshotError."""
        started = time.monotonic()
        publication = self._publisher.publish(step=step, metrics=metrics)
        report = self._fleet.sync(publication.wait().version, run_id=self._publisher.run_id)
        report.check()
        pauses = [server.update.pause_s for server in report.servers if server.update is not None]
        return Delivered(publication.report, time.monotonic() - started, max(pauses))


class Followed:
    """`delta-snapshot follow` beside each server takes the version; the store is all that both sides reach.

    Args:
        publisher: the run.
        samplers: names of the followers to wait for. Without any the next rollouts are sampled at once, from whatever
            version the servers have: the policy's clipped ratio is made for that.
        timeout_s: how long to wait for them.
    """

    def __init__(self, publisher: DeltaPublisher, samplers: Sequence[str], timeout_s: float) -> None:
        self._publisher, self._samplers, self._timeout_s = publisher, samplers, timeout_s

    def begin(self) -> None:
        """Wait for the followers: they begin when the run exists, which is since the publisher was made.

        Raises:
            StageError: one does not answer in time.
        """
        if self._samplers:
            self._publisher.wait_applied(self._samplers, timeout_s=self._timeout_s)

    def bring(self, step: int, metrics: Mapping[str, float]) -> Delivered:
        """See `Delivery`. Raises: DeltaSnapshotError."""
        started = time.monotonic()
        publication = self._publisher.publish(step=step, metrics=metrics)
        report = publication.wait()
        if not self._samplers:
            return Delivered(report, time.monotonic() - started, None)
        said = self._publisher.wait_applied(self._samplers, version=report.version, timeout_s=self._timeout_s)
        return Delivered(report, time.monotonic() - started, max(one.pause_s for one in said.values()))
