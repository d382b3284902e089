# SPDX-License-Identifier: Apache-2.0
"""What stores in buckets have in common, whoever's they are: names for messages, and what is checked alike."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from typing import Final, TypeVar

from vllm_delta_snapshot.errors import LimitExceeded, ObjectExists, ObjectNotFound, StoreError, StoreUnavailable
from vllm_delta_snapshot.store.config import StoreConfig
from vllm_delta_snapshot.store.keys import Prefix
from vllm_delta_snapshot.store.retry import again

__all__ = ["BucketStore", "PastTheEnd"]

T = TypeVar("T")

_FIRST_PAUSE_S: Final = 0.5
_RANGE_BYTES: Final = 8 << 20
"""Larger ranges gain nothing, and leave connections without work at the end of a small file."""


class PastTheEnd(Exception):
    """A range begins at or after the end of an object: no error to the caller."""


class _Broken(Exception):
    """An answer began, and did not end as it should."""

    def __init__(self, error: StoreUnavailable) -> None:
        super().__init__()
        self.error = error


class BucketStore(ABC):
    """See the module.

    Args:
        uri: of the bucket, with scheme.
        prefix: the run's folder in it.
        config: how it is reached.
        single_writer: create without a condition.
    """

    def __init__(self, uri: str, prefix: str, config: StoreConfig, *, single_writer: bool) -> None:
        self.uri = f"{uri}/{prefix.strip('/')}".rstrip("/")
        self.concurrency = config.concurrency
        self.range_bytes = min(config.part_bytes, _RANGE_BYTES)
        self._prefix = Prefix(prefix)
        self._config = config
        self._single_writer = single_writer

    @abstractmethod
    def size(self, key: str) -> int:
        """See `Store.size`."""

    def _where(self, key: str) -> str:
        return f"{self.uri}/{key}"

    @abstractmethod
    def read(self, key: str, *, max_bytes: int) -> bytes:
        """See `Store.read`."""

    def _is_own(self, key: str, data: bytes) -> bool:
        """Say whether an object is what was just created, by an earlier try: nobody else writes the same bytes."""
        try:
            return self.read(key, max_bytes=len(data)) == data
        except (LimitExceeded, ObjectNotFound):
            return False

    def _check_new(self, key: str, token: str | None, seen: set[str]) -> None:
        """Refuse a listing that goes round in circles."""
        if token and token in seen:
            raise StoreUnavailable("the store repeats a page of its listing", file=self._where(key))
        seen.add(token or "")

    def _refuse_taken(self, key: str) -> None:
        try:
            self.size(key)
        except ObjectNotFound:
            return
        raise ObjectExists("object exists", file=self._where(key))

    def _check_written(self, key: str, num_bytes: int) -> None:
        found = self.size(key)
        if found != num_bytes:
            raise StoreError("object has another size than was written", file=self._where(key), found=found)

    def _time_of(self, date: str | None) -> float:
        try:
            return parsedate_to_datetime(date or "").timestamp()
        except (TypeError, ValueError) as error:
            raise StoreError("the store does not say what time it is", file=self.uri, found=date) from error

    def _check_limit(self, key: str, size: int, max_bytes: int) -> None:
        if size > max_bytes:
            raise LimitExceeded(
                "object too large", file=self._where(key), expected=f"at most {max_bytes} bytes", found=size
            )

    def _patiently(self, read: Callable[[], T]) -> T:
        """Read, and again if an answer breaks off: the vendors' libraries try again only until an answer begins."""
        try:
            return again(read, attempts=self._config.attempts, first_s=_FIRST_PAUSE_S, may_pass=_Broken)
        except _Broken as broken:
            raise broken.error from broken.error.__cause__

    @staticmethod
    @contextlib.contextmanager
    def _answering() -> Iterator[None]:
        """Surround what reads the body of an answer, inside of `_patiently`."""
        try:
            yield
        except StoreUnavailable as error:
            raise _Broken(error) from error

    @staticmethod
    @contextlib.contextmanager
    def _asked(stray: str) -> Iterator[None]:
        """Surround what asks for a body, inside of `_patiently`: what is no answer of the store's is asked for again.

        Args:
            stray: what errors say of such an answer; the vendors' libraries try the others again themselves.
        """
        try:
            yield
        except StoreUnavailable as error:
            if error.what == stray:
                raise _Broken(error) from error
            raise

    def _confirm_lost(self, key: str, num_bytes: int, error: StoreError) -> None:
        """Tell a lost answer to an upload from one that failed: after the first, the object is there and whole."""
        try:
            self._check_written(key, num_bytes)
        except StoreError:
            raise StoreUnavailable("an upload was cut off", file=self._where(key), found=error.what) from error

    def _check_length(self, key: str, expected: int, found: int) -> None:
        if found != expected:
            raise StoreUnavailable(
                "an answer is cut off", file=self._where(key), expected=f"{expected} bytes", found=f"{found} bytes"
            )
