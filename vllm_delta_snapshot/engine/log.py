# SPDX-License-Identifier: Apache-2.0
"""The logger of the engine side: a child of vLLM's, since workers drop the INFO lines of all others."""

from __future__ import annotations

import logging

__all__ = ["logger"]

logger = logging.getLogger("vllm.delta_snapshot")
