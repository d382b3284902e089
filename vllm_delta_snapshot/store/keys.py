# SPDX-License-Identifier: Apache-2.0
"""Keys of an object store: checked, and put under the prefix of a run."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_delta_snapshot.errors import StoreError, StoreUnavailable

__all__ = ["Prefix", "check_key"]


def check_key(key: str) -> str:
    """Return a relative key.

    Raises:
        StoreError: it could name something outside of the store's folder, or not everywhere the same.
    """
    parts = key.split("/")
    if not key or "\0" in key or any(part in ("", ".", "..") for part in parts):
        raise StoreError("not a key of this store", file=key or "''", expected="relative, without '.' or '..'")
    return key


class Prefix:
    """The folder of a run in a bucket.

    Args:
        path: as in the URI, after the bucket.
    """

    def __init__(self, path: str) -> None:
        stripped = path.strip("/")
        self._text = f"{check_key(stripped)}/" if stripped else ""

    def of(self, key: str) -> str:
        """Return an object's name in the bucket. Raises: StoreError."""
        return self._text + check_key(key)

    def of_folder(self, folder: str) -> str:
        """Return what the names of all objects in a folder begin with. Raises: StoreError."""
        return f"{self.of(folder)}/" if folder else self._text

    @staticmethod
    def names(folder: str, objects: Iterable[str], folders: Iterable[str]) -> list[str]:
        """Return what lies directly in a folder, from names in the bucket, sorted.

        Args:
            folder: what all of them begin with.
            objects: names of objects.
            folders: common prefixes, with the "/" at their end.

        Raises:
            StoreUnavailable: there are names that were not asked for: then others may be missing.
        """
        objects, folders = tuple(objects), tuple(folders)
        for name in (*objects, *folders):
            if not name.startswith(folder):
                raise StoreUnavailable("a listing is of another folder", expected=f"{folder}...", found=name)
        found = {name[len(folder) :].rstrip("/") for name in (*objects, *folders)}
        return sorted(found - {""})
