# SPDX-License-Identifier: Apache-2.0
"""Drive engines from outside: one server over HTTP, or an in-process `LLM`. Standard library only."""

from vllm_delta_snapshot.drive.client import ServerClient, ServerError
from vllm_delta_snapshot.drive.local import sync_llm, verify_llm
from vllm_delta_snapshot.drive.sync import UpdateReport, sync_server, verify_server, weight_label

__all__ = [
    "ServerClient",
    "ServerError",
    "UpdateReport",
    "sync_llm",
    "sync_server",
    "verify_llm",
    "verify_server",
    "weight_label",
]
