# SPDX-License-Identifier: Apache-2.0
"""Credentials do not belong in addresses: those are logged, written into metadata and shown in every message.

So an address with credentials is refused before anything is done with it, by a message that does not repeat it.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

from vllm_delta_snapshot.errors import StoreError

__all__ = ["has_credentials", "presentable", "refuse_credentials"]

_USER: Final = re.compile(r"^[a-z][a-z0-9+.-]*://[^/]*@(?!\d{1,8}$)", re.IGNORECASE)
"""But for ``s3://bucket@42``, which is version 42 of a run."""
_FIELDS: Final = "x-amz- x-goog- awsaccesskeyid googleaccessid accesskey access_key secret sig token password"
_SIGNED: Final = re.compile(rf"[?&]({_FIELDS.replace(' ', '|')}|credential)[^=&]*=", re.IGNORECASE)


def has_credentials(address: str) -> bool:
    """Say whether an address holds a user's name, a password or a signature."""
    text = unquote(address)
    return bool(_USER.match(text) or ("://" in text and _SIGNED.search(text)))


def presentable(address: str) -> str:
    """Return an address for a message; in place of one that may hold credentials, only that it may."""
    return "an address with credentials" if "@" in address or has_credentials(address) else address


def refuse_credentials(address: str, what: str) -> None:
    """Refuse an address that holds credentials.

    Args:
        address: the address.
        what: what it is of, for the message.

    Raises:
        StoreError: it holds some. The message does not show them.
    """
    if has_credentials(address):
        raise StoreError(
            f"{what} holds credentials",
            expected="an address without user, password, key or signature",
            hint="Give credentials as for the vendor's own tools (environment, profile, identity): see docs/stores.md. "
            "If these were typed into a shell or a log, replace them.",
        )
