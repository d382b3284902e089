# SPDX-License-Identifier: Apache-2.0
"""Apply: write a prepared update into the live weights, and read it back.

`scatter` writes each element to the place that the load plan knows: one indexed write per live storage, whose cost
grows with the changes. `loader` is vLLM's own way, the reference, whose cost grows with the tensors; what it cannot
carry (NaN, integers, differences) is scattered.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_delta_snapshot.engine.ways import Way
from vllm_delta_snapshot.engine.write.lanes import LiveLane, write_lanes
from vllm_delta_snapshot.engine.write.loader import apply_by_loader, is_for_loader
from vllm_delta_snapshot.engine.write.updates import Update
from vllm_delta_snapshot.errors import VerifyError
from vllm_delta_snapshot.types import TensorPatch

__all__ = ["apply"]


def apply(model: torch.nn.Module, lanes: Sequence[LiveLane], update: Update, way: Way) -> None:
    """Write every lane. Not atomic: the caller keeps the old values.

    Args:
        model: the live model.
        lanes: the update on this worker.
        update: the same, as it was staged.
        way: how.

    Raises:
        VerifyError: an element does not have the published bits.
        Exception: whatever the model's loader raises; some weights may be written.
    """
    if way == "loader":
        here = {run.name for lane in lanes for run in lane.lane.runs}
        changes = [change for change in update.patches() if change.spec.name in here]
        patches = [change for change in changes if isinstance(change, TensorPatch) and is_for_loader(change)]
        apply_by_loader(model, patches)
        carried = {patch.spec.name for patch in patches}
        write_lanes([lane for lane in lanes if not all(run.name in carried for run in lane.lane.runs)])
        _require([lane.holds_new() for lane in lanes], lanes)
    else:
        _require(write_lanes(lanes), lanes)


def _require(are_right: Sequence[bool], lanes: Sequence[LiveLane]) -> None:
    wrong = [lane for lane, is_right in zip(lanes, are_right, strict=True) if not is_right]
    if wrong:
        raise VerifyError(
            "a weight does not have the published bits after it was written",
            tensor=", ".join(sorted({run.name for run in wrong[0].lane.runs})[:3]),
            hint="The old weights are put back. If it happens again, something else writes these weights, or the "
            "device's memory is damaged.",
        )
