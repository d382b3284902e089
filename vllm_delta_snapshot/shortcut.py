# SPDX-License-Identifier: Apache-2.0
"""Make an anchor or a merged delta appear, as its record says; or find that another's has, which comes to the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from vllm_delta_snapshot.errors import ObjectExists, StoreUnavailable
from vllm_delta_snapshot.format.anchor import AnchorRecord
from vllm_delta_snapshot.format.version import MergedRecord
from vllm_delta_snapshot.retention import remove_folder
from vllm_delta_snapshot.store import Store

__all__ = ["commit_shortcut"]

R = TypeVar("R", AnchorRecord, MergedRecord)


def commit_shortcut(store: Store, key: str, record: R, read: Callable[[], R]) -> R:
    """Create a record whose folder is complete. Blocks.

    Args:
        store: the run's store.
        key: the record's.
        record: what it says.
        read: returns the record that is there.

    Returns:
        The record that is there now: this one, or that of another who was first; then this one's folder is removed.

    Raises:
        StoreError: it was not created.
        StoreUnavailable: nobody knows; do it again.
    """
    try:
        store.create(key, record.to_json())
    except (ObjectExists, StoreUnavailable) as error:
        folder, _, name = key.rpartition("/")
        if isinstance(error, StoreUnavailable) and name not in store.list(folder):
            raise
        found = read()
        if found.publication_id != record.publication_id:
            remove_folder(store, record.folder)
        return found
    return record
