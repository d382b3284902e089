# SPDX-License-Identifier: Apache-2.0
"""Where runs live: one port (`base`), one file an adapter, and `open_store` to find the adapter by URI."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from vllm_delta_snapshot.errors import CompatibilityError
from vllm_delta_snapshot.store.base import Store, TellsTime
from vllm_delta_snapshot.store.config import StoreConfig
from vllm_delta_snapshot.store.posix import PosixStore
from vllm_delta_snapshot.store.secrets import refuse_credentials

__all__ = ["Store", "StoreConfig", "TellsTime", "open_store"]


def open_store(uri: str, *, single_writer: bool = False, config: StoreConfig | None = None) -> Store:
    """Open the store that a sync_dir names. Makes no request.

    Args:
        uri: ``/path``, ``file:///path``, ``s3://bucket/prefix`` or ``gs://bucket/prefix``.
        single_writer: accept a store that cannot create exclusively; then it is the caller's word that
            nobody else writes there.
        config: how an object store is reached; by default what environment and file say (`StoreConfig.load`).

    Raises:
        CompatibilityError: no adapter for this kind of URI, or the library that it needs is not installed.
        CorruptFile: the configuration is wrong.
        StoreError: the URI names no bucket or holds credentials, or there are no credentials.
    """
    refuse_credentials(uri, "sync_dir")
    parts = urlsplit(uri)
    if parts.scheme == "":
        return PosixStore(uri, single_writer=single_writer)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return PosixStore(unquote(parts.path), single_writer=single_writer)
    if parts.scheme in ("s3", "gs") and parts.netloc:
        loaded = StoreConfig.load() if config is None else config
        # What follows a bucket's name is a key as it is: "#", "?" and "%" mean nothing in it.
        bucket, _, prefix = uri.partition("://")[2].partition("/")
        if parts.scheme == "s3":
            from vllm_delta_snapshot.store.s3 import S3Store

            return S3Store(bucket, prefix, loaded, single_writer=single_writer)
        from vllm_delta_snapshot.store.gcs import GcsStore

        return GcsStore(bucket, prefix, loaded, single_writer=single_writer)
    raise CompatibilityError(
        "sync_dir names a store that this version cannot open",
        expected="/path, file:///path, s3://bucket/prefix or gs://bucket/prefix",
        found=f"{parts.scheme}://",  # the rest may hold a password
        hint="Mount the store as a folder that all hosts share, and give its path.",
    )
