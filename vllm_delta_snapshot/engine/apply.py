# SPDX-License-Identifier: Apache-2.0
"""Apply: write prepared patches into the live weights, by the way that was chosen when the engine was initialized.

`scatter` writes each element to the place that the load plan knows: one indexed write per live tensor, whose cost grows
with the changes. `loader` is vLLM's own way, the reference, whose cost grows with the tensors; what it cannot carry
(NaN, integers) is scattered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from vllm_delta_snapshot.engine.live import MappedPatch
from vllm_delta_snapshot.engine.loader import apply_by_loader, is_for_loader

__all__ = ["Way", "apply"]

Way = Literal["scatter", "loader"]


def apply(model: torch.nn.Module, mapped: Sequence[MappedPatch], way: Way) -> None:
    """Write every patch. Not atomic: the caller keeps the old values.

    Args:
        model: the live model.
        mapped: the patches with their places.
        way: how.

    Raises:
        Exception: whatever the model's loader raises; some weights may be written.
    """
    by_loader = {id(item) for item in mapped if way == "loader" and is_for_loader(item.patch)}
    if by_loader:
        apply_by_loader(model, [item.patch for item in mapped if id(item) in by_loader])
    for item in mapped:
        if id(item) not in by_loader:
            item.write_new()
