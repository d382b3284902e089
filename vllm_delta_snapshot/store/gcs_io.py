# SPDX-License-Identifier: Apache-2.0
"""Bytes on their way to and from GCS, as its library wants them: memory to fill, parts to read, their checksum."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["Crc32c", "Sink", "Stream"]


class Crc32c:
    """The size and the CRC32C of what passes by."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._value = 0

    def of(self, parts: Iterable[bytes]) -> Iterator[bytes]:
        """Pass parts on."""
        import google_crc32c

        for part in parts:
            self._value = google_crc32c.extend(self._value, part)
            self.num_bytes += len(part)
            yield part

    @property
    def text(self) -> str:
        """As GCS writes it."""
        return base64.b64encode(self._value.to_bytes(4, "big")).decode()

    def __str__(self) -> str:
        return f"{self.num_bytes} bytes with CRC32C {self.text}"


class Sink(io.RawIOBase):
    """Memory that takes what the library writes. More than there is room for is counted, and dropped."""

    def __init__(self, into: memoryview) -> None:
        super().__init__()
        self._into = into
        self.num_bytes = 0

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, data: Any) -> int:
        """Take a piece."""
        room = self._into[self.num_bytes : self.num_bytes + len(data)]
        room[:] = data[: len(room)]
        self.num_bytes += len(data)
        return len(data)


class Stream(io.RawIOBase):
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
