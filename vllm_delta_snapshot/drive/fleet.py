# SPDX-License-Identifier: Apache-2.0
"""Bring many servers to a version, side by side: one report for each, and none waits for another.

A server that fails is left as `sync_server` leaves it: at its old version, or paused if it cannot vouch for its
weights. The next sync brings it back: it initializes a server that was restarted, and resumes one that was left paused.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from vllm_delta_snapshot.drive.client import PauseMode, ServerClient, ServerError
from vllm_delta_snapshot.drive.sync import RunningRequests, UpdateReport, sync_server
from vllm_delta_snapshot.errors import ApplyError, DeltaSnapshotError, NotInitialized

__all__ = ["DeltaSync", "FleetReport", "ServerReport"]

logger = logging.getLogger(__name__)

_GATEWAY: Final = frozenset({502, 503, 504})


@dataclass(frozen=True, slots=True)
class ServerReport:
    """How it went with one server.

    Attributes:
        server: its URL.
        version: the version that it was to have.
        attempts: how often it was tried.
        seconds: how long it took in all.
        update: seconds of each phase; ``None`` if it failed.
        error: why it failed.
    """

    server: str
    version: int
    attempts: int
    seconds: float
    update: UpdateReport | None = None
    error: DeltaSnapshotError | None = None

    @property
    def ok(self) -> bool:
        """Whether the server serves the version."""
        return self.error is None


@dataclass(frozen=True, slots=True)
class FleetReport:
    """How it went with all servers, in the order in which they were given."""

    version: int
    servers: tuple[ServerReport, ...]

    @property
    def ok(self) -> bool:
        """Whether all servers serve the version."""
        return not self.failed

    @property
    def failed(self) -> tuple[ServerReport, ...]:
        """The servers that do not."""
        return tuple(report for report in self.servers if not report.ok)

    def check(self) -> None:
        """Raise if a server failed.

        Raises:
            ApplyError: names the servers, and why.
        """
        if self.failed:
            raise ApplyError(
                f"{len(self.failed)} of {len(self.servers)} servers do not serve version {self.version}",
                found="; ".join(f"{report.server}: {report.error}" for report in self.failed),
                hint="The others do. Sync again once those are back.",
            ) from self.failed[0].error


class DeltaSync:
    """A fleet of vLLM servers that follow one run. Use it from one thread.

    Args:
        servers: URLs, or clients where one has a key or headers of its own.
        sync_dir: the run's folder as the servers reach it. With it, servers that are not initialized, because they
            are new or were restarted, are initialized on the way.
        init_info: further fields for that (see the guide to `init_info`).
        api_key: for the servers given by URL; appears in no message.
        headers: sent with every request to these.
        pause_mode: what the pause does with running requests.
        running_requests: what happens to their cached keys and values (see `sync_server`).
        stage_timeout_s: how long a server may take to have a version staged. It generates meanwhile.
        connect_timeout_s: how long a server may take to answer at all: what an unreachable one costs, an attempt.
        request_timeout_s: for each request.
        retries: how often a server that does not answer is tried again.
        backoff_s: how long to wait before the first of these; doubled each time, with jitter.
        switch_run: whether a server that follows another run of the same base is moved to this one; needs `sync_dir`.
            By default that is an error: another trainer may be using it.

    Raises:
        ValueError: `switch_run` without `sync_dir`.
    """

    def __init__(
        self,
        servers: Sequence[str | ServerClient],
        *,
        sync_dir: str | None = None,
        init_info: Mapping[str, object] | None = None,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        pause_mode: PauseMode = "keep",
        running_requests: RunningRequests = "recompute",
        stage_timeout_s: float = 300.0,
        connect_timeout_s: float = 10.0,
        request_timeout_s: float = 600.0,
        retries: int = 2,
        backoff_s: float = 0.5,
        switch_run: bool = False,
    ) -> None:
        self.clients = tuple(
            server
            if isinstance(server, ServerClient)
            else ServerClient(server, api_key=api_key, headers=headers, timeout_s=request_timeout_s)
            for server in servers
        )
        self._init_info = dict(init_info or {}) | ({"sync_dir": sync_dir} if sync_dir is not None else {})
        self._pause_mode: PauseMode = pause_mode
        self._running_requests: RunningRequests = running_requests
        self._stage_timeout_s = stage_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._retries = retries
        self._backoff_s = backoff_s
        if switch_run and sync_dir is None:
            raise ValueError("switch_run needs sync_dir, the folder of the run to move servers to")
        self._switch_to = sync_dir if switch_run else None

    def init(self) -> FleetReport:
        """Initialize every server, so that staging begins before the first version. Blocks until the last one is.

        Returns:
            The report; `version` is 0.
        """
        return self._side_by_side(0, self._init)

    def sync(
        self,
        version: int,
        *,
        run_id: str | None = None,
        state_digest: str | None = None,
        allow_rollback: bool = False,
    ) -> FleetReport:
        """Bring every server to a version. Blocks until the last one has it or has failed.

        Args:
            version: the version.
            run_id: the run whose version it is. Without it engines that follow a run refuse: a number says nothing.
            state_digest: the state digest of the version, from its record. Where it is given, engines check it too.
            allow_rollback: whether it may be an earlier one than a server has.

        Returns:
            The report. A server's failure is in it, and raises nothing: see `FleetReport.check`.
        """

        def bring(client: ServerClient) -> UpdateReport:
            return sync_server(
                client,
                version,
                run_id=run_id,
                state_digest=state_digest,
                switch_to=self._switch_to,
                pause_mode=self._pause_mode,
                running_requests=self._running_requests,
                stage_timeout_s=self._stage_timeout_s,
                allow_rollback=allow_rollback,
            )

        def bring_initialized(client: ServerClient) -> UpdateReport:
            try:
                return bring(client)
            except ServerError as error:
                if error.kind is not NotInitialized or "sync_dir" not in self._init_info:
                    raise
                logger.info("server=%s was not initialized", client.url)
                client.init(**self._init_info)
                return bring(client)

        return self._side_by_side(version, bring_initialized)

    def _init(self, client: ServerClient) -> None:
        client.init(**self._init_info)

    def _side_by_side(self, version: int, work: Callable[[ServerClient], UpdateReport | None]) -> FleetReport:
        if not self.clients:
            return FleetReport(version, ())
        with ThreadPoolExecutor(len(self.clients), thread_name_prefix="delta-snapshot-sync") as pool:
            reports = list(pool.map(lambda client: self._reported(client, version, work), self.clients))
        return FleetReport(version, tuple(reports))

    def _reported(
        self, client: ServerClient, version: int, work: Callable[[ServerClient], UpdateReport | None]
    ) -> ServerReport:
        started = time.monotonic()
        attempts = 0
        while True:
            attempts += 1
            try:
                # A host that is gone is silent: find that out quickly, not by the time-out of an update.
                client.request("GET", "/health", timeout_s=self._connect_timeout_s)
                update = work(client)
            except DeltaSnapshotError as error:
                if attempts <= self._retries and _is_silence(error):
                    time.sleep(self._backoff_s * 2 ** (attempts - 1) * random.uniform(0.5, 1.0))  # noqa: S311
                    continue
                logger.warning("server=%s does not have version=%d: %s", client.url, version, error)
                return ServerReport(client.url, version, attempts, time.monotonic() - started, error=error)
            return ServerReport(client.url, version, attempts, time.monotonic() - started, update)


def _is_silence(error: DeltaSnapshotError) -> bool:
    """Say whether a server, or what stands before it, did not answer for itself. What it said itself stays true."""
    return isinstance(error, ServerError) and (error.status is None or error.status in _GATEWAY)
