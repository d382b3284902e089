# SPDX-License-Identifier: Apache-2.0
"""A store in a Google Cloud Storage bucket. Needs google-cloud-storage (extra ``[gcs]``); credentials as it finds them.

Exclusive create is a single-shot upload with ``ifGenerationMatch=0``. Large objects go up in parts, several at once,
and appear when the last is there (`gcs_upload`); GCS's checksum of the whole is compared with ours. The library checks
no ranged download, so every answer's length is compared here, and the bytes by whoever asked for them.
"""

from __future__ import annotations

import contextlib
import inspect
import io
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from vllm_delta_snapshot.errors import ObjectExists, ObjectNotFound, StoreError, StoreUnavailable
from vllm_delta_snapshot.store.bucket import BucketStore, PastTheEnd
from vllm_delta_snapshot.store.config import StoreConfig
from vllm_delta_snapshot.store.gcs_client import make_client, make_retry, reported
from vllm_delta_snapshot.store.gcs_io import Crc32c, Sink, Stream
from vllm_delta_snapshot.store.gcs_upload import FOLDER, Composer
from vllm_delta_snapshot.store.keys import Prefix
from vllm_delta_snapshot.store.parts import parts_of
from vllm_delta_snapshot.store.probe import probe_exclusive_create
from vllm_delta_snapshot.store.secrets import presentable

if TYPE_CHECKING:
    from vllm_delta_snapshot.store.gcs_answers import Operation

__all__ = ["GcsStore"]

_CHUNK_UNIT: Final = 256 << 10
"""Parts of a resumable upload are multiples of this."""


class GcsStore(BucketStore):
    """See the module and `Store`.

    Args:
        bucket: its name.
        prefix: the run's folder in it.
        config: how it is reached.
        single_writer: create without a condition: then two writers cannot be told apart.

    Raises:
        CompatibilityError: google-cloud-storage is not installed.
        StoreError: there are no credentials.
    """

    def __init__(self, bucket: str, prefix: str, config: StoreConfig, *, single_writer: bool = False) -> None:
        super().__init__(f"gs://{bucket}", prefix, config, single_writer=single_writer)
        self._client = make_client(config, self.uri)
        self._is_bucket_known = False
        self._bucket = self._client.bucket(bucket)
        self._timeouts = (config.connect_timeout_s, config.read_timeout_s)
        self._retry = make_retry(config)
        self._chunk_bytes = config.part_bytes // _CHUNK_UNIT * _CHUNK_UNIT
        options = {"timeout": self._timeouts, "retry": self._retry}
        self._composer = Composer(self._bucket, self._prefix.of_folder(FOLDER), config.concurrency, options)
        # The library hands a body on in pieces of 8 KiB unless it is told not to, where it can be told.
        is_told = "single_shot_download" in inspect.signature(self._bucket.blob("x").download_to_file).parameters
        self._whole: dict[str, Any] = {"single_shot_download": True} if is_told else {}

    def create(self, key: str, data: bytes) -> None:
        """See `Store.create`."""
        blob = self._bucket.blob(self._prefix.of(key))
        if self._single_writer:
            self._refuse_taken(key)
        failed: list[bool] = []
        try:
            with self._reported(key, "write"):
                blob.upload_from_string(
                    data,
                    content_type="application/json",
                    if_generation_match=None if self._single_writer else 0,
                    checksum="crc32c",
                    timeout=self._timeouts,
                    retry=make_retry(self._config, lambda: failed.append(True)),
                )
        except ObjectExists:
            # Of a try whose answer was lost, the next one finds what it made.
            if not failed or not self._is_own(key, data):
                raise

    def put(self, key: str, chunks: Iterable[memoryview]) -> int:
        """See `Store.put`. Memory: `part_bytes` times `concurrency`; one part, twice, where parts cannot be deleted."""
        name = self._prefix.of(key)
        self._refuse_taken(key)
        checksum = Crc32c()
        parts = checksum.of(parts_of(chunks, self._chunk_bytes))
        first = next(parts)
        second = next(parts, None)
        try:
            with self._reported(key, "write"):
                if second is None:
                    self._put_in_one(name, io.BytesIO(first), len(first))
                elif self._composer.is_good_here:
                    self._composer.put(name, chain((first, second), parts))
                else:
                    self._put_in_one(name, Stream(chain((first, second), parts)), None)
        except (ObjectExists, StoreUnavailable) as error:
            # It was not there before, and only this writer knows the name: most likely a reply was lost.
            try:
                if self._is_as_written(key, checksum):
                    return checksum.num_bytes
            except StoreError:
                pass  # then the first error says more
            raise error
        if not self._is_as_written(key, checksum):
            raise StoreError("object is not what was written", file=self._where(key), expected=checksum)
        return checksum.num_bytes

    def _put_in_one(self, name: str, source: Any, size: int | None) -> None:
        """Upload a file in one request, or one after another where its size is not known."""
        blob = self._bucket.blob(name, chunk_size=self._chunk_bytes if size is None else None)
        blob.upload_from_file(
            source,
            size=size,
            content_type="application/octet-stream",
            if_generation_match=0,
            checksum="crc32c",
            timeout=self._timeouts,
            retry=self._retry,
        )

    def read(self, key: str, *, max_bytes: int) -> bytes:
        """See `Store.read`."""

        def once() -> bytes:
            known = self._known(key)
            self._check_limit(key, int(known.size), max_bytes)
            data = self._download(key, known.generation)
            with self._answering():
                self._check_length(key, int(known.size), len(data))
            return data

        return self._patiently(once)

    def _download(self, key: str, generation: int) -> bytes:
        """Download an object as it was looked at; the library itself tries again where an answer breaks off."""
        from google.cloud.storage.exceptions import DataCorruption

        # Not the one that was looked at: that has an address from GCS, which need not lie where the endpoint is.
        blob = self._bucket.blob(self._prefix.of(key))
        options = {"raw_download": True, "timeout": self._timeouts, "retry": self._retry}
        options["if_generation_match"] = generation
        with self._reported(key):
            try:
                return bytes(blob.download_as_bytes(**options))
            except DataCorruption:
                # What is wrong on its way is right the second time, what is wrong in the bucket is not.
                return bytes(blob.download_as_bytes(**options))

    def size(self, key: str) -> int:
        """See `Store.size`."""
        return int(self._known(key).size)

    def _known(self, key: str) -> Any:
        """Return an object with what GCS says of it."""
        blob = self._bucket.blob(self._prefix.of(key))
        with self._reported(key):
            blob.reload(timeout=self._timeouts, retry=self._retry)
        return blob

    def read_range(self, key: str, offset: int, into: memoryview) -> int:
        """See `Store.read_range`."""
        blob = self._bucket.blob(self._prefix.of(key))
        if not len(into):
            return 0

        def once() -> int:
            sink = Sink(into.cast("B"))
            with self._reported(key):
                blob.download_to_file(
                    sink,
                    start=offset,
                    end=offset + len(into) - 1,
                    raw_download=True,
                    checksum=None,
                    timeout=self._timeouts,
                    retry=self._retry,
                    **self._whole,
                )
            if sink.num_bytes < len(into):
                expected = min(len(into), max(0, self.size(key) - offset))
                with self._answering():
                    self._check_length(key, expected, sink.num_bytes)
            return min(sink.num_bytes, len(into))

        try:
            return self._patiently(once)
        except PastTheEnd:
            return 0

    def list(self, folder: str) -> list[str]:
        """See `Store.list`."""
        inside = self._prefix.of_folder(folder)
        where = folder or "."
        objects: list[str] = []
        tokens: set[str] = set()
        with self._reported(where, "list"):
            found = self._client.list_blobs(
                self._bucket, prefix=inside, delimiter="/", timeout=self._timeouts, retry=self._retry
            )
            for page in found.pages:
                objects += [blob.name for blob in page]
                self._check_new(where, found.next_page_token, tokens)
            names = Prefix.names(inside, objects, found.prefixes)
        return [name for name in names if name != FOLDER]

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        blob = self._bucket.blob(self._prefix.of(key))
        with contextlib.suppress(ObjectNotFound), self._reported(key, "delete"):
            blob.delete(timeout=self._timeouts, retry=self._retry)

    def now(self) -> float:
        """See `TellsTime.now`."""
        with self._reported(".", "list"):
            # The library shows nobody the headers of an answer; its session, which carries the credentials, does.
            url = f"{self._client.api_endpoint}/storage/v1/b/{quote(self._bucket.name, safe='')}/o?maxResults=1"
            answer = self._client._http.get(url, timeout=self._timeouts)
        return self._time_of(answer.headers.get("date"))

    def set_up(self) -> str:
        """See `HasSetUp.set_up`."""
        return f"endpoint {presentable(str(self._client.api_endpoint))}, project {self._client.project!r}"

    def check_exclusive_create(self) -> None:
        """See `Store.check_exclusive_create`."""
        if not self._single_writer:
            probe_exclusive_create(self)

    def sweep(self, *, older_than_s: float) -> int:
        """Delete parts under this prefix that a writer has left long ago: they cost, and are never seen.

        Returns:
            How many there were.

        Raises:
            StoreError, StoreUnavailable: they cannot be listed or deleted.
        """
        until = datetime.now(UTC) - timedelta(seconds=older_than_s)
        swept = 0
        with self._reported(FOLDER, "delete"):
            for blob in self._client.list_blobs(
                self._bucket, prefix=self._prefix.of_folder(FOLDER), timeout=self._timeouts, retry=self._retry
            ):
                if blob.time_created is not None and blob.time_created <= until:
                    blob.delete(timeout=self._timeouts, retry=self._retry)
                    swept += 1
        return swept

    def _is_as_written(self, key: str, expected: Crc32c) -> bool:
        blob = self._known(key)
        # Servers that are not Google's may know no checksum; readers compare their own in any case.
        return int(blob.size) == expected.num_bytes and blob.crc32c in (None, "", expected.text)

    @contextlib.contextmanager
    def _reported(self, key: str, operation: Operation = "read") -> Iterator[None]:
        with reported(self._where(key), self._bucket.name, operation, self._bucket_exists):
            yield

    def _bucket_exists(self) -> bool:
        if not self._is_bucket_known:
            try:
                self._is_bucket_known = bool(self._bucket.exists(timeout=self._timeouts, retry=self._retry))
            except Exception:  # noqa: BLE001 - who may not ask is told of the object
                return True
        return self._is_bucket_known
