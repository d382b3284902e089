# SPDX-License-Identifier: Apache-2.0
"""Follow: keep one server at the versions of a run, with nothing between trainer and server but the store.

Runs beside the server. It looks for new versions, has its server take them by `sync_server`, and says so in the store.
A server that was restarted is initialized again and catches up; one that stays away or fails is tried again, ever more
rarely. It is ready when its server has caught up, and not before.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from vllm_delta_snapshot.drive.client import PauseMode, ServerClient, ServerError
from vllm_delta_snapshot.drive.labels import weight_label
from vllm_delta_snapshot.drive.sync import RunningRequests, UpdateReport, sync_server
from vllm_delta_snapshot.errors import (
    BrokenChain,
    DeltaSnapshotError,
    FormatError,
    NotInitialized,
    NotStaged,
    StoreError,
)
from vllm_delta_snapshot.runs.acks import Acknowledger
from vllm_delta_snapshot.runs.chain import plan_steps
from vllm_delta_snapshot.runs.run_folder import RunFolder

__all__ = ["FollowConfig", "FollowState", "Follower", "Observer", "Stage"]

logger = logging.getLogger(__name__)

_LONGEST_RETRY_S: Final = 30.0
_LONGEST_SILENCE_S: Final = 3.0
"""To ask whether a server is back costs nothing."""
_STAGE_SLICE_S: Final = 1.0
"""For so long it waits for a version to be staged before it looks again whether it has to stop."""


Stage = Literal["look", "init", "update", "acknowledge"]
"""What a follower was at: seeing what store and server have, initializing the server, a version, or saying so."""


class FollowConfig(BaseModel):
    """How a server is kept at a run.

    Attributes:
        sync_dir: the run's folder, for the server's stager.
        init_info: further fields with which the server is initialized.
        policy: ``newest`` goes to the newest version at once; ``every`` takes each one, in order, also when it lags.
        min_interval_s: at most one update in so many seconds.
        max_lag: how many versions behind the newest one still counts as ready, once it has caught up.
        poll_interval_s: how often store and server are looked at.
        retry_interval_s: how long to wait after a failure; doubled each time, up to 30 s.
        pause_mode: what the pause does with running requests.
        running_requests: what happens to their cached keys and values.
        stage_timeout_s: how long the server may take to have a version staged.
        request_timeout_s: for each request to it, but those that only ask whether it is there.
        ask_timeout_s: for these.
        switch_run: whether a server that follows another run of the same base is moved to this one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    sync_dir: str
    init_info: dict[str, Any] = Field(default_factory=dict)
    policy: Literal["newest", "every"] = "newest"
    min_interval_s: float = Field(default=0.0, ge=0)
    max_lag: int = Field(default=1, ge=0)
    poll_interval_s: float = Field(default=0.5, gt=0)
    retry_interval_s: float = Field(default=1.0, gt=0)
    pause_mode: PauseMode = "keep"
    running_requests: RunningRequests = "recompute"
    stage_timeout_s: float = Field(default=300.0, ge=0)
    request_timeout_s: float = Field(default=600.0, gt=0)
    ask_timeout_s: float = Field(default=5.0, gt=0)
    switch_run: bool = False


@dataclass(frozen=True, slots=True)
class FollowState:
    """Where a follower is.

    Attributes:
        run_id: the run; empty until it was read.
        applied: the version that the server serves; ``None`` while that is not known.
        newest: the newest version that was seen in the store.
        has_caught_up: whether the server has had the newest version since it was last (re)started.
        updates: how many updates it took.
        failures: how many tries failed.
        error: why the last try failed; ``None`` if it did not.
        last: how the last update went.
        looked_at: when store and server last answered, on the monotonic clock.
        acknowledged: the newest version that the store was told of; ``None`` if none was.
        chain_length: how many deltas an engine that starts now has to fetch; ``None`` while that is not known.
    """

    run_id: str = ""
    applied: int | None = None
    newest: int = 0
    has_caught_up: bool = False
    updates: int = 0
    failures: int = 0
    error: DeltaSnapshotError | None = None
    last: UpdateReport | None = None
    looked_at: float | None = None
    acknowledged: int | None = None
    chain_length: int | None = None

    @property
    def lag(self) -> int | None:
        """How many versions the server is behind; ``None`` while that is not known."""
        return None if self.applied is None else max(0, self.newest - self.applied)


class Observer(Protocol):
    """Is told what happens: metrics are one."""

    def updated(self, report: UpdateReport) -> None:
        """The server took a version."""
        ...

    def failed(self, error: DeltaSnapshotError, stage: Stage) -> None:
        """A try failed, or the store could not be told of a version."""
        ...


class Follower:
    """See the module. `run` is the process; `state` may be read from any thread.

    Args:
        config: how.
        client: the server.
        folder: the run.
        sampler: the name under which versions are acknowledged in the store; ``None`` for no acknowledgements.
        observer: is told what happens.
    """

    def __init__(
        self,
        config: FollowConfig,
        client: ServerClient,
        folder: RunFolder,
        *,
        sampler: str | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.config = config
        self._client = client
        self._folder = folder
        self._sampler = sampler
        self._observer = observer
        self._acknowledger: Acknowledger | None = None
        self._updated_at = float("-inf")
        self._staging_since: float | None = None
        self._stray: str | None = None  # what was said of records that are out of line
        self._digest: tuple[int, str] | None = None  # of the version that was asked for last
        self._wait_s = config.poll_interval_s
        self._stage: Stage = "look"
        self.state = FollowState()

    @property
    def server(self) -> str:
        """The server's URL."""
        return self._client.url

    @property
    def is_ready(self) -> bool:
        """Whether the server has caught up, and store and server answered lately."""
        state = self.state
        if not state.has_caught_up or state.lag is None or state.looked_at is None:
            return False
        is_fresh = time.monotonic() - state.looked_at <= 10 * self.config.poll_interval_s + self.config.ask_timeout_s
        return is_fresh and state.lag <= self.config.max_lag

    def run(self, stop: threading.Event) -> None:
        """Follow until `stop` is set. Blocks. An update that is under way is brought to its end."""
        logger.info("following sync_dir=%s server=%s", self.config.sync_dir, self._client.url)
        while not stop.is_set():
            self.step()
            stop.wait(self._wait_s)
        logger.info("stopped server=%s version=%s", self._client.url, self.state.applied)

    def step(self) -> None:
        """Look once, and take a version if there is one to take. Failures are kept in the state."""
        self._stage = "look"
        try:
            self._look()
            target = self._target()
            self._stage = "update"
            if target is not None:
                self._take(target)
            self._acknowledge()
        except DeltaSnapshotError as error:
            self._fail(error)
        else:
            self._wait_s = self.config.poll_interval_s
            self._set(error=None)

    def _look(self) -> None:
        """See what there is in the store, and whether the server still serves what it was brought to."""
        if not self.state.run_id:
            run_id = self._folder.read_run().run_id
            self._set(run_id=run_id)
            if self._sampler is not None:
                self._acknowledger = Acknowledger(self._folder.store, run_id, self._sampler)
        newest, stray = self._folder.newest_and_stray()
        if stray is not None and str(stray) != self._stray:
            logger.warning("following up to version=%d: %s", newest, stray)
        self._stray = None if stray is None else str(stray)
        if newest != self.state.newest or self.state.chain_length is None:
            self._set(chain_length=self._chain_length(newest))
        self._set(newest=newest)
        answer = self._client.request("GET", "/weight_info", timeout_s=self.config.ask_timeout_s)
        applied = self.state.applied
        if applied is not None and answer.get("weight_version") != weight_label(applied, self.state.run_id):
            # Restarted, or somebody else brought it elsewhere.
            logger.warning("server=%s serves %s now", self._client.url, answer.get("weight_version"))
            self._set(applied=None, has_caught_up=False)
        if not self.state.has_caught_up and self.state.lag == 0:
            self._set(has_caught_up=True)
        self._set(looked_at=time.monotonic())

    def _chain_length(self, newest: int) -> int | None:
        """Return how many deltas lead to the newest version from the newest anchor, or else from the base."""
        with contextlib.suppress(StoreError):  # it is only told; the next look finds out
            versions, shortcuts = self._folder.versions(), self._folder.shortcuts()
            for start in (*(version for version in reversed(shortcuts.anchors) if version <= newest), 0):
                with contextlib.suppress(BrokenChain):
                    return len(plan_steps(versions, start, newest, shortcuts))
        return None

    def _target(self) -> int | None:
        """Return the version to go to now; ``None`` if the server is where it should be."""
        state = self.state
        if state.applied is None:
            return state.newest
        if state.newest <= state.applied or time.monotonic() < self._updated_at + self.config.min_interval_s:
            return None
        return state.newest if self.config.policy == "newest" else state.applied + 1

    def _take(self, version: int) -> None:
        """Have the server take a version; come back without it while it is still being staged."""
        began = time.monotonic()
        since = began if self._staging_since is None else self._staging_since
        self._staging_since = None
        try:
            report = self._sync(version)
        except ServerError as error:
            if error.kind is NotInitialized:
                self._stage = "init"
                self._client.init(sync_dir=self.config.sync_dir, **self.config.init_info)
                return
            if error.kind is not NotStaged or time.monotonic() >= since + self.config.stage_timeout_s:
                raise
            self._staging_since = since
            return
        report = replace(report, stage_s=report.stage_s + began - since)
        self._updated_at = time.monotonic()
        self._set(applied=version, last=report, updates=self.state.updates + 1, looked_at=self._updated_at)
        if version == self.state.newest:
            self._set(has_caught_up=True)
        if self._observer is not None:
            self._observer.updated(report)

    def _sync(self, version: int) -> UpdateReport:
        return sync_server(
            self._client,
            version,
            run_id=self.state.run_id,
            state_digest=self._digest_of(version),
            switch_to=self.config.sync_dir if self.config.switch_run else None,
            pause_mode=self.config.pause_mode,
            running_requests=self.config.running_requests,
            stage_timeout_s=min(_STAGE_SLICE_S, self.config.stage_timeout_s),
        )

    def _digest_of(self, version: int) -> str | None:
        """Return the state digest of a version; ``None`` if its record is damaged, which the server's stager tells."""
        if self._digest is None or self._digest[0] != version:
            try:
                self._digest = version, self._folder.state_digest(version)
            except FormatError:
                return None
        return self._digest[1]

    def _acknowledge(self) -> None:
        """Tell the store. If that fails the server serves its version all the same, and it is told later."""
        state = self.state
        if self._acknowledger is None or state.applied is None or state.acknowledged == state.applied:
            return
        try:
            last = state.last
            self._acknowledger.write(
                state.applied, pause_s=last.pause_s if last else 0.0, stage_s=last.stage_s if last else None
            )
        except StoreError as error:
            logger.warning("cannot acknowledge version=%d: %s", state.applied, error)
            if self._observer is not None:
                self._observer.failed(error, "acknowledge")
        else:
            self._set(acknowledged=state.applied)

    def _fail(self, error: DeltaSnapshotError) -> None:
        logger.warning("server=%s version=%s: %s", self._client.url, self.state.applied, error)
        is_silent = isinstance(error, ServerError) and error.status is None
        longest = _LONGEST_SILENCE_S if is_silent else _LONGEST_RETRY_S
        self._wait_s = min(longest, max(self.config.retry_interval_s, 2 * self._wait_s))
        self._set(error=error, failures=self.state.failures + 1)
        if is_silent:
            self._set(looked_at=None)  # so it is not ready
        if self._observer is not None:
            self._observer.failed(error, self._stage)

    def _set(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)
