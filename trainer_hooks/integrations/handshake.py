# SPDX-License-Identifier: Apache-2.0
"""Bring engines to a version through a client of vLLM's weight-sync protocol: four methods, and what else it has.

The protocol has no word for pausing and for resetting caches. A client that has both (SkyRL's) is used to pause; for
one that has not (vLLM's own over HTTP and Ray), the caller must say that it resets caches, or is refused: a cached
prefix of old weights would be reused, silently.

A client may stand for several engines. If one of them fails, those that can vouch for their weights are resumed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, Final, Protocol, runtime_checkable

from vllm_delta_snapshot.errors import (
    ApplyError,
    CompatibilityError,
    DeltaSnapshotError,
    NotInitialized,
    Recovery,
    error_kind,
)
from vllm_delta_snapshot.requests import asked_for

__all__ = ["ClientFleet", "PausingClient", "WeightSyncClient"]

logger = logging.getLogger(__name__)

_FIRST_WAIT_S: Final = 0.1
_LONGEST_WAIT_S: Final = 1.0


class WeightSyncClient(Protocol):
    """vLLM's ``VLLMWeightSyncClient``."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Initialize the engines' backend."""
        ...

    def start_weight_update(self) -> None:
        """Begin an update."""
        ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Send an `update_info`."""
        ...

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update."""
        ...


@runtime_checkable
class PausingClient(Protocol):
    """What some clients can do besides."""

    def pause_generation(self) -> None:
        """Freeze running requests."""
        ...

    def resume_generation(self) -> None:
        """Let them go on."""
        ...

    def reset_prefix_cache(self, reset_running_requests: bool = True) -> None:
        """Forget what was computed with the old weights."""
        ...


class _Taken:
    """Every engine has the version; one that had not would have raised."""

    def check(self) -> None:
        """Do nothing."""


class ClientFleet:
    """The engines behind a client, as `Rounds` needs them.

    Args:
        client: the client.
        init_info: what the engines are initialized with.
        resets_caches: whether the caller pauses generation and resets caches itself.
        stage_timeout_s: how long a version may take to be staged, with generation going on.

    Attributes:
        is_cache_reset: whether a client that can is asked to reset the prefix cache.

    Raises:
        ApplyError: nobody would reset the caches.
    """

    is_cache_reset: bool = True

    def __init__(
        self,
        client: WeightSyncClient,
        init_info: Mapping[str, Any],
        *,
        resets_caches: bool = False,
        stage_timeout_s: float = 300.0,
    ) -> None:
        self._client = client
        self._init_info = dict(init_info)
        self._pausing = client if isinstance(client, PausingClient) else None
        self._stage_timeout_s = stage_timeout_s
        if self._pausing is None and not resets_caches:
            raise ApplyError(
                "this client can neither pause generation nor reset caches: prefixes of old weights would be reused",
                found=type(client).__name__,
                hint="Give client=DeltaSync([url, ...]), which does both; or resets_caches=True if you do both "
                "yourself around send_weights().",
            )

    def init(self) -> _Taken:
        """Initialize the engines: they begin to follow the run. May be repeated.

        Raises:
            DeltaSnapshotError: they refused; of the kind that they reported.
        """
        try:
            self._client.init_weight_transfer_engine(dict(self._init_info))
        except Exception as error:  # clients raise what their libraries raise
            raise _typed("the engines could not be initialized", error) from error
        return _Taken()

    def sync(self, version: int, *, run_id: str | None = None, state_digest: str | None = None) -> _Taken:
        """Bring the engines to a version. Blocks. The arguments are those of `DeltaSync.sync`.

        Raises:
            RunMismatch: an engine follows another run; none was touched.
            DeltaSnapshotError: an engine did not take it; of the kind that it reported. One that cannot vouch for
                its weights stays paused.
        """
        asked = asked_for(version, run_id, state_digest)
        try:
            self._wait_prepared(asked)
        except NotInitialized:
            logger.warning("an engine was not initialized; it may have been restarted")
            self.init()
            self._wait_prepared(asked)
        label = f"{run_id}@{version}" if run_id else str(version)
        if self._pausing is None:
            self._apply(asked, label)
            return _Taken()
        self._pausing.pause_generation()
        try:
            self._apply(asked, label)
            if self.is_cache_reset:
                self._pausing.reset_prefix_cache(reset_running_requests=True)
        except DeltaSnapshotError:
            self._resume_if_certain(self._pausing)
            raise
        self._pausing.resume_generation()
        return _Taken()

    def _apply(self, asked: Mapping[str, object], label: str) -> None:
        try:
            self._client.start_weight_update()
            self._client.update_weights({**asked, "action": "apply"})
            self._client.finish_weight_update(label)
        except Exception as error:
            self._close_session()
            raise _typed(f"version {asked['version']} was not taken", error) from error

    def _wait_prepared(self, asked: Mapping[str, object]) -> None:
        """Ask, ever more rarely, until the engines have the version staged, checked and ready to be written."""
        deadline = time.monotonic() + self._stage_timeout_s
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                self._ask({**asked, "action": "prepare"})
                return
            except DeltaSnapshotError as error:
                if error.recovery is not Recovery.RETRY or time.monotonic() >= deadline:
                    raise
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _ask(self, update_info: dict[str, Any]) -> None:
        try:
            self._client.start_weight_update()
            self._client.update_weights(update_info)
            self._client.finish_weight_update()
        except Exception as error:
            self._close_session()
            raise _typed("the engines are not ready for an update", error) from error

    def _close_session(self) -> None:
        # A failure leaves the session of some engines and workers open and of others not; one finish clears both.
        try:
            self._client.finish_weight_update()
        except Exception as error:  # noqa: BLE001 - whatever the client's library raises: there was no open session
            logger.debug("no open session: %s", error)

    def _resume_if_certain(self, pausing: PausingClient) -> None:
        try:
            self._ask({"action": "check"})
        except DeltaSnapshotError as error:
            logger.error("engines stay paused: one does not vouch for its weights: %s", error)
            return
        pausing.resume_generation()


def _typed(what: str, error: Exception) -> DeltaSnapshotError:
    """Return an error of the kind that the engine reported, whatever the client made of it."""
    answer = getattr(getattr(error, "response", None), "text", "")
    text = f"{error} {answer}".strip()
    if "unexpected keyword argument 'run'" in text:
        return CompatibilityError(
            what,
            found=text[:2000],
            hint="The engines have an older vllm-delta-snapshot than this trainer: upgrade it there.",
        )
    kind = error_kind(text) or ApplyError
    return kind(what, found=text[:2000], hint="The engines keep the version that they had.")
