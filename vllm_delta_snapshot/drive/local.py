# SPDX-License-Identifier: Apache-2.0
"""Bring an in-process `vllm.LLM` to a version. The caller generates nothing meanwhile, so there is no pause."""

from __future__ import annotations

import time
from typing import Any

from vllm_delta_snapshot.drive.sync import UpdateReport, weight_label

__all__ = ["sync_llm", "verify_llm"]


def sync_llm(
    llm: Any,
    version: int,
    *,
    run_id: str | None = None,
    stage_timeout_s: float = 60.0,
    allow_rollback: bool = False,
) -> UpdateReport:
    """Update an `LLM` whose weight transfer engine is initialized. Blocks.

    Args:
        llm: the `vllm.LLM`.
        version: the version.
        run_id: for the label.
        stage_timeout_s: how long to wait if the version is not staged.
        allow_rollback: whether it may be an earlier version than the engine has.

    Returns:
        The report; `stage_s` is part of the update call here, and `pause_s` the whole call.

    Raises:
        Exception: what the worker raised: a `DeltaSnapshotError` in-process, vLLM's wrapper of it otherwise. The old
            version is still served, unless it is `WeightsUncertain`.
    """
    started = time.monotonic()
    llm.start_weight_update()
    asked = {"version": version, "timeout_s": stage_timeout_s, "allow_rollback": allow_rollback}
    llm.update_weights({"update_info": asked})
    llm.finish_weight_update(weight_label(version, run_id))
    applied = time.monotonic()
    is_cache_reset = bool(llm.reset_prefix_cache())
    llm.reset_mm_cache()
    return UpdateReport("in-process", version, 0.0, time.monotonic() - started, applied - started, is_cache_reset)


def verify_llm(llm: Any, version: int | None = None, *, timeout_s: float = 600.0) -> None:
    """Compare all live weights of an `LLM` with a version of its run. Blocks.

    Args:
        llm: the `vllm.LLM`.
        version: the version; by default the one that it has.
        timeout_s: how long reading the checkpoint once may take.

    Raises:
        Exception: what the worker raised; a `VerifyError` that names tensors if weights differ.
    """
    llm.start_weight_update()
    llm.update_weights({"update_info": {"version": version, "action": "verify", "timeout_s": timeout_s}})
    llm.finish_weight_update()
