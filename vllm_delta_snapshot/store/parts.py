# SPDX-License-Identifier: Apache-2.0
"""Chunks of any size -> parts of one size: what uploads are made of. Memory: one part, and what the caller keeps.

Every byte is copied once, into the part: clients of object stores take `bytes` and nothing that is merely like them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

__all__ = ["parts_of"]


def parts_of(chunks: Iterable[memoryview], part_bytes: int) -> Iterator[bytes]:
    """Yield the bytes of all chunks in parts; all but the last of `part_bytes`. One empty part if there are none.

    Args:
        chunks: of any size and type of element, contiguous; each stays as it is until the part with its end is yielded.
        part_bytes: the size of a part.
    """
    pieces: list[memoryview] = []
    missing = part_bytes
    is_any = False
    for chunk in chunks:
        rest = memoryview(chunk).cast("B")
        while len(rest):
            pieces.append(rest[:missing])
            missing -= len(pieces[-1])
            rest = rest[len(pieces[-1]) :]
            if not missing:
                yield b"".join(pieces)
                is_any = True
                pieces, missing = [], part_bytes
    if pieces or not is_any:
        yield b"".join(pieces)
