# SPDX-License-Identifier: Apache-2.0
"""What a publisher gives back, what it notes beside a version, and what it needs of a fleet of engines."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Protocol, SupportsIndex, TypeVar

from trainer_hooks.publication.background import Task
from trainer_hooks.publication.use import not_to_be_copied
from vllm_delta_snapshot.errors import NotPublished

__all__ = ["Fleet", "Publication", "PublishReport"]

logger = logging.getLogger(__name__)

R = TypeVar("R", covariant=True)


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What one publication was.

    Attributes:
        run_id: the run.
        version: the version it made.
        changed_elements: elements that changed since the version before.
        total_elements: elements of the checkpoint.
        changed_tensors: tensors with at least one change.
        payload_bytes: bytes of its payload files.
        checkpoint_bytes: bytes of the whole checkpoint, for comparison.
        folder: its folder under sync_dir.
        diff_s: seconds for the comparison.
        total_s: seconds from the call to the commit.
        blocked_s: seconds of these for which the call blocked: for the publication before, and for the diff.
    """

    run_id: str
    version: int
    changed_elements: int
    total_elements: int
    changed_tensors: int
    payload_bytes: int
    checkpoint_bytes: int
    folder: str
    diff_s: float
    total_s: float
    blocked_s: float

    @property
    def density(self) -> float:
        """Changed elements / total elements."""
        return self.changed_elements / max(1, self.total_elements)

    def log(self) -> None:
        """Write the line of a committed version."""
        logger.info(
            "published version=%d changed=%d density=%.5f tensors=%d bytes=%d diff_s=%.3f blocked_s=%.3f total_s=%.3f",
            self.version,
            self.changed_elements,
            self.density,
            self.changed_tensors,
            self.payload_bytes,
            self.diff_s,
            self.blocked_s,
            self.total_s,
        )


class Publication:
    """The handle of a publication: under way, committed, failed, or skipped. Any thread may use it.

    Args:
        version: the version that it makes; ``None`` if it was skipped.
        outcome: its report, or the work that will have one; ``None`` if it was skipped.
    """

    def __init__(self, version: int | None, outcome: Task[PublishReport] | PublishReport | None) -> None:
        self._version = version
        self._outcome = outcome

    @property
    def is_skipped(self) -> bool:
        """Whether the call found an earlier publication still running, and left its changes to the next call."""
        return self._outcome is None

    @property
    def version(self) -> int:
        """The version it makes; exists once it is committed. Does not block.

        Raises:
            NotPublished: it was skipped, and makes none.
        """
        if self._version is None:
            raise _skipped()
        return self._version

    @property
    def report(self) -> PublishReport:
        """What it was: `wait` without a limit."""
        return self.wait()

    def done(self) -> bool:
        """Say whether it has ended, well or not, or never began. Does not block."""
        return not isinstance(self._outcome, Task) or self._outcome.join(0)

    def wait(self, timeout_s: float | None = None) -> PublishReport:
        """Return the report once the version is committed. Blocks.

        Args:
            timeout_s: how long at most; ``None`` for no limit.

        Raises:
            NotPublished: it was skipped or abandoned, still runs after this time, or runs in the process that this one
                was forked from.
            VersionConflict: another trainer is publishing into this run.
            StoreError, StoreUnavailable: it failed; the next publication carries its changes.
        """
        if self._outcome is None:
            raise _skipped()
        return self._outcome.result(timeout_s) if isinstance(self._outcome, Task) else self._outcome

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        if isinstance(self._outcome, Task):
            raise not_to_be_copied("the handle of a publication")
        return super().__reduce_ex__(protocol)


class Fleet(Protocol[R]):
    """Engines that can be brought to a version."""

    def sync(self, version: int, *, run_id: str | None = None, state_digest: str | None = None) -> R:
        """Bring them there, and report."""
        ...


def _skipped() -> NotPublished:
    return NotPublished(
        "the call was skipped, since the publication before it was still running",
        hint="The next publication carries its changes; ask is_skipped before.",
    )
