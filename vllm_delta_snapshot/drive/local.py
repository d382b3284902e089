# SPDX-License-Identifier: Apache-2.0
"""Bring an in-process `vllm.LLM` to a version. The caller generates nothing meanwhile, so there is no pause."""

from __future__ import annotations

import time
from typing import Any

from vllm_delta_snapshot.drive.sync import UpdateReport, weight_label

__all__ = ["sync_llm"]


def sync_llm(llm: Any, version: int, *, run_id: str | None = None, stage_timeout_s: float = 60.0) -> UpdateReport:
    """Update an `LLM` whose weight transfer engine is initialized. Blocks.

    Args:
        llm: the `vllm.LLM`.
        version: the version.
        run_id: for the label.
        stage_timeout_s: how long to wait if the version is not staged.

    Returns:
        The report; `stage_s` is part of the update call here, and `pause_s` the whole call.

    Raises:
        Exception: what the worker raised: a `DeltaSnapshotError` in-process, vLLM's wrapper of it otherwise. The old
            version is still served, unless it is `WeightsUncertain`.
    """
    started = time.monotonic()
    llm.start_weight_update()
    llm.update_weights({"update_info": {"version": version, "timeout_s": stage_timeout_s}})
    llm.finish_weight_update(weight_label(version, run_id))
    applied = time.monotonic()
    is_cache_reset = bool(llm.reset_prefix_cache())
    llm.reset_mm_cache()
    return UpdateReport("in-process", version, 0.0, time.monotonic() - started, applied - started, is_cache_reset)
