# SPDX-License-Identifier: Apache-2.0
"""The server that a verb talks to."""

from __future__ import annotations

import os
import urllib.parse

from vllm_delta_snapshot.drive.client import ServerClient, ServerError
from vllm_delta_snapshot.store.secrets import presentable

__all__ = ["client_of"]


def client_of(url: str) -> ServerClient:
    """Return a client of a server, with the key in ``VLLM_API_KEY`` if there is one.

    Raises:
        ServerError: the URL or the key cannot be.
    """
    try:
        urllib.parse.urlsplit(url).port  # noqa: B018 - raises where it is no number
    except ValueError:
        raise ServerError("not a server's URL", expected="http://host:port", found=presentable(url)) from None
    # A key from a file often ends with a line break. What no header can carry, http.client would name in its error.
    api_key = os.environ.get("VLLM_API_KEY", "").strip()
    if not (api_key.isascii() and api_key.isprintable()):
        raise ServerError(
            "VLLM_API_KEY has characters that no HTTP header can carry", hint="Set it to the server's key."
        )
    return ServerClient(url, api_key=api_key)
