# SPDX-License-Identifier: Apache-2.0
"""The version label of a server, and how it is kept true.

vLLM keeps the label beside the engine, and any driver may set it, or die between a write and the label. So nobody
resumes an engine before it was asked whether it serves the very version of the run that the label names. If another
driver came between, the label becomes what the engine says.
"""

from __future__ import annotations

import logging
import re
from typing import Any, Final

from vllm_delta_snapshot.drive.client import ServerClient, ServerError
from vllm_delta_snapshot.errors import OutOfOrder, RunMismatch
from vllm_delta_snapshot.requests import asked_for

__all__ = [
    "UNCERTAIN_LABEL",
    "close_session",
    "confirm_label",
    "correct_label",
    "open_session",
    "run_and_version",
    "served_instead",
    "weight_label",
]

logger = logging.getLogger(__name__)

UNCERTAIN_LABEL: Final = "uncertain"
"""The label of a server that cannot vouch for its weights, so that it names no version that it does not hold."""

_SERVES: Final = re.compile(r"\bserves ([0-9A-Za-z-]+@\d+)")
_MOST_TRIES: Final = 5


def weight_label(version: int, run_id: str | None = None) -> str:
    """Return the label that vLLM shows for a version: ``<run id>@<version>``, or the bare number."""
    return f"{run_id}@{version}" if run_id else str(version)


def run_and_version(label: str) -> tuple[str, int] | None:
    """Return the run and the version that a label names; ``None`` if it names no run."""
    run_id, separator, version = label.rpartition("@")
    return (run_id, int(version)) if separator and run_id and version.isdecimal() else None


def confirm_label(client: ServerClient, asked: dict[str, Any], label: str) -> ServerError | None:
    """See that a server serves what was asked for, and that its label says so; make the label true. Blocks.

    Args:
        client: the server.
        asked: `update_info` with version and run.
        label: the label that was set for it.

    Returns:
        ``None``, or that another driver has brought the server elsewhere (its `kind` is `OutOfOrder` or `RunMismatch`).

    Raises:
        ServerError: it could not be asked.
    """
    for _ in range(_MOST_TRIES):
        elsewhere = served_instead(client, asked)
        true_label = label if elsewhere is None else _label_in(elsewhere)
        if client.weight_version() == true_label:
            break
        logger.warning("server=%s was labelled by another driver; it serves %s", client.url, true_label)
        client.set_weight_version(true_label)
    return elsewhere


def correct_label(client: ServerClient) -> bool:
    """Make the label name what the engine serves; say whether it did not. Labels that name no run are left. Blocks.

    Raises:
        ServerError: it could not be asked.
    """
    label = client.weight_version()
    named = run_and_version(label)
    return named is not None and confirm_label(client, asked_for(named[1], named[0], None), label) is not None


def served_instead(client: ServerClient, asked: dict[str, Any]) -> ServerError | None:
    """Ask the engine whether it serves a version of a run; ``None`` if it does, else what says what it serves. Blocks.

    Raises:
        ServerError: it could not be asked.
    """
    open_session(client)
    try:
        client.update(**asked, action="confirm")
    except ServerError as error:
        if error.kind not in (OutOfOrder, RunMismatch) or _SERVES.search(str(error)) is None:
            raise
        return error
    finally:
        close_session(client)
    return None


def _label_in(error: ServerError) -> str:
    found = _SERVES.search(str(error))
    assert found is not None  # noqa: S101 - `served_instead` has looked
    return found[1]


def open_session(client: ServerClient) -> None:
    """Begin an update. A session that a driver left open when it died is closed first. Raises: ServerError."""
    try:
        client.start_update()
    except ServerError as error:
        if error.status != 500 or error.kind is not None:
            raise
        logger.warning("server=%s closing a session that may have been left open: %s", client.url, error)
        close_session(client)
        client.start_update()


def close_session(client: ServerClient) -> None:
    """End an update that may have failed. Nothing happens if there is none."""
    # After a partial failure some workers have an open session and others not; one finish clears both, and may fail.
    try:
        client.finish_update()
    except ServerError:
        logger.debug("server=%s had no open session", client.url)
