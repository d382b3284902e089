# SPDX-License-Identifier: Apache-2.0
"""What a publisher gives back, and what it needs of a fleet of engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

__all__ = ["Fleet", "Publication", "PublishReport"]

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
        total_s: seconds for the whole call.
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

    @property
    def density(self) -> float:
        """Changed elements / total elements."""
        return self.changed_elements / max(1, self.total_elements)


@dataclass(frozen=True, slots=True)
class Publication:
    """The handle of a publication. In this version `publish` blocks, so it is always committed.

    Attributes:
        report: what it was.
    """

    report: PublishReport

    @property
    def version(self) -> int:
        """The version it made."""
        return self.report.version

    def wait(self) -> PublishReport:
        """Return the report once the version is committed."""
        return self.report


class Fleet(Protocol[R]):
    """Engines that can be brought to a version."""

    def sync(self, version: int, *, run_id: str | None = None) -> R:
        """Bring them there, and report."""
        ...
