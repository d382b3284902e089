# SPDX-License-Identifier: Apache-2.0
"""Bring one server to a version: wait until it is staged, pause, apply, reset caches, resume.

Between pause and resume there is only what changes weights. A server that refused an update cleanly is resumed with
the weights it had; one that cannot vouch for its weights stays paused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from vllm_delta_snapshot.drive.client import PauseMode, ServerClient, ServerError
from vllm_delta_snapshot.errors import Recovery, WeightsUncertain

__all__ = ["UNCERTAIN_LABEL", "RunningRequests", "UpdateReport", "sync_server", "verify_server", "weight_label"]

logger = logging.getLogger(__name__)

RunningRequests = Literal["recompute", "keep_cache"]
"""What happens to the cached keys and values of requests that are frozen in the pause."""

UNCERTAIN_LABEL: Final = "uncertain"
"""The label of a server that cannot vouch for its weights, so that it names no version that it does not hold."""

_FIRST_WAIT_S: Final = 0.1
_LONGEST_WAIT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """How one update of one engine went.

    Attributes:
        engine: the server's URL, or ``in-process``.
        version: the version it has now.
        stage_s: seconds until the version was staged and prepared, with generation going on.
        pause_s: seconds from the call to pause to the end of the call to resume.
        apply_s: seconds of the update call in it.
        is_cache_reset: whether no cached prefix of the old weights is left.
    """

    engine: str
    version: int
    stage_s: float
    pause_s: float
    apply_s: float
    is_cache_reset: bool


def weight_label(version: int, run_id: str | None = None) -> str:
    """Return the label that vLLM shows for a version: ``<run id>@<version>``, or the bare number."""
    return f"{run_id}@{version}" if run_id else str(version)


def sync_server(
    client: ServerClient,
    version: int,
    *,
    run_id: str | None = None,
    pause_mode: PauseMode = "keep",
    running_requests: RunningRequests = "recompute",
    stage_timeout_s: float = 300.0,
    allow_rollback: bool = False,
) -> UpdateReport:
    """Bring a server to `version`. Blocks. Having that version already is success.

    Args:
        client: the server, initialized.
        version: the version.
        run_id: for the label.
        pause_mode: what the pause does with running requests.
        running_requests: ``recompute`` makes frozen requests compute their cache again with the new weights, so that
            no stale prefix can be reused; ``keep_cache`` lets them go on from the old one.
        stage_timeout_s: how long the version may take to be staged.
        allow_rollback: whether it may be an earlier version than the server has.

    Raises:
        ServerError: the server refused or does not answer. If it could vouch for its weights it was resumed and still
            serves the old version; else it stays paused.
    """
    started = time.monotonic()
    asked = {"version": version, "allow_rollback": allow_rollback}
    _wait_prepared(client, asked, stage_timeout_s)
    staged = time.monotonic()
    client.pause(pause_mode)
    try:
        apply_started = time.monotonic()
        client.start_update()
        client.update(**asked, action="apply")
        client.finish_update(weight_label(version, run_id))
        apply_s = time.monotonic() - apply_started
        is_cache_reset = client.reset_caches(running_requests=False)
        if not is_cache_reset and running_requests == "recompute":
            is_cache_reset = client.reset_caches(running_requests=True)
    except ServerError:
        _resume_if_certain(client)
        raise
    client.resume()
    pause_s = time.monotonic() - staged
    report = UpdateReport(client.url, version, staged - started, pause_s, apply_s, is_cache_reset)
    logger.info(
        "synced server=%s version=%d stage_s=%.3f pause_s=%.4f apply_s=%.4f",
        client.url,
        version,
        report.stage_s,
        pause_s,
        apply_s,
    )
    return report


def verify_server(client: ServerClient, version: int | None = None, *, timeout_s: float = 600.0) -> None:
    """Compare all live weights of a server, on all its workers, with a version of its run. Blocks.

    Generation stands still meanwhile, for about as long as reading the weights once takes.

    Args:
        client: the server, initialized.
        version: the version; by default the one that the server has.
        timeout_s: how long reading the checkpoint once may take.

    Raises:
        ServerError: weights differ (its `kind` is `VerifyError`; the message names tensors), or it could not look.
    """
    client.start_update()
    try:
        client.update(version=version, action="verify", timeout_s=timeout_s)
    finally:
        _close_session(client)


def _wait_prepared(client: ServerClient, asked: Mapping[str, object], timeout_s: float) -> None:
    """Ask, ever more rarely, until the server has the update staged, checked and ready to be written."""
    deadline = time.monotonic() + timeout_s
    wait_s = _FIRST_WAIT_S
    while True:
        try:
            # An update that fails ends vLLM's session, one that succeeds does not: close it by finishing.
            client.start_update()
            client.update(**asked, action="prepare")
            client.finish_update()
            return
        except ServerError as error:
            # What may pass is waited for: not staged yet, a store out of reach. What is damaged is not.
            may_pass = error.kind is not None and error.kind.recovery is Recovery.RETRY
            if not may_pass or time.monotonic() >= deadline:
                raise
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def _resume_if_certain(client: ServerClient) -> None:
    """Resume a server that says its weights are those of a version; leave it paused otherwise."""
    try:
        _close_session(client)
        client.start_update()
        client.update(action="check")
        client.finish_update()
        client.resume()
    except ServerError as error:
        logger.error("server=%s stays paused: it does not vouch for its weights: %s", client.url, error)
        if error.kind is WeightsUncertain:
            _label_uncertain(client)


def _label_uncertain(client: ServerClient) -> None:
    try:
        client.set_weight_version(UNCERTAIN_LABEL)
    except ServerError as error:
        logger.error("server=%s keeps the label of a version that it may not hold: %s", client.url, error)


def _close_session(client: ServerClient) -> None:
    # After a partial failure some workers have an open session and others not; one finish clears both, and may fail.
    try:
        client.finish_update()
    except ServerError:
        logger.debug("server=%s had no open session", client.url)
