# SPDX-License-Identifier: Apache-2.0
"""One large object from parts that go up at once: GCS composes them on its side, and the parts are deleted.

A part is an object of its own in a folder that only this upload knows, under `FOLDER`. The object appears when it is
composed, exclusively by that request's condition; its checksum is GCS's own over all bytes, and the caller compares it.
What a killed writer leaves lies under `FOLDER`, is never listed, and can be swept from there.

Why not the multipart uploads of the XML interface: they take no conditions, and google-cloud-storage offers them for
local files only.
"""

from __future__ import annotations

import io
import logging
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from vllm_delta_snapshot.util.ordered import ordered_map

__all__ = ["FOLDER", "Composer"]

logger = logging.getLogger(__name__)

FOLDER: Final = ".tmp-parts"
_CONTENT_TYPE: Final = "application/octet-stream"
_MOST_SOURCES: Final = 32
"""How many objects GCS composes in one request."""


class Composer:
    """Uploads objects in parts. Safe to use from several threads.

    Args:
        bucket: of google-cloud-storage.
        folder: the name of `FOLDER` in the bucket, with "/" at its end.
        concurrency: how many parts are on their way at once; memory is as many parts.
        options: for every request: time-outs and retry.
    """

    def __init__(self, bucket: Any, folder: str, concurrency: int, options: dict[str, Any]) -> None:
        self._bucket = bucket
        self._folder = folder
        self._concurrency = concurrency
        self._options = options
        self._can_delete = True

    @property
    def is_good_here(self) -> bool:
        """Whether parts can be deleted as far as is known: a bucket with a retention policy would keep them."""
        return self._concurrency > 1 and self._can_delete

    def put(self, name: str, parts: Iterable[bytes]) -> int:
        """Upload an object that must not exist; return its size. Blocks.

        Args:
            name: in the bucket.
            parts: two or more; the next is taken when one of those on their way has arrived.

        Raises:
            Exception: what the library or `parts` raises; then no object appears, and no part stays that can be
                deleted. After a lost reply the object may be there all the same.
        """
        folder = f"{self._folder}{uuid.uuid4().hex}/"
        made: list[str] = []

        def send(item: tuple[int, bytes]) -> tuple[Any, int]:
            number, data = item
            part = self._bucket.blob(f"{folder}{number:06d}")
            made.append(part.name)
            # Without a condition: the name is this upload's, and a try whose reply was lost may be made again.
            part.upload_from_file(
                io.BytesIO(data), size=len(data), content_type=_CONTENT_TYPE, checksum="crc32c", **self._options
            )
            return part, len(data)

        with ThreadPoolExecutor(self._concurrency) as pool:
            try:
                sent = list(ordered_map(send, enumerate(parts), pool, ahead=self._concurrency))
                sources = [part for part, _ in sent]
                while len(sources) > _MOST_SOURCES:
                    groups = list(_groups(sources))
                    targets = [self._bucket.blob(f"{folder}{len(made) + at:06d}") for at in range(len(groups))]
                    made += [target.name for target in targets]
                    list(pool.map(self._compose, targets, groups))
                    sources = targets
                self._compose(self._bucket.blob(name), sources, if_generation_match=0)
            except BaseException:
                self._delete(made, pool, retry=None)  # who waits for an error waits for no back-off
                raise
            self._delete(made, pool)
        return sum(size for _, size in sent)

    def _compose(self, target: Any, sources: Sequence[Any], **condition: Any) -> None:
        target.content_type = _CONTENT_TYPE
        target.compose(sources, **condition, **self._options)

    def _delete(self, names: Sequence[str], pool: ThreadPoolExecutor, **options: Any) -> None:
        """Delete parts until GCS refuses one; what stays is swept another time."""
        import google.api_core.exceptions as api

        errors: list[Exception] = []

        def delete(name: str) -> None:
            if errors:
                return
            try:
                self._bucket.blob(name).delete(**self._options | options)
            except api.NotFound:
                pass
            except Exception as error:  # noqa: BLE001 - the upload's own outcome counts
                errors.append(error)

        list(pool.map(delete, names))
        if errors:
            self._can_delete &= not isinstance(errors[0], (api.Forbidden, api.Unauthorized))
            where = f"gs://{self._bucket.name}/{self._folder}"
            logger.warning("parts of an upload stay in %s until they are swept: %s", where, errors[0])


def _groups(sources: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for first in range(0, len(sources), _MOST_SOURCES):
        yield sources[first : first + _MOST_SOURCES]
