# SPDX-License-Identifier: Apache-2.0
"""Drive engines from outside: one server over HTTP, a fleet of them, a follower beside one, or an in-process `LLM`."""

from vllm_delta_snapshot.drive.client import ServerClient, ServerError
from vllm_delta_snapshot.drive.fleet import DeltaSync, FleetReport, ServerReport
from vllm_delta_snapshot.drive.labels import weight_label
from vllm_delta_snapshot.drive.local import repair_llm, sync_llm, verify_llm
from vllm_delta_snapshot.drive.sync import UpdateReport, repair_server, sync_server, verify_server

__all__ = [
    "DeltaSync",
    "FleetReport",
    "ServerClient",
    "ServerError",
    "ServerReport",
    "UpdateReport",
    "repair_llm",
    "repair_server",
    "sync_llm",
    "sync_server",
    "verify_llm",
    "verify_server",
    "weight_label",
]
