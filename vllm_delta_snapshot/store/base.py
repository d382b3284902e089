# SPDX-License-Identifier: Apache-2.0
"""The port that every store adapter fills: few verbs, with their atomicity stated.

Keys are relative, with "/" between folders. An object is written once and never changed; nothing here overwrites or
renames. Every verb blocks. Adapters are safe to use from several threads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

__all__ = ["HasFolders", "HasSetUp", "Store", "SweepsUploads", "TellsTime"]


class Store(Protocol):
    """A folder of immutable objects."""

    uri: str
    """What the user gave, for messages."""

    concurrency: int
    """How many ranges of an object are well read at once."""

    range_bytes: int
    """How large a range is well read: small where the processor's cache counts, large where round trips do."""

    def create(self, key: str, data: bytes) -> None:
        """Create a small object exclusively, and durably when this returns.

        All or nothing: a reader sees no object or the whole of it. Of several writers exactly one succeeds.

        Raises:
            ObjectExists: somebody was first (perhaps an earlier try of one's own: read it back).
            ExclusiveCreateUnsupported: this store cannot promise that.
            StoreUnavailable: it may or may not have happened; read it back.
            StoreError: it did not happen.
        """
        ...

    def put(self, key: str, chunks: Iterable[memoryview]) -> int:
        """Write a new large object under a key that only this writer knows; durable when this returns.

        A reader that knows the key may see a part of it: publish the key afterwards. The chunks' memory stays as it is
        until this returns; the next chunk is taken when there is room for it.

        Returns:
            The number of bytes written.

        Raises:
            ObjectExists: the key is taken.
            StoreError, StoreUnavailable: it was not (wholly) written.
        """
        ...

    def read(self, key: str, *, max_bytes: int) -> bytes:
        """Return a small object.

        Raises:
            ObjectNotFound: there is none.
            LimitExceeded: it is larger than `max_bytes`.
            StoreUnavailable: try again.
        """
        ...

    def size(self, key: str) -> int:
        """Return the size of an object in bytes.

        Raises:
            ObjectNotFound: there is none.
            StoreUnavailable: try again.
        """
        ...

    def read_range(self, key: str, offset: int, into: memoryview) -> int:
        """Fill `into` from `offset` on.

        Returns:
            The number of bytes read; fewer than asked for only at the end of the object.

        Raises:
            ObjectNotFound: there is none (any more).
            StoreUnavailable: try again.
        """
        ...

    def list(self, folder: str) -> list[str]:
        """Return the names directly in a folder, sorted; empty if there is no such folder.

        Sees every object whose creation ended before the call, on NFS too (which polling by name does not).

        Raises:
            StoreUnavailable: try again.
        """
        ...

    def delete(self, key: str) -> None:
        """Delete an object; nothing happens if there is none.

        Raises:
            StoreError: it could not be deleted.
        """
        ...

    def check_exclusive_create(self) -> None:
        """Find out whether `create` keeps its promise here, by creating the same probe object twice.

        Raises:
            ExclusiveCreateUnsupported: it does not.
            StoreError, StoreUnavailable: the store cannot be written at all.
        """
        ...


@runtime_checkable
class SweepsUploads(Protocol):
    """A store in which uploads that were cut off stay behind, unseen."""

    def sweep(self, *, older_than_s: float) -> int:
        """Abort uploads under this store's prefix that were begun so long ago; return how many there were.

        Raises:
            StoreError, StoreUnavailable: they cannot be listed or aborted.
        """
        ...


@runtime_checkable
class HasFolders(Protocol):
    """A store in which a folder is something of its own, and stays when its last object goes."""

    def remove_empty(self, folder: str) -> None:
        """Remove a folder if nothing is in it.

        Raises:
            StoreError: it could not be removed.
        """
        ...


@runtime_checkable
class TellsTime(Protocol):
    """A store that has a clock."""

    def now(self) -> float:
        """Return the time by the store's clock, in seconds since 1970; good to about a second.

        Raises:
            StoreError, StoreUnavailable: it cannot be asked; a folder has to be writable.
        """
        ...


@runtime_checkable
class HasSetUp(Protocol):
    """A store that is reached by a vendor's library, with what is set up for that."""

    def set_up(self) -> str:
        """Return what holds, in words and without secrets. Asks nobody."""
        ...
