# SPDX-License-Identifier: Apache-2.0
"""Where runs live: one port (`base`), one file an adapter, and `open_store` to find the adapter by URI."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from vllm_delta_snapshot.errors import CompatibilityError
from vllm_delta_snapshot.store.base import Store
from vllm_delta_snapshot.store.posix import PosixStore

__all__ = ["Store", "open_store"]


def open_store(uri: str, *, single_writer: bool = False) -> Store:
    """Open the store that a sync_dir names.

    Args:
        uri: ``/path`` or ``file:///path``.
        single_writer: accept a store that cannot create exclusively; then it is the caller's word that
            nobody else writes there.

    Raises:
        CompatibilityError: no adapter for this kind of URI.
    """
    parts = urlsplit(uri)
    if parts.scheme == "":
        return PosixStore(uri, single_writer=single_writer)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return PosixStore(unquote(parts.path), single_writer=single_writer)
    raise CompatibilityError(
        "sync_dir has a scheme that this version cannot open",
        expected="/path or file:///path",
        found=f"{parts.scheme}://",
        hint="Mount the store as a folder that all hosts share, and give its path.",
    )
