# SPDX-License-Identifier: Apache-2.0
"""The worker's side of the stage area: join or start the stager, and find what is staged.

Nothing here reads the store, decodes, or computes: a worker that asks loses microseconds. Waiting is polling a local
file name.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from vllm_delta_snapshot.errors import FormatError, NotStaged, StageError, StoreError, error_of_fields
from vllm_delta_snapshot.format.run import RunInfo
from vllm_delta_snapshot.host.area import StageArea, StagerConfig, StagerState, is_locked
from vllm_delta_snapshot.host.attachment import Attachment
from vllm_delta_snapshot.host.mirror import Mirror
from vllm_delta_snapshot.host.mirror_marker import Pin
from vllm_delta_snapshot.host.places import PlaceMap

__all__ = ["Handoff", "StagedUpdate"]

T = TypeVar("T")

_POLL_S: Final = 0.005
_MOST_DEATHS: Final = 3


@dataclass(frozen=True, slots=True)
class StagedUpdate:
    """Where a staged update lies.

    Attributes:
        patches: in the form of a delta folder.
        mapped: mapped for the worker that asked (see `read_lanes`).
        mirror: the checkpoint at the version it leads to, held still until `Handoff.release`; if one was asked for.
    """

    patches: Path
    mapped: Path
    mirror: Mirror | None = None


class Handoff:
    """A worker's tie to the stager of its host.

    Args:
        config: what to follow.
        root: the folder for stage areas.
        places: where the worker's weights lie.
        needs_mirror: whether the worker has layers that must be reloaded.
        needs_absolute: whether the worker cannot know its old values, so that differences are nothing to it; where the
            run has some, the mirror then turns them into absolute values.
        timeout_s: how long the stager may take to find out which version the checkpoint is. It reads every byte of
            the checkpoint once. ``None`` is not to wait: see `join`, before which nothing else may be asked.

    Attributes:
        start_version: the version that the engine's checkpoint is.
        start_digest: its state digest.
        oldest_version: the earliest version that the engine can be brought back to: the one that the checkpoint is,
            of which the stager makes everything.
        oldest_digest: its state digest.
        is_joined: whether the stager follows the run, and knows of this worker.

    Raises:
        StageError: the stager did not start, or did not get ready in time.
        DeltaSnapshotError: what the stager found wrong with the run, the store or the checkpoint.
    """

    def __init__(
        self,
        config: StagerConfig,
        root: Path,
        places: PlaceMap,
        *,
        timeout_s: float | None,
        needs_mirror: bool = False,
        needs_absolute: bool = False,
    ) -> None:
        self._started_from = Mirror.started_from(Path(config.checkpoint))
        if self._started_from is not None:
            config = config.model_copy(update={"checkpoint": self._started_from.made_from})
        self._first_places = places
        self._needs_mirror = needs_mirror
        self._needs_absolute = needs_absolute
        self._area = StageArea.of(root, config)
        self._attachment = Attachment(self._area)
        self._places = ""
        self._mirror: Mirror | None = None
        self._pin: Pin | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._deaths = 0
        self.is_joined = False
        if timeout_s is not None:
            self.join(timeout_s)

    def join(self, timeout_s: float) -> None:
        """Wait until the stager follows the run, and tell it about this worker. Blocks; the second time does nothing.

        Args:
            timeout_s: how long at most. With 0 it looks once, and may be called again after `NotStaged`.

        Raises:
            NotStaged: the stager is not ready yet, and `timeout_s` is 0.
            StageError: it did not start, or did not get ready in time.
            DeltaSnapshotError: what it found wrong with the run, the store or the checkpoint.
        """
        if self.is_joined:
            return
        try:
            state = self._wait_until_following(timeout_s)
            self.start_version = self.oldest_version = state.start_version
            self.start_digest = self.oldest_digest = state.start_digest
            if self._started_from is not None:
                self.start_version = self._started_from.version
                self.start_digest = self._started_from.state_digest
            self._version = self.start_version
            self._needs_mirror = self._needs_mirror or (self._needs_absolute and self.read_run().has_differences)
            if self._needs_mirror and self._area.read_mirror_target() is None:
                self._area.write(self._area.mirror_target, str(self.start_version).encode())
            self.set_places(self._first_places)
        except NotStaged:
            raise
        except BaseException:
            self.close()
            self._wait_until_gone(timeout_s=5.0)
            raise
        self.is_joined = True

    def read_run(self) -> RunInfo:
        """Return the run that is followed."""
        return RunInfo.from_json(self._area.run.read_bytes(), file=str(self._area.run))

    @property
    def has_mirror(self) -> bool:
        """Whether the host has a mirror, or is making one."""
        return self._area.read_mirror_target() is not None

    def set_version(self, version: int) -> None:
        """Tell the stager that this worker now has `version`."""
        self._version = version
        self._attachment.tell(version, self._places)

    def set_places(self, places: PlaceMap) -> None:
        """Tell the stager where this worker's weights lie.

        Raises:
            StageError: the stage area cannot be written.
        """
        try:
            places.save(self._area.places / places.id)
        except OSError as error:
            raise StageError("cannot write the stage area", file=str(self._area.places), found=error) from error
        self._places = places.id
        self._attachment.tell(self._version, self._places)

    def find(self, base_version: int, version: int) -> StagedUpdate:
        """Return a staged update, at once.

        Raises:
            NotStaged: it is not there yet; from now on the stager knows that it is wanted.
            DeltaSnapshotError: it will not come: what the stager found wrong with it.
        """
        found = StagedUpdate(
            self._area.staged_folder(base_version, version),
            self._area.mapped_folder(base_version, version, self._places),
        )
        if found.mapped.is_dir():
            self._deaths = 0
            return dataclasses.replace(found, mirror=self._hold_mirror(version)) if self._needs_mirror else found
        self._area.wanted_file(base_version, version).touch()
        self._ensure_stager()
        state = self._area.read_state()
        if state and state.error:
            raise error_of_fields(state.error)
        if state and state.problem and state.problem.concerns(base_version, version):
            raise error_of_fields(state.problem.error)
        raise NotStaged(
            f"version {version} is not staged",
            expected=f"an update from version {base_version}",
            found=f"newest fetched is version {state.newest}" if state else "the stager is starting",
            hint="Ask again, or give update_info a longer timeout_s.",
        )

    def tensor_digests(self, version: int, *, timeout_s: float) -> dict[str, str]:
        """Return the digest of every tensor of the checkpoint at a version, by name. Blocks.

        Raises:
            NotStaged: they did not come in time.
            DeltaSnapshotError: they cannot be known.
        """
        answer = self._area.digests / f"{version:08d}.json"
        deadline = time.monotonic() + timeout_s
        is_asked = False
        while True:
            fields = _read_json(answer)
            if "digests" in fields:
                digests: dict[str, str] = fields["digests"]
                return digests
            if is_asked and "error" in fields:
                raise error_of_fields(fields["error"])
            if not is_asked:
                answer.unlink(missing_ok=True)  # an error, which may have passed
                answer.with_suffix(".wanted").touch()
                is_asked = True
            self._ensure_stager()
            if time.monotonic() >= deadline:
                raise NotStaged(
                    f"the digests of version {version} did not come in time",
                    file=str(self._area.log),
                    hint="They take one reading of the checkpoint; give update_info a longer timeout_s.",
                )
            time.sleep(_POLL_S)

    def mirror_at(self, version: int, *, timeout_s: float) -> Mirror:
        """Return the mirror, held still at a version until `release`. Blocks.

        Raises:
            NotStaged: it did not come in time.
            DeltaSnapshotError: it will not come.
        """
        return _until_staged(lambda: self._hold_mirror(version), timeout_s)

    def release(self) -> None:
        """Let the mirror go on. Nothing happens the second time."""
        if self._pin is not None:
            self._pin.close()
            self._pin = None

    def _hold_mirror(self, version: int) -> Mirror:
        """Hold the mirror at `version`, or ask for it.

        Raises:
            NotStaged: it is not there yet.
        """
        self.release()
        try:
            if self._mirror is None:
                self._mirror = Mirror.open(self._area.mirror)
            if self._mirror is not None:
                self._pin = self._mirror.pin(version)
                return self._mirror
        except NotStaged:
            pass  # asked for below
        except (FormatError, StoreError) as error:
            self._mirror = None  # the stager finds that too, and makes it anew
            raise NotStaged("the mirror is being made anew", file=str(self._area.mirror), found=error) from error
        self._area.write(self._area.mirror_target, str(version).encode())
        self._ensure_stager()
        state = self._area.read_state()
        if state and state.mirror_error:
            raise error_of_fields(state.mirror_error)
        raise NotStaged(
            f"the mirror is not at version {version}",
            file=str(self._area.mirror),
            hint="Ask again, or give update_info a longer timeout_s.",
        )

    def wait(self, base_version: int, version: int, *, timeout_s: float) -> StagedUpdate:
        """Return a staged update, waiting for it at most `timeout_s` seconds. Blocks.

        Raises:
            NotStaged: it did not come in time.
            DeltaSnapshotError: see `find`.
        """
        return _until_staged(lambda: self.find(base_version, version), timeout_s)

    def close(self) -> None:
        """Let go of the stager; it ends when the last worker has. Nothing happens the second time."""
        self.release()
        self._attachment.close()

    def _wait_until_following(self, timeout_s: float) -> StagerState:
        deadline = time.monotonic() + timeout_s
        while True:
            self._ensure_stager()
            state = self._area.read_state()
            if state and state.error:
                raise error_of_fields(state.error)
            if state and state.status == "following":
                return state
            if not timeout_s:
                raise NotStaged("the stager is reading the checkpoint", file=str(self._area.log), hint="Ask again.")
            if time.monotonic() >= deadline:
                raise StageError(
                    "the stager did not get ready in time",
                    file=str(self._area.log),
                    expected=f"at most {timeout_s:g} s",
                    found=state.status if state else "no state",
                    hint="Its log is in that file; give init_info a longer init_timeout_s for a large checkpoint.",
                )
            time.sleep(_POLL_S)

    def _ensure_stager(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        if is_locked(self._area.lock):
            return
        if self._process is not None and self._process.returncode != 0:
            # Killed, or out of memory: it goes on from what is there. Again and again: something is wrong with it.
            self._deaths += 1
            if self._deaths > _MOST_DEATHS:
                raise StageError(
                    f"the stager died {self._deaths} times",
                    file=str(self._area.log),
                    found=f"exit status {self._process.returncode}",
                    hint="Its log is in that file.",
                )
        self._area.state.unlink(missing_ok=True)
        with self._area.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm_delta_snapshot.host", str(self._area.path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
                start_new_session=True,
            )
        # It outlives this object, and perhaps this process; while it does not, somebody has to reap it.
        threading.Thread(target=self._process.wait, name="delta-snapshot-reaper", daemon=True).start()

    def _wait_until_gone(self, timeout_s: float) -> None:
        """Give a failed stager the time to go, so that the next try starts a new one."""
        deadline = time.monotonic() + timeout_s
        while is_locked(self._area.lock) and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def _until_staged(ask: Callable[[], T], timeout_s: float) -> T:
    """Ask again and again until the answer is not `NotStaged`, at most `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return ask()
        except NotStaged:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_POLL_S)


def _read_json(path: Path) -> dict[str, Any]:
    """Return a small file's object; empty if there is no such file."""
    try:
        fields: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    return fields
