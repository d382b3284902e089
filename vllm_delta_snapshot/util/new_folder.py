# SPDX-License-Identifier: Apache-2.0
"""An output folder that appears under its name when it is complete, or not at all."""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from vllm_delta_snapshot.errors import DeltaSnapshotError, StageError

__all__ = ["appearing", "new_folder"]


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Give a hidden folder beside `out` to fill, which then appears as `out`; if filling fails, nothing is left.

    Args:
        out: must not exist, or be empty.

    Raises:
        StageError: `out` is in use or cannot be written.
    """
    out = out.resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StageError("the output is not an empty folder", file=str(out), hint="Give a new folder.")
    work = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}")
    try:
        work.mkdir(parents=True)
        yield work
        if out.exists():
            out.rmdir()
        work.rename(out)
    except DeltaSnapshotError:
        raise
    except OSError as error:
        raise StageError("cannot write the output", file=str(out), found=error) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def appearing(final: Path) -> Iterator[Path]:
    """Give a hidden folder to fill, which then appears as `final`; if filling fails, nothing does."""
    work = final.with_name(f".{final.name}.{uuid.uuid4().hex}")
    try:
        work.mkdir()
        yield work
        work.rename(final)
    finally:
        shutil.rmtree(work, ignore_errors=True)
