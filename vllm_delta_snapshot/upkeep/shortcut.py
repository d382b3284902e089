# SPDX-License-Identifier: Apache-2.0
"""Make an anchor or a merged delta appear, as its record says; or find that another's has, which comes to the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

from vllm_delta_snapshot.errors import ObjectExists, RunMismatch, StoreError, StoreUnavailable
from vllm_delta_snapshot.format.anchor import AnchorRecord
from vllm_delta_snapshot.format.version import MergedRecord
from vllm_delta_snapshot.runs.own_run import OwnRun
from vllm_delta_snapshot.upkeep.retention import remove_folder

__all__ = ["commit_shortcut"]

R = TypeVar("R", AnchorRecord, MergedRecord)


def commit_shortcut(own: OwnRun, key: str, record: R, read: Callable[[], R]) -> R:
    """Create a record whose folder is complete. Blocks.

    Args:
        own: the run.
        key: the record's.
        record: what it says.
        read: returns the record that is there.

    Returns:
        The record that is there now: this one, or that of another who was first; then this one's folder is removed.

    Raises:
        RunMismatch: the folder is another run's by now; nothing of this one's was left there.
        StoreError: it was not created.
        StoreUnavailable: nobody knows; do it again.
    """
    data = record.to_json()
    try:
        try:
            own.create(key, data)
        except (ObjectExists, StoreUnavailable):
            if own.find(key, data) is None:
                raise
            found = read()
            if found.publication_id != record.publication_id:
                remove_folder(own.store, record.folder)
            return found
    except RunMismatch:
        with contextlib.suppress(StoreError):  # nobody else has written there
            remove_folder(own.store, record.folder)
        raise
    return record
