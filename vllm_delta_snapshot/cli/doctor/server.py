# SPDX-License-Identifier: Apache-2.0
"""What ``doctor`` looks at in a running server: whether it answers, has the routes for updates, and our backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from vllm_delta_snapshot.cli.doctor.check import Check, failed
from vllm_delta_snapshot.cli.server import client_of
from vllm_delta_snapshot.drive.client import ServerClient, ServerError
from vllm_delta_snapshot.drive.labels import run_and_version, served_instead
from vllm_delta_snapshot.errors import DeltaSnapshotError, NotInitialized
from vllm_delta_snapshot.plugin import BACKEND
from vllm_delta_snapshot.requests import asked_for
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import open_store

__all__ = ["server_checks"]

_ROUTES: Final = (
    *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
    *("/pause", "/resume", "/is_paused", "/reset_prefix_cache", "/weight_info"),
)
_DEV_MODE: Final = "Start the server with VLLM_SERVER_DEV_MODE=1, which enables vLLM's weight update routes."
_TIMEOUT_S: Final = 30.0


def server_checks(url: str, sync_dir: str | None = None) -> Iterator[Check]:
    """Yield what was found of a server, and whether it serves a run. Changes nothing there; generation goes on."""
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
    if sync_dir is not None:
        yield _run_check(client, sync_dir)


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


def _run_check(client: ServerClient, sync_dir: str) -> Check:
    """Say whether the server serves a version of the run in a folder, as its label says and as the engine says."""
    try:
        run_id = RunFolder(open_store(sync_dir)).read_run().run_id
    except DeltaSnapshotError as error:
        return failed("server run", error)
    label = str(_asked(client, "/weight_info").get("weight_version"))
    named = run_and_version(label)
    if named is None:
        return Check("server run", True, f"it names no version of a run yet ({label}); a sync or follow initializes it")
    if named[0] != run_id:
        hint = f"To move it: delta-snapshot sync {sync_dir} --server {client.url} --switch-run"
        return Check("server run", False, f"it serves run {named[0]}, version {named[1]}; {sync_dir} is {run_id}", hint)
    try:
        elsewhere = served_instead(client, asked_for(named[1], run_id, None))
        if elsewhere is not None:
            return failed("server run", elsewhere)
    except ServerError as error:
        if error.kind is not NotInitialized:
            return failed("server run", error)
        return Check("server run", True, f"{label} by its label; it is not initialized, which a sync or follow does")
    return Check("server run", True, f"it serves version {named[1]} of this run")


def _asked(client: ServerClient, path: str) -> dict[str, Any]:
    """Return an answer that may as well not come."""
    try:
        return client.request("GET", path)
    except ServerError:
        return {}
