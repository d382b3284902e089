# SPDX-License-Identifier: Apache-2.0
"""A post-step hook of an optimizer that publishes.

Torch calls it after each real step; what skips the step skips it too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

__all__ = ["check_every", "publish_after_steps"]


def publish_after_steps(
    publish: Callable[[int], object], optimizer: torch.optim.Optimizer, *, every: int, first_step: int
) -> RemovableHandle:
    """Call `publish` with the number of the step after every `every`-th one.

    Args:
        publish: called in the thread that steps, right after it.
        optimizer: whose steps are counted.
        every: at least 1; steps with numbers that it divides are published.
        first_step: the number of the next step.

    Raises:
        ValueError: `every` is less than 1.
    """
    check_every(every)
    step = first_step - 1

    def after_step(*_: Any) -> None:
        nonlocal step
        step += 1
        if step % every == 0:
            publish(step)

    return optimizer.register_step_post_hook(after_step)


def check_every(every: int) -> None:
    """Check how many optimizer steps lie between two publications.

    Raises:
        ValueError: it is less than 1.
    """
    if every < 1:
        raise ValueError(f"every must be at least 1, not {every}")
