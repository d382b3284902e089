# SPDX-License-Identifier: Apache-2.0
"""``delta-snapshot`` with all its verbs. They add themselves as they are imported: the order is that of the help."""

from __future__ import annotations

from vllm_delta_snapshot.cli.commands import look, check, make, serve  # isort: skip
from vllm_delta_snapshot.cli.commands.root import app

__all__ = ["app", "check", "look", "make", "serve"]
