# SPDX-License-Identifier: Apache-2.0
"""Bring an in-process `vllm.LLM` to a version. The caller generates nothing meanwhile, so there is no pause."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

from vllm_delta_snapshot.drive.labels import weight_label
from vllm_delta_snapshot.drive.sync import UpdateReport
from vllm_delta_snapshot.errors import BaseMismatch, error_kind
from vllm_delta_snapshot.requests import asked_for

__all__ = ["repair_llm", "sync_llm", "verify_llm"]

logger = logging.getLogger(__name__)


def sync_llm(
    llm: Any,
    version: int,
    *,
    run_id: str | None = None,
    state_digest: str | None = None,
    stage_timeout_s: float = 60.0,
    allow_rollback: bool = False,
    repair: bool = True,
) -> UpdateReport:
    """Update an `LLM` whose weight transfer engine is initialized. Blocks.

    Args:
        llm: the `vllm.LLM`.
        version: the version.
        run_id: the run whose version it is. Without it an engine that follows a run refuses: a number says nothing.
        state_digest: the state digest of the version, from its record. Where it is given, the engine checks it too.
        stage_timeout_s: how long to wait if the version is not staged.
        allow_rollback: whether it may be an earlier version than the engine has.
        repair: whether weights that something else has changed are written anew first (see `repair_llm`); else they
            are an error.

    Returns:
        The report; `stage_s` is part of the update call here, and `pause_s` the whole call.

    Raises:
        Exception: what the worker raised: a `DeltaSnapshotError` in-process, vLLM's wrapper of it otherwise. The old
            version is still served, unless it is `WeightsUncertain`.
    """
    started = time.monotonic()
    asked = asked_for(version, run_id, state_digest)
    asked |= {"timeout_s": stage_timeout_s, "allow_rollback": allow_rollback}
    is_repaired = False
    llm.start_weight_update()
    try:
        llm.update_weights({"update_info": asked})
    except Exception as error:
        if not repair or error_kind(str(error)) is not BaseMismatch:
            raise
        logger.error("repairing an engine that did not serve its version: %s", error)
        with contextlib.suppress(Exception):
            llm.finish_weight_update()  # closes the session that failed
        repair_llm(llm, timeout_s=stage_timeout_s)
        is_repaired = True
        llm.start_weight_update()
        llm.update_weights({"update_info": asked})
    llm.finish_weight_update(weight_label(version, run_id))
    applied = time.monotonic()
    is_cache_reset = bool(llm.reset_prefix_cache())
    llm.reset_mm_cache()
    return UpdateReport(
        "in-process",
        version,
        stage_s=0.0,
        pause_s=time.monotonic() - started,
        apply_s=applied - started,
        is_cache_reset=is_cache_reset,
        is_repaired=is_repaired,
    )


def repair_llm(llm: Any, *, timeout_s: float = 600.0) -> None:
    """Write over weights of an `LLM` that are not those of its version, because something else changed them. Blocks.

    Args:
        llm: the `vllm.LLM`.
        timeout_s: how long making the host's mirror may take, which is what they are written from.

    Raises:
        Exception: what the worker raised. It is `WeightsUncertain` if the engine must not be used any more.
    """
    llm.start_weight_update()
    llm.update_weights({"update_info": {"action": "repair", "timeout_s": timeout_s}})
    llm.finish_weight_update()
    llm.reset_prefix_cache()
    llm.reset_mm_cache()


def verify_llm(llm: Any, version: int | None = None, *, run_id: str | None = None, timeout_s: float = 600.0) -> None:
    """Compare all live weights of an `LLM` with a version of its run. Blocks.

    Args:
        llm: the `vllm.LLM`.
        version: the version; by default the one that it has.
        run_id: the run whose version it is; needed with `version`.
        timeout_s: how long reading the checkpoint once may take.

    Raises:
        Exception: what the worker raised; a `VerifyError` that names tensors if weights differ.
    """
    llm.start_weight_update()
    asked = {"version": version, "run": run_id, "action": "verify", "timeout_s": timeout_s}
    llm.update_weights({"update_info": asked})
    llm.finish_weight_update()
