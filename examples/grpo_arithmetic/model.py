# SPDX-License-Identifier: Apache-2.0
"""The base checkpoint that the settings ask for."""

from __future__ import annotations

from pathlib import Path

from examples.grpo.base import checkpoint_base, smollm2_base, tiny_base
from examples.grpo_arithmetic.settings import Settings


def prepare_base(settings: Settings) -> Path:
    """Return the folder of the base checkpoint, made if it is not there yet.

    Raises:
        ExampleError: there is no model to start from.
    """
    if settings.model is not None:
        return checkpoint_base(settings.model, name=f"DEMO_MODEL={settings.model}")
    return tiny_base(settings.cache, settings.seed) if settings.tiny else smollm2_base(settings.cache)
