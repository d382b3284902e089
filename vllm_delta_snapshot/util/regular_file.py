# SPDX-License-Identifier: Apache-2.0
"""Open files that others may have put there: regular ones and nothing else, and no more of them than is wanted.

A pipe under a file's name would block its reader for ever, and a device would never end.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from vllm_delta_snapshot.errors import CorruptFile, LimitExceeded

__all__ = ["opened", "read_bounded"]


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Give the descriptor of a file, open for reading. Never blocks.

    Raises:
        CorruptFile: it is a folder, a pipe, a device or a socket.
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CorruptFile("not a regular file", file=str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file.

    Raises:
        LimitExceeded: it is larger.
        CorruptFile, OSError: see `opened`.
    """
    pieces: list[bytes] = []
    left = max_bytes + 1
    with opened(path) as descriptor:
        step = max(1 << 12, min(1 << 24, os.fstat(descriptor).st_size))  # `os.read` allocates all that it is asked for
        while left and (piece := os.read(descriptor, min(left, step))):
            pieces.append(piece)
            left -= len(piece)
    if not left:
        raise LimitExceeded("file too large", file=str(path), expected=f"at most {max_bytes} bytes")
    return b"".join(pieces)
