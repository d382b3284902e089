"""A real store that fails at a chosen operation: before it, in the middle of it, or after it (a lost reply)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

from vllm_delta_snapshot.errors import StoreUnavailable
from vllm_delta_snapshot.store import Store


class When(Enum):
    """The moment of a failure."""

    BEFORE = "before"
    TORN = "torn"
    AFTER = "after"


class FaultyStore:
    """Passes everything on to a store, and fails at operation number `at` (from 0).

    Args:
        inner: the real store.
        at: the operation that fails; ``None`` only counts.
        when: TORN leaves half of what a `put` was given, and is BEFORE for every other verb.
        down: whether every operation after it fails too.
        fail: what happens at that moment; raises `StoreUnavailable` unless told otherwise. If it returns, the operation
            goes on: another trainer acted in between.
    """

    def __init__(
        self,
        inner: Store,
        at: int | None = None,
        *,
        when: When = When.BEFORE,
        down: bool = False,
        fail: Callable[[], object] | None = None,
    ) -> None:
        self.inner = inner
        self.uri = inner.uri
        self.concurrency = inner.concurrency
        self.range_bytes = inner.range_bytes
        self.log: list[str] = []
        self._at = at
        self._when = when
        self._down = down
        self._fail = fail or _unavailable

    def create(self, key: str, data: bytes) -> None:
        """See `Store`."""
        self._do("create", lambda: self.inner.create(key, data))

    def put(self, key: str, chunks: Iterable[memoryview]) -> int:
        """See `Store`."""

        def torn() -> None:
            data = b"".join(bytes(chunk) for chunk in chunks)
            self.inner.put(key, [memoryview(data[: len(data) // 2])])

        return self._do("put", lambda: self.inner.put(key, chunks), torn)

    def read(self, key: str, *, max_bytes: int) -> bytes:
        """See `Store`."""
        return self._do("read", lambda: self.inner.read(key, max_bytes=max_bytes))

    def size(self, key: str) -> int:
        """See `Store`."""
        return self._do("size", lambda: self.inner.size(key))

    def read_range(self, key: str, offset: int, into: memoryview) -> int:
        """See `Store`."""
        return self._do("read_range", lambda: self.inner.read_range(key, offset, into))

    def list(self, folder: str) -> list[str]:
        """See `Store`."""
        return self._do("list", lambda: self.inner.list(folder))

    def delete(self, key: str) -> None:
        """See `Store`."""
        self._do("delete", lambda: self.inner.delete(key))

    def check_exclusive_create(self) -> None:
        """See `Store`."""
        self._do("check_exclusive_create", self.inner.check_exclusive_create)

    def _do(self, verb: str, action: Callable[[], Any], torn: Callable[[], None] | None = None) -> Any:
        number = len(self.log)
        self.log.append(verb)
        if self._at is None or number < self._at or (number > self._at and not self._down):
            return action()
        if number == self._at and self._when is When.AFTER:
            result = action()
            self._fail()
            return result
        if number == self._at and self._when is When.TORN and torn:
            torn()
        self._fail()
        return action()

    def heal(self) -> None:
        """Fail no more."""
        self._at = None


def _unavailable() -> None:
    raise StoreUnavailable("injected failure")
