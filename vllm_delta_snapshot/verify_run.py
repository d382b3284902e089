# SPDX-License-Identifier: Apache-2.0
"""Verify a whole run in its store: every record, every file, every patch, and that the chain holds together.

Goes on after a problem, so that one damaged file is told from ten. Reads every byte of every version; writes nothing
into the store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_delta_snapshot.errors import BaseMismatch, BrokenChain, DeltaSnapshotError, StoreUnavailable
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.version import VersionRecord
from vllm_delta_snapshot.run_folder import RunFolder
from vllm_delta_snapshot.stage.replay import opened_version

__all__ = ["RunProblem", "RunVerification", "verify_run"]

Progress = Callable[[int, int, int], None]
"""Called with (versions done, versions in all, bytes read so far)."""


@dataclass(frozen=True, slots=True)
class RunProblem:
    """Something wrong with one version."""

    version: int
    error: DeltaSnapshotError


@dataclass(slots=True)
class RunVerification:
    """What was found.

    Attributes:
        run_id: the run.
        versions: how many versions were looked at.
        newest: the newest version.
        payload_bytes: bytes of payload read and found good.
        changed_elements: elements of all good versions.
        problems: what is wrong, in order of version.
        leftovers: folders of publications that were never committed: harmless, left by a crash.
    """

    run_id: str
    versions: int = 0
    newest: int = 0
    payload_bytes: int = 0
    changed_elements: int = 0
    problems: list[RunProblem] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify_run(folder: RunFolder, *, progress: Progress | None = None) -> RunVerification:
    """Look at every version of a run. Blocks.

    Args:
        folder: the run.
        progress: told after every version.

    Returns:
        What was found; problems are in it, not raised.

    Raises:
        ObjectNotFound, CorruptFile, UnsupportedFormat: there is no readable run.json.
        StoreUnavailable: the store went away.
    """
    run = folder.read_run()
    specs = run.specs()
    existing = folder.versions()
    result = RunVerification(run.run_id, versions=len(existing), newest=max(existing, default=0))
    expected_version, expected_digest = 0, run.base.state_digest
    committed: set[str] = set()
    for done, version in enumerate(existing, start=1):
        try:
            record = folder.read_version(version)
            committed.add(record.folder)
            expected = (expected_version, expected_digest)
            expected_version, expected_digest = version, record.state_digest
            _check_link(record, *expected)
            with opened_version(folder, record, specs):
                pass  # that it opens is the check
        except StoreUnavailable:
            raise
        except DeltaSnapshotError as error:
            result.problems.append(RunProblem(version, error))
        else:
            result.payload_bytes += record.payload_bytes
            result.changed_elements += record.changed_elements
        if progress:
            progress(done, len(existing), result.payload_bytes)
    result.leftovers = [name for name in _delta_folders(folder) if name not in committed]
    return result


def _check_link(record: VersionRecord, version: int, state_digest: str) -> None:
    if record.version != version + 1:
        raise BrokenChain(
            f"nothing leads to version {record.version}",
            expected=f"version {version + 1}",
            found="it is missing",
            hint="Engines that have not passed this gap cannot cross it.",
        )
    if (record.base_version, record.base_state_digest) != (version, state_digest):
        raise BaseMismatch(
            f"version {record.version} does not continue version {version}",
            expected=f"base version {version} with state digest {state_digest}",
            found=f"base version {record.base_version} with state digest {record.base_state_digest}",
        )


def _delta_folders(folder: RunFolder) -> list[str]:
    return [f"{layout.DELTAS_FOLDER}/{name}" for name in folder.store.list(layout.DELTAS_FOLDER)]
