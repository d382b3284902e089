# SPDX-License-Identifier: Apache-2.0
"""What ``doctor`` looks at in a running server: whether it answers, has the routes for updates, and our backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from vllm_delta_snapshot.cli.doctor.check import Check, failed
from vllm_delta_snapshot.cli.server import client_of
from vllm_delta_snapshot.drive.client import ServerClient, ServerError
from vllm_delta_snapshot.plugin import BACKEND

__all__ = ["server_checks"]

_ROUTES: Final = (
    *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
    *("/pause", "/resume", "/is_paused", "/reset_prefix_cache", "/weight_info"),
)
_DEV_MODE: Final = "Start the server with VLLM_SERVER_DEV_MODE=1, which enables vLLM's weight update routes."
_TIMEOUT_S: Final = 30.0


def server_checks(url: str) -> Iterator[Check]:
    """Yield what was found of a server. Changes nothing there; generation goes on."""
    try:
        client = client_of(url)
        client.timeout_s = _TIMEOUT_S
        client.request("GET", "/health")
    except ServerError as error:
        yield failed("server", error)
        return
    yield Check("server", True, f"{client.url} answers, vLLM {_asked(client, '/version').get('version', 'unknown')}")
    yield _routes_check(client)
    yield _backend_check(client)


def _routes_check(client: ServerClient) -> Check:
    known = _asked(client, "/openapi.json").get("paths")  # none with --disable-fastapi-docs
    if isinstance(known, dict):
        missing = [route for route in _ROUTES if route not in known]
        if missing:
            hint = _DEV_MODE if len(missing) == len(_ROUTES) else "This version of vLLM is too old for the plugin."
            return Check("server routes", False, f"missing: {' '.join(missing)}", hint)
        return Check("server routes", True, "all that updates need")
    try:
        client.weight_version()
    except ServerError as error:
        return failed("server routes", error)
    return Check("server routes", True, "/weight_info answers; the server does not list the others")


def _backend_check(client: ServerClient) -> Check:
    answer = _asked(client, "/server_info?config_format=json").get("vllm_config")
    label = _asked(client, "/weight_info").get("weight_version")
    if not isinstance(answer, dict) or "weight_transfer_config" not in answer:
        return Check("server backend", True, f"not known: it does not show its configuration; weights {label}")
    backend = (answer["weight_transfer_config"] or {}).get("backend")
    if backend != BACKEND:
        hint = f'Start it with --weight-transfer-config \'{{"backend": "{BACKEND}"}}\'.'
        return Check("server backend", False, f"{backend or 'none'}", hint)
    return Check("server backend", True, f"{backend}, weights {label}")


def _asked(client: ServerClient, path: str) -> dict[str, Any]:
    """Return an answer that may as well not come."""
    try:
        return client.request("GET", path)
    except ServerError:
        return {}
