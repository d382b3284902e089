# SPDX-License-Identifier: Apache-2.0
"""Probe: does a store keep its promise that of two writers of an object only one succeeds?"""

from __future__ import annotations

import contextlib
import uuid

from vllm_delta_snapshot.errors import ExclusiveCreateUnsupported, ObjectExists, StoreError
from vllm_delta_snapshot.store.base import Store

__all__ = ["probe_exclusive_create"]


def probe_exclusive_create(store: Store) -> None:
    """Create the same object twice, and delete it. Raises: see `Store.check_exclusive_create`."""
    key = f".probe-{uuid.uuid4().hex}"
    try:
        store.create(key, b"first")
        try:
            store.create(key, b"second")
        except ObjectExists:
            return
        raise ExclusiveCreateUnsupported(
            "the store lets two writers create the same object, so two trainers could not be told apart",
            file=store.uri,
            found="the second create replaced the object of the first",
            hint="Use another store, or pass single_writer=True if only one trainer will ever write here.",
        )
    finally:
        with contextlib.suppress(StoreError):
            store.delete(key)
