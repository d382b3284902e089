# SPDX-License-Identifier: Apache-2.0
"""From what people call a checkpoint to the folder that it lies in.

A path is made absolute here, once, so that it means the same in run.json, in other processes and after a change of
folder; links stay, since the files of a Hub snapshot are links. A Hub id is looked up in the local cache and nowhere
else: this never downloads. No file of the folder is read.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from vllm_delta_snapshot.checkpoint.hub_cache import HubId, cached_snapshot
from vllm_delta_snapshot.errors import ObjectNotFound, StoreError

__all__ = ["find_base", "is_folder", "reading"]

_ABSENT: Final = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}
_WHAT_TO_GIVE: Final = 'Give a local folder with safetensors files, or a Hub id ("org/model") that was downloaded.'


def find_base(base: str | Path, *, revision: str | None = None, cache_dir: str | None = None) -> Path:
    """Return the absolute path of a checkpoint's folder.

    Args:
        base: a local folder, relative or with ``~`` too; or, as text, a Hub id that the local cache has:
            ``"org/model"`` or ``"org/model@revision"``. A folder of that name goes first. A `Path` is never a Hub id.
        revision: of a Hub id without one; by default what ``main`` was when it was downloaded.
        cache_dir: where the Hub's cache is; by default where huggingface_hub has it.

    Raises:
        ObjectNotFound: there is no such folder, and no such snapshot in the cache; or it is a file.
        StoreError: it may not be read.
    """
    name = str(base)
    if not name:
        raise ObjectNotFound("no checkpoint was named", found="empty text", hint=_WHAT_TO_GIVE)
    if "://" in name:
        raise ObjectNotFound(
            "a base checkpoint is a local folder", file=name, hint="Copy it to one, and give its path."
        )
    with reading(name):
        folder = _absolute(name)
        if is_folder(folder):
            return folder
        if folder.exists():
            raise ObjectNotFound(
                "the checkpoint is a file, not a folder",
                file=str(folder),
                hint=f"Give the folder that it lies in: {folder.parent}",
            )
        hub_id = HubId.of(name, revision, cache_dir) if isinstance(base, str) else None
        if hub_id is None or folder.is_symlink():
            raise ObjectNotFound(
                "no such checkpoint folder",
                file=str(folder),
                found=f"a link to {folder.readlink()}, which is not there" if folder.is_symlink() else None,
                hint=_WHAT_TO_GIVE,
            )
        return cached_snapshot(hub_id, folder)


def is_folder(path: Path) -> bool:
    """Say whether there is a folder.

    Raises:
        StoreError: that may not be known.
    """
    with reading(path):
        try:
            return stat.S_ISDIR(os.stat(path).st_mode)
        except OSError as error:
            if error.errno in _ABSENT:
                return False
            raise


@contextmanager
def reading(place: str | Path) -> Iterator[None]:
    """Turn what the system says of a checkpoint's files into an error of ours.

    Args:
        place: what is read, where the system does not say it.

    Raises:
        ObjectNotFound: it is gone.
        StoreError: it may not be read, or cannot.
    """
    try:
        yield
    except StoreError:  # some are an OSError too
        raise
    except OSError as error:
        file, found = str(error.filename or place), error.strerror or str(error)
        if isinstance(error, PermissionError):
            hint = f"Give uid {os.geteuid()} the right to read it, and to search the folders above it."
            raise StoreError("the checkpoint may not be read", file=file, found=found, hint=hint) from error
        if error.errno in _ABSENT:
            raise ObjectNotFound("the checkpoint is not there", file=file, found=found, hint=_WHAT_TO_GIVE) from error
        hint = "Look at the disk or the mount that it lies on."
        raise StoreError("the checkpoint cannot be read", file=file, found=found, hint=hint) from error


def _absolute(name: str) -> Path:
    try:
        if "\0" in name:
            raise ValueError("a null character in the name")
        return Path(name).expanduser().absolute()
    except (RuntimeError, ValueError) as error:  # such as: no such home
        raise ObjectNotFound("no checkpoint can lie there", file=repr(name), found=error, hint=_WHAT_TO_GIVE) from error
