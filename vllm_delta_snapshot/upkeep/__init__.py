# SPDX-License-Identifier: Apache-2.0
"""Shortcuts through a run, and what is no longer needed: anchors, merged deltas, retention, and who does it when."""

from vllm_delta_snapshot.upkeep.upkeep import UpkeepOrder, UpkeepPolicy, UpkeepReport, due_anchor, due_merges, upkeep

__all__ = ["UpkeepOrder", "UpkeepPolicy", "UpkeepReport", "due_anchor", "due_merges", "upkeep"]
