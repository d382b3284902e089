# SPDX-License-Identifier: Apache-2.0
"""Bring one server to a version: wait until it is staged, pause, apply, reset caches, resume.

Between pause and resume there is only what changes weights. A server that refused an update cleanly is resumed with
the weights it had; one that cannot vouch for its weights stays paused.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from vllm_delta_snapshot.drive.client import PauseMode, ServerClient, ServerError
from vllm_delta_snapshot.drive.labels import (
    UNCERTAIN_LABEL,
    close_session,
    confirm_label,
    correct_label,
    open_session,
    run_and_version,
    weight_label,
)
from vllm_delta_snapshot.errors import BaseMismatch, OutOfOrder, Recovery, RunMismatch, WeightsUncertain
from vllm_delta_snapshot.requests import asked_for

__all__ = ["RunningRequests", "UpdateReport", "repair_server", "sync_server", "verify_server"]

logger = logging.getLogger(__name__)

RunningRequests = Literal["recompute", "keep_cache"]
"""What happens to the cached keys and values of requests that are frozen in the pause."""

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
        resume_s: seconds of the call to resume in it.
        is_cache_reset: whether no cached prefix of the old weights is left.
        is_repaired: whether the engine had not served its version, and was repaired first.
        is_switched: whether it had followed another run, and went over to this one.
    """

    engine: str
    version: int
    stage_s: float
    pause_s: float
    apply_s: float
    is_cache_reset: bool
    resume_s: float = 0.0
    is_repaired: bool = False
    is_switched: bool = False


def sync_server(
    client: ServerClient,
    version: int,
    *,
    run_id: str | None = None,
    state_digest: str | None = None,
    switch_to: str | None = None,
    pause_mode: PauseMode = "keep",
    running_requests: RunningRequests = "recompute",
    stage_timeout_s: float = 300.0,
    allow_rollback: bool = False,
    repair: bool = True,
) -> UpdateReport:
    """Bring a server to `version`. Blocks. Having that version already is success.

    Args:
        client: the server, initialized.
        version: the version.
        run_id: the run whose version it is. Without it an engine that follows a run refuses: a number says nothing.
        state_digest: the state digest of the version, from its record. Where it is given, the engine checks it too.
        switch_to: the run's folder as the server reaches it, if a server that follows another run of the same base may
            be moved to this one; by default that is an error.
        pause_mode: what the pause does with running requests.
        running_requests: ``recompute`` makes frozen requests compute their cache again with the new weights, so that
            no stale prefix can be reused; ``keep_cache`` lets them go on from the old one.
        stage_timeout_s: how long the version may take to be staged.
        allow_rollback: whether it may be an earlier version than the server has.
        repair: whether weights that something else has changed are written anew first (see `repair_server`); else
            they are an error.

    Raises:
        ServerError: the server refused or does not answer. If it could vouch for its weights it was resumed and still
            serves the old version; else it stays paused.
    """
    started = time.monotonic()
    asked = asked_for(version, run_id, state_digest)
    prepared = _Prepared({**asked, "allow_rollback": allow_rollback})
    try:
        _wait_prepared(client, "prepare", prepared.request, stage_timeout_s)
    except ServerError as error:
        prepared = _other_way(client, error, prepared, switch_to=switch_to, repair=repair, timeout_s=stage_timeout_s)
    staged = time.monotonic()
    client.pause(pause_mode)
    try:
        apply_started = time.monotonic()
        open_session(client)
        client.update(**prepared.request, action="switch" if prepared.is_switched else "apply")
        client.finish_update(weight_label(version, run_id))
        apply_s = time.monotonic() - apply_started
        is_cache_reset = _reset_caches(client, running_requests)
        # Before the first token: a driver that came between, or died, may have left other weights under this label.
        elsewhere = confirm_label(client, asked, weight_label(version, run_id)) if run_id is not None else None
        if elsewhere is not None:
            raise elsewhere
    except ServerError:
        _resume_if_certain(client)
        raise
    resume_started = time.monotonic()
    client.resume()
    resumed = time.monotonic()
    # And again: what came between that question and the resume is found within milliseconds, by whoever lives.
    if run_id is not None and (elsewhere := confirm_label(client, asked, weight_label(version, run_id))) is not None:
        raise elsewhere
    report = UpdateReport(
        client.url,
        version,
        stage_s=staged - started,
        pause_s=resumed - staged,
        apply_s=apply_s,
        is_cache_reset=is_cache_reset,
        resume_s=resumed - resume_started,
        is_repaired=prepared.is_repaired,
        is_switched=prepared.is_switched,
    )
    logger.info(
        "synced server=%s version=%d stage_s=%.3f pause_s=%.4f apply_s=%.4f",
        client.url,
        version,
        report.stage_s,
        report.pause_s,
        apply_s,
    )
    return report


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What the server is ready to write, and how it came to that."""

    request: Mapping[str, object]
    is_repaired: bool = False
    is_switched: bool = False


def _other_way(
    client: ServerClient,
    error: ServerError,
    wanted: _Prepared,
    *,
    switch_to: str | None,
    repair: bool,
    timeout_s: float,
) -> _Prepared:
    """Prepare a version that was refused, because the server follows another run or serves drifted weights."""
    if error.kind is RunMismatch and switch_to is not None:
        logger.warning("server=%s follows another run and goes over to %s: %s", client.url, switch_to, error)
        request = {**wanted.request, "sync_dir": switch_to}
        _wait_prepared(client, "prepare_switch", request, timeout_s)
        return _Prepared(request, is_switched=True)
    if error.kind is BaseMismatch and repair:
        logger.error("server=%s repairing, it did not serve its version: %s", client.url, error)
        repair_server(client, timeout_s=timeout_s)
        _wait_prepared(client, "prepare", wanted.request, timeout_s)
        return _Prepared(wanted.request, is_repaired=True)
    if error.kind in (OutOfOrder, RunMismatch):
        with contextlib.suppress(ServerError):  # the refusal is what counts
            correct_label(client)
    raise error


def verify_server(client: ServerClient, version: int | None = None, *, timeout_s: float = 600.0) -> None:
    """Compare all live weights of a server, on all its workers, with a version of its run. Blocks.

    The run is the one that the server's label names; a label that is not what the engine serves is found too.

    Generation stands still meanwhile, for about as long as reading the weights once takes.

    Args:
        client: the server, initialized.
        version: the version; by default the one that the server has.
        timeout_s: how long reading the checkpoint once may take.

    Raises:
        ServerError: weights differ (its `kind` is `VerifyError`; the message names tensors), the label lies
            (`RunMismatch` or `OutOfOrder`), or it could not look.
    """
    labelled = run_and_version(client.weight_version())
    asked: dict[str, object] = {"version": version}
    open_session(client)
    try:
        if labelled is not None:
            asked = asked_for(labelled[1] if version is None else version, labelled[0], None)
            client.update(**asked_for(labelled[1], labelled[0], None), action="confirm")
        client.update(**asked, action="verify", timeout_s=timeout_s)
    finally:
        close_session(client)


def repair_server(client: ServerClient, *, timeout_s: float = 600.0) -> None:
    """Write over weights of a server that are not those of its version, because something else changed them. Blocks.

    The host gets a mirror for it: disk for one checkpoint. Generation is paused only for the full check before and
    after and for writing; it is made to compute all caches again.

    Args:
        client: the server, initialized.
        timeout_s: how long making the mirror may take.

    Raises:
        ServerError: it could not; if it cannot vouch for its weights it stays paused.
    """
    _wait_prepared(client, "prepare_repair", {}, timeout_s)
    client.pause("keep")
    try:
        open_session(client)
        client.update(action="repair")
        client.finish_update()
        correct_label(client)
        _reset_caches(client, "recompute")
    except ServerError:
        _resume_if_certain(client)
        raise
    client.resume()
    logger.warning("repaired server=%s", client.url)


def _reset_caches(client: ServerClient, running_requests: RunningRequests) -> bool:
    """Reset caches; say whether no cached prefix of the old weights is left."""
    is_reset = client.reset_caches(running_requests=False)
    if not is_reset and running_requests == "recompute":
        is_reset = client.reset_caches(running_requests=True)
    return is_reset


def _wait_prepared(client: ServerClient, action: str, asked: Mapping[str, object], timeout_s: float) -> None:
    """Ask, ever more rarely, until the server has the update staged, checked and ready to be written."""
    deadline = time.monotonic() + timeout_s
    wait_s = _FIRST_WAIT_S
    while True:
        try:
            # An update that fails ends vLLM's session, one that succeeds does not: close it by finishing.
            open_session(client)
            client.update(**asked, action=action)
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
        close_session(client)
        open_session(client)
        client.update(action="check")
        client.finish_update()
        if correct_label(client):
            _reset_caches(client, "recompute")  # whoever wrote those weights may have died before that
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
