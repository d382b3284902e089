# SPDX-License-Identifier: Apache-2.0
"""Folders for files that live as long as a block does.

`tempfile.TemporaryDirectory` also deletes its folder when the interpreter ends, and a process that was forked off
meanwhile ends too: it would take away what its parent works with. Here only the process that made a folder deletes it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["scratch_folder"]


@contextlib.contextmanager
def scratch_folder(prefix: str = "delta-snapshot-", parent: Path | None = None) -> Iterator[Path]:
    """Give a new folder, which is gone afterwards.

    Args:
        prefix: what its name begins with.
        parent: where; by default the temp folder.
    """
    process = os.getpid()
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        yield folder
    finally:
        if os.getpid() == process:
            shutil.rmtree(folder, ignore_errors=True)
