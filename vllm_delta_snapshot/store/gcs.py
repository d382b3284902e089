# SPDX-License-Identifier: Apache-2.0
"""A store in a Google Cloud Storage bucket. Needs google-cloud-storage (extra ``[gcs]``); credentials as it finds them.

Exclusive create is a single-shot upload with ``ifGenerationMatch=0``. Large objects go up as one resumable upload and
appear when it ends. The library checks no ranged download, so every answer's length is compared here, and the bytes by
whoever asked for them.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterable, Iterator
from typing import Any, Final

from vllm_delta_snapshot.errors import (
    CompatibilityError,
    ObjectExists,
    ObjectNotFound,
    StoreError,
    StoreUnavailable,
)
from vllm_delta_snapshot.store.bucket import BucketStore, PastTheEnd
from vllm_delta_snapshot.store.config import StoreConfig
from vllm_delta_snapshot.store.keys import Prefix
from vllm_delta_snapshot.store.parts import parts_of
from vllm_delta_snapshot.store.probe import probe_exclusive_create

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
        self._client = _make_client(config, self.uri)
        self._bucket = self._client.bucket(bucket)
        self._timeouts = (config.connect_timeout_s, config.read_timeout_s)
        self._retry = _make_retry(config)

    def create(self, key: str, data: bytes) -> None:
        """See `Store.create`."""
        blob = self._bucket.blob(self._prefix.of(key))
        if self._single_writer:
            self._refuse_taken(key)
        with self._reported(key):
            blob.upload_from_string(
                data,
                content_type="application/json",
                if_generation_match=None if self._single_writer else 0,
                checksum="crc32c",
                timeout=self._timeouts,
                retry=self._retry,
            )

    def put(self, key: str, chunks: Iterable[memoryview]) -> int:
        """See `Store.put`. Memory: one part, twice."""
        name = self._prefix.of(key)
        self._refuse_taken(key)
        part_bytes = self._config.part_bytes // _CHUNK_UNIT * _CHUNK_UNIT
        source = _Stream(parts_of(chunks, part_bytes))
        blob = self._bucket.blob(name, chunk_size=part_bytes)
        with self._reported(key):
            blob.upload_from_file(
                source,
                content_type="application/octet-stream",
                if_generation_match=0,
                checksum="crc32c",
                timeout=self._timeouts,
                retry=self._retry,
            )
        self._check_written(key, source.num_bytes)
        return source.num_bytes

    def read(self, key: str, *, max_bytes: int) -> bytes:
        """See `Store.read`."""
        size = self.size(key)
        self._check_limit(key, size, max_bytes)
        with self._reported(key):
            blob = self._bucket.blob(self._prefix.of(key))
            data = bytes(blob.download_as_bytes(raw_download=True, timeout=self._timeouts, retry=self._retry))
        self._check_length(key, size, len(data))
        return data

    def size(self, key: str) -> int:
        """See `Store.size`."""
        blob = self._bucket.blob(self._prefix.of(key))
        with self._reported(key):
            blob.reload(timeout=self._timeouts, retry=self._retry)
        return int(blob.size)

    def read_range(self, key: str, offset: int, into: memoryview) -> int:
        """See `Store.read_range`."""
        blob = self._bucket.blob(self._prefix.of(key))
        if not len(into):
            return 0
        try:
            with self._reported(key):
                data = blob.download_as_bytes(
                    start=offset,
                    end=offset + len(into) - 1,
                    raw_download=True,
                    checksum=None,
                    timeout=self._timeouts,
                    retry=self._retry,
                )
        except PastTheEnd:
            return 0
        if len(data) < len(into):
            self._check_length(key, min(len(into), max(0, self.size(key) - offset)), len(data))
        into.cast("B")[: len(data)] = data[: len(into)]
        return min(len(data), len(into))

    def list(self, folder: str) -> list[str]:
        """See `Store.list`."""
        inside = self._prefix.of_folder(folder)
        with self._reported(folder or "."):
            found = self._client.list_blobs(
                self._bucket, prefix=inside, delimiter="/", timeout=self._timeouts, retry=self._retry
            )
            objects = [blob.name for blob in found]
            return Prefix.names(inside, objects, found.prefixes)

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        blob = self._bucket.blob(self._prefix.of(key))
        with contextlib.suppress(ObjectNotFound), self._reported(key):
            blob.delete(timeout=self._timeouts, retry=self._retry)

    def check_exclusive_create(self) -> None:
        """See `Store.check_exclusive_create`."""
        if not self._single_writer:
            probe_exclusive_create(self)

    @contextlib.contextmanager
    def _reported(self, key: str) -> Iterator[None]:
        """Turn the library's errors into ours."""
        import google.api_core.exceptions as api
        import google.auth.exceptions as auth
        import requests

        where = self._where(key)
        try:
            yield
        except api.PreconditionFailed as error:
            raise ObjectExists("object exists", file=where) from error
        except api.NotFound as error:
            if "bucket" in str(error).lower() and not self._bucket_exists():
                hint = "Make it, or correct sync_dir."
                raise StoreError("there is no such bucket", file=where, found=self._bucket.name, hint=hint) from error
            raise ObjectNotFound("no such object", file=where) from error
        except api.RequestRangeNotSatisfiable as error:
            raise PastTheEnd from error
        except (api.Unauthorized, api.Forbidden, auth.RefreshError, auth.DefaultCredentialsError) as error:
            hint = "Look at the credentials and the bucket's policy: see docs/stores.md."
            raise StoreError("GCS refuses", file=where, found=_brief(error), hint=hint) from error
        except (api.ServerError, api.TooManyRequests, api.RetryError, api.Conflict, auth.TransportError) as error:
            raise StoreUnavailable("GCS is busy", file=where, found=_brief(error)) from error
        except (requests.exceptions.RequestException, OSError) as error:
            if isinstance(error, StoreError):
                raise
            raise StoreUnavailable("GCS does not answer", file=where, found=_brief(error)) from error
        except api.GoogleAPICallError as error:
            raise StoreError("GCS refuses", file=where, found=_brief(error)) from error
        except Exception as error:
            if type(error).__module__.startswith(("google.resumable_media", "google.cloud.storage")):
                raise StoreUnavailable("an answer of GCS is wrong", file=where, found=_brief(error)) from error
            raise

    def _bucket_exists(self) -> bool:
        try:
            return bool(self._bucket.exists(timeout=self._timeouts, retry=self._retry))
        except Exception:  # noqa: BLE001 - who may not ask is told of the object
            return True


class _Stream(io.RawIOBase):
    """Parts as a file that is read once."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        super().__init__()
        self._parts = parts
        self._rest = memoryview(b"")
        self.num_bytes = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Return how much was read."""
        return self.num_bytes

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer as far as one part goes."""
        while not len(self._rest):
            part = next(self._parts, None)
            if part is None:
                return 0
            self._rest = memoryview(part)
            if not part:
                return 0
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        self.num_bytes += count
        return count

    def read(self, size: int = -1) -> bytes:
        """Read exactly `size` bytes, fewer only at the end: the library takes less for the end."""
        pieces: list[bytes] = []
        missing = size
        while size < 0 or missing > 0:
            piece = super().read(1 << 20 if size < 0 else missing)
            if not piece:
                break
            pieces.append(piece)
            missing -= len(piece)
        return b"".join(pieces)


def _make_client(config: StoreConfig, where: str) -> Any:
    try:
        import google.auth.exceptions
        from google.auth.credentials import AnonymousCredentials
        from google.cloud import storage
    except ImportError as error:
        raise CompatibilityError(
            "gs:// needs google-cloud-storage", found=error, hint="pip install 'vllm-delta-snapshot[gcs]'"
        ) from error
    # Else every client asks for the bucket's metadata behind our back, to label traces: a right that nobody needs here,
    # and a thread that goes on asking for two minutes where no answer comes.
    os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")
    options = {"api_endpoint": config.endpoint_url} if config.endpoint_url else None
    try:
        if config.anonymous:
            return storage.Client(project="none", credentials=AnonymousCredentials(), client_options=options)
        return storage.Client(client_options=options)
    except (google.auth.exceptions.GoogleAuthError, OSError, ValueError) as error:
        raise StoreError(
            "no credentials for GCS",
            file=where,
            found=_brief(error),
            hint="Set them up as for gcloud (gcloud auth application-default login), and try that.",
        ) from error


def _make_retry(config: StoreConfig) -> Any:
    from google.cloud.storage.retry import DEFAULT_RETRY

    return DEFAULT_RETRY.with_timeout(config.attempts * (config.connect_timeout_s + config.read_timeout_s) / 4)


def _brief(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:300]}..."
