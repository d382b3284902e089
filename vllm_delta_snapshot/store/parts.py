# SPDX-License-Identifier: Apache-2.0
"""Chunks of any size -> parts of one size: what uploads are made of. Memory: one part, and what the caller keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

__all__ = ["parts_of"]


def parts_of(chunks: Iterable[memoryview], part_bytes: int) -> Iterator[bytes]:
    """Yield the bytes of all chunks in parts; all but the last of `part_bytes`. One empty part if there are none.

    Args:
        chunks: of any size and type of element, contiguous.
        part_bytes: the size of a part.
    """
    buffer = bytearray()
    is_any = False
    for chunk in chunks:
        rest = memoryview(chunk).cast("B")
        while len(rest):
            taken = rest[: part_bytes - len(buffer)]
            buffer += taken
            rest = rest[len(taken) :]
            if len(buffer) == part_bytes:
                yield bytes(buffer)
                is_any = True
                buffer.clear()
    if buffer or not is_any:
        yield bytes(buffer)
