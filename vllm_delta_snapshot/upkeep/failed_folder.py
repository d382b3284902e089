# SPDX-License-Identifier: Apache-2.0
"""Folders of what was never committed: removed where it is proven that nobody will ever name them, and only there.

Two proofs. Whoever fails before asking for the commit knows that its folder, whose name only it knows, will have no
record. And once a version has a record, which never changes, every other folder of that version is nobody's, whoever is
still writing into it: that writer's commit will be refused. A folder of a version without a record is left alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from vllm_delta_snapshot.errors import ObjectExists, StoreError, StoreUnavailable
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import Store
from vllm_delta_snapshot.upkeep.retention import remove_folder

__all__ = ["removed_if_failed", "superseded_folders"]


@contextlib.contextmanager
def removed_if_failed(store: Store, folder: str) -> Iterator[None]:
    """Surround the writing of a folder, up to and not including its commit: what fails leaves nothing.

    Where the store does not answer nothing is tried, so that nobody waits for it twice; where a name was taken, what is
    there may be another's.
    """
    try:
        yield
    except (StoreUnavailable, ObjectExists):
        raise
    except BaseException:
        with contextlib.suppress(StoreError):
            remove_folder(store, folder)
        raise


def superseded_folders(folder: RunFolder) -> list[str]:
    """Return folders of deltas that are not those which their versions' records name. Two listings, and few reads.

    Raises:
        DeltaSnapshotError: the run cannot be read.
    """
    of_version: dict[int, list[str]] = {}
    for name in folder.store.list(layout.DELTAS_FOLDER):
        path = f"{layout.DELTAS_FOLDER}/{name}"
        version = layout.version_of_delta(path)
        if version is not None:
            of_version.setdefault(version, []).append(path)
    doubled = {version: paths for version, paths in of_version.items() if len(paths) > 1}
    if not doubled:
        return []
    found: list[str] = []
    for version in sorted(doubled.keys() & set(folder.versions())):
        named = folder.read_version(version).folder
        if named in doubled[version]:
            found += [path for path in doubled[version] if path != named]
    return found
