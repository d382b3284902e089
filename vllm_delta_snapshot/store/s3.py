# SPDX-License-Identifier: Apache-2.0
"""A store in an S3 bucket, or in one that speaks S3. Needs boto3 (extra ``[s3]``); credentials are found as it does.

Exclusive create is ``PutObject`` with ``If-None-Match: *``. Large objects go up in parts, several at once, and appear
when the last is there. boto3 checks no ranged download, so every answer's length is compared here, and the bytes by
whoever asked for them.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import Any, Final

from vllm_delta_snapshot.errors import ObjectExists, ObjectNotFound, StoreUnavailable
from vllm_delta_snapshot.store.bucket import BucketStore, PastTheEnd
from vllm_delta_snapshot.store.config import StoreConfig
from vllm_delta_snapshot.store.keys import Prefix
from vllm_delta_snapshot.store.parts import parts_of
from vllm_delta_snapshot.store.probe import probe_exclusive_create
from vllm_delta_snapshot.store.s3_answers import NOT_S3
from vllm_delta_snapshot.store.s3_client import make_client, reported
from vllm_delta_snapshot.store.secrets import presentable
from vllm_delta_snapshot.util.ordered import ordered_map

__all__ = ["S3Store"]

_RANGE: Final = re.compile(r"bytes (\d+)-\d*/(\d+|\*)")


class S3Store(BucketStore):
    """See the module and `Store`.

    Args:
        bucket: its name.
        prefix: the run's folder in it.
        config: how it is reached.
        single_writer: create without a condition, where the store knows none: then two writers cannot be told apart.

    Raises:
        CompatibilityError: boto3 is not installed.
    """

    def __init__(self, bucket: str, prefix: str, config: StoreConfig, *, single_writer: bool = False) -> None:
        super().__init__(f"s3://{bucket}", prefix, config, single_writer=single_writer)
        self._bucket = bucket
        self._client = make_client(config)

    def create(self, key: str, data: bytes) -> None:
        """See `Store.create`."""
        name = self._prefix.of(key)
        if self._single_writer:
            self._refuse_taken(key)
        condition = {} if self._single_writer else {"IfNoneMatch": "*"}
        # A store that knows no newer checksum knows this one, and refuses a body that was cut off on its way.
        digest = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
        try:
            with self._reported(key):
                self._client.put_object(Bucket=self._bucket, Key=name, Body=data, ContentMD5=digest, **condition)
        except ObjectExists as error:
            # Of a try whose answer was lost, the next one finds what it made.
            if not _was_tried_again(error) or not self._is_own(key, data):
                raise

    def put(self, key: str, chunks: Iterable[memoryview]) -> int:
        """See `Store.put`. Memory: `part_bytes` times `concurrency`."""
        name = self._prefix.of(key)
        self._refuse_taken(key)
        parts = parts_of(chunks, self._config.part_bytes)
        first = next(parts)
        second = next(parts, None)
        if second is None:
            with self._reported(key):
                self._client.put_object(Bucket=self._bucket, Key=name, Body=first)
            num_bytes = len(first)
        else:
            num_bytes = self._put_parts(key, name, chain((first, second), parts))
        self._check_written(key, num_bytes)
        return num_bytes

    def read(self, key: str, *, max_bytes: int) -> bytes:
        """See `Store.read`."""
        name = self._prefix.of(key)

        def once() -> bytes:
            with self._asked(NOT_S3), self._reported(key):
                answer = self._client.get_object(Bucket=self._bucket, Key=name)
            with contextlib.closing(answer["Body"]) as body, self._answering(), self._reported(key):
                size = self._length_of(key, answer)
                self._check_limit(key, size, max_bytes)
                data = bytes(body.read())
                self._check_length(key, size, len(data))
                return data

        return self._patiently(once)

    def size(self, key: str) -> int:
        """See `Store.size`."""
        with self._reported(key):
            answer = self._client.head_object(Bucket=self._bucket, Key=self._prefix.of(key))
            return self._length_of(key, answer)

    def read_range(self, key: str, offset: int, into: memoryview) -> int:
        """See `Store.read_range`."""
        name = self._prefix.of(key)
        if not len(into):
            return 0
        wanted = f"bytes={offset}-{offset + len(into) - 1}"

        def once() -> int:
            with self._asked(NOT_S3), self._reported(key):
                answer = self._client.get_object(Bucket=self._bucket, Key=name, Range=wanted)
            with contextlib.closing(answer["Body"]) as body, self._answering(), self._reported(key):
                return self._read_into(key, answer, body, offset, into)

        try:
            return self._patiently(once)
        except PastTheEnd:
            return 0

    def list(self, folder: str) -> list[str]:
        """See `Store.list`."""
        inside = self._prefix.of_folder(folder)
        objects: list[str] = []
        folders: list[str] = []
        is_more = False
        with self._reported(folder or "."):
            pages = self._client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self._bucket, Prefix=inside, Delimiter="/"):
                is_more = bool(page.get("IsTruncated"))
                objects += [entry["Key"] for entry in page.get("Contents", ())]
                folders += [entry["Prefix"] for entry in page.get("CommonPrefixes", ())]
            if is_more:  # the newest versions come last
                raise StoreUnavailable("a listing ends before its end", file=self._where(folder))
            return Prefix.names(inside, objects, folders)

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        with contextlib.suppress(ObjectNotFound), self._reported(key):
            self._client.delete_object(Bucket=self._bucket, Key=self._prefix.of(key))

    def now(self) -> float:
        """See `TellsTime.now`."""
        with self._reported("."):
            answer = self._client.list_objects_v2(Bucket=self._bucket, Prefix=self._prefix.of_folder(""), MaxKeys=1)
        return self._time_of(answer["ResponseMetadata"]["HTTPHeaders"].get("date"))

    def set_up(self) -> str:
        """See `HasSetUp.set_up`."""
        found = self._client.meta.config
        retries = found.retries or {}
        tries = f"{retries.get('mode', 'legacy')} with {retries.get('total_max_attempts', 5)} tries"
        style = (found.s3 or {}).get("addressing_style", "auto")
        return (
            f"endpoint {presentable(str(self._client.meta.endpoint_url))}, region {self._client.meta.region_name}, "
            f"addressing {style}, retries {tries}, checksums {found.request_checksum_calculation}"
        )

    def check_exclusive_create(self) -> None:
        """See `Store.check_exclusive_create`."""
        if not self._single_writer:
            probe_exclusive_create(self)

    def sweep(self, *, older_than_s: float) -> int:
        """Abort uploads under this prefix that were begun long ago and never ended: they cost and are never seen.

        Returns:
            How many there were.

        Raises:
            StoreError, StoreUnavailable: they cannot be listed or aborted.
        """
        until = datetime.now(UTC) - timedelta(seconds=older_than_s)
        swept = 0
        with self._reported("."):
            pages = self._client.get_paginator("list_multipart_uploads")
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix.of_folder("")):
                for upload in page.get("Uploads", ()):
                    if upload["Initiated"] <= until:
                        self._abort(upload["Key"], upload["UploadId"])
                        swept += 1
        return swept

    def _put_parts(self, key: str, name: str, parts: Iterator[bytes]) -> int:
        with self._reported(key):
            upload = self._client.create_multipart_upload(Bucket=self._bucket, Key=name)["UploadId"]
        try:
            with ThreadPoolExecutor(self._config.concurrency) as pool, self._reported(key):
                sent = list(
                    ordered_map(
                        lambda item: self._put_part(name, upload, *item),
                        enumerate(parts, start=1),
                        pool,
                        ahead=self._config.concurrency,
                    )
                )
            self._complete(key, name, upload, sent)
        except BaseException:
            with contextlib.suppress(Exception):  # `sweep` does it another time
                self._abort(name, upload)
            raise
        return sum(size for _, size in sent)

    def _complete(self, key: str, name: str, upload: str, sent: Sequence[tuple[dict[str, Any], int]]) -> None:
        parts = [part for part, _ in sent]
        try:
            with self._reported(key):
                self._client.complete_multipart_upload(
                    Bucket=self._bucket, Key=name, UploadId=upload, MultipartUpload={"Parts": parts}
                )
        except StoreUnavailable as error:
            # Where the answer was lost, the second try finds no such upload: it is an object by now.
            self._confirm_lost(key, sum(size for _, size in sent), error)

    def _put_part(self, name: str, upload: str, number: int, data: bytes) -> tuple[dict[str, Any], int]:
        answer = self._client.upload_part(Bucket=self._bucket, Key=name, UploadId=upload, PartNumber=number, Body=data)
        checksums = {field: value for field, value in answer.items() if field.startswith("Checksum") and value}
        checksums.pop("ChecksumType", None)
        return {"PartNumber": number, "ETag": answer["ETag"], **checksums}, len(data)

    def _abort(self, name: str, upload: str) -> None:
        self._client.abort_multipart_upload(Bucket=self._bucket, Key=name, UploadId=upload)

    def _read_into(self, key: str, answer: Mapping[str, Any], body: Any, offset: int, into: memoryview) -> int:
        """Fill `into` with what the store says that it sends, and see that it did."""
        expected = self._length_of(key, answer)
        first, total = _extent_of(answer, expected)
        if first != offset:
            raise StoreUnavailable(
                "a store that sends another range than was asked for",
                file=self._where(key),
                expected=offset,
                found=first,
            )
        self._check_length(key, min(len(into), total - offset), expected)
        target = into.cast("B")
        done = 0
        while data := body.read(min(1 << 20, expected - done)):
            target[done : done + len(data)] = data
            done += len(data)
        self._check_length(key, expected, done)
        return done

    def _length_of(self, key: str, answer: Mapping[str, Any]) -> int:
        if (length := answer.get("ContentLength")) is None:
            raise StoreUnavailable("an answer does not say how long it is", file=self._where(key))
        return int(length)

    @contextlib.contextmanager
    def _reported(self, key: str) -> Iterator[None]:
        with reported(self._where(key), self._bucket):
            yield


def _extent_of(answer: Mapping[str, Any], length: int) -> tuple[int, int]:
    """Return where the bytes begin that answer a ranged request, and the size of the whole object.

    Some stores send all for all, and say no range; others know no ranges.
    """
    match = _RANGE.match(str(answer.get("ContentRange", "")))
    if match is None:
        return 0, length
    first = int(match[1])
    return first, int(match[2]) if match[2].isdigit() else first + length


def _was_tried_again(error: ObjectExists) -> bool:
    """Say whether boto3 made the request that got this answer more than once."""
    answer = getattr(error.__cause__, "response", {})
    return int(answer.get("ResponseMetadata", {}).get("RetryAttempts", 0)) > 0
