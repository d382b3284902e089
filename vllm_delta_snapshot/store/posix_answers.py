# SPDX-License-Identifier: Apache-2.0
"""What a file system says went wrong, in our words: by what was asked of it and what its user has to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final, Literal

from vllm_delta_snapshot.errors import ObjectExists, ObjectNotFound, StoreError, StoreUnavailable

__all__ = ["ABSENT", "Operation", "error_of"]

Operation = Literal["read", "list", "write", "delete"]

ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR})
_GONE: Final = frozenset({errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH})
_DENIED: Final = frozenset({errno.EACCES, errno.EPERM})
# What an NFS client says while a file is replaced or a server restarts; what passes when other processes end.
_MAY_PASS: Final = {
    *(errno.ESTALE, errno.EBADF, errno.EIO, errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR, errno.EBUSY, errno.EREMOTEIO),
    *(errno.ENFILE, errno.ENOMEM, errno.ENOLCK, errno.ECONNRESET, errno.ECONNREFUSED, errno.ETXTBSY),
}
_HINTS: Final = {
    errno.ENOSPC: "Free space there (df -h; df -i for inodes), or prune old versions; nothing of this version was "
    "published.",
    errno.EDQUOT: "Raise the quota, or prune old versions; nothing of this version was published.",
    errno.EROFS: "Mount it writable.",
    errno.EFBIG: "Raise the limit of file sizes (ulimit -f), or lower max_file_bytes.",
    errno.ENAMETOOLONG: "Give a shorter sync_dir: names below it take up to 90 bytes.",
    errno.ELOOP: "A link there leads in circles: give the folder itself.",
    errno.EMFILE: "Raise the limit of open files (ulimit -n).",
}
_RIGHTS: Final[dict[Operation, str]] = {
    "read": "read the file, and enter the folders above it",
    "list": "list that folder (r and x), and enter those above it",
    "write": "write into that folder, and enter those above it",
    "delete": "write into that folder, which deleting needs",
}


def error_of(error: OSError, path: Path, operation: Operation) -> StoreError:
    """Return what an error of the file system means.

    Args:
        error: the system's.
        path: of what.
        operation: what was asked.
    """
    number, file = error.errno or 0, str(path)
    found = os.strerror(number) if number else str(error)
    if number in ABSENT:
        if operation == "write":  # its folder was just made: somebody deletes it, or an NFS client is behind
            return StoreUnavailable("a folder went away while it was written into", file=file, found=found)
        return ObjectNotFound("no such object", file=file)
    if number == errno.EEXIST:
        return ObjectExists("object exists", file=file)
    if number in _GONE:
        hint = "Mount it again (mount, or systemctl restart of what mounts it)."
        return StoreUnavailable("the file system is gone", file=file, found=found, hint=hint)
    if number in _MAY_PASS:
        return StoreUnavailable("the file system failed", file=file, found=found)
    if number in _DENIED:
        hint = (
            f"Give this user (uid {os.geteuid()}) the right to {_RIGHTS[operation]}. For root on NFS: the export "
            "squashes root, so give it to the user that root becomes."
            if os.geteuid() == 0
            else f"Give this user (uid {os.geteuid()}) the right to {_RIGHTS[operation]}."
        )
        return StoreError("the file system refused", file=file, found=found, hint=hint)
    return StoreError("the file system refused", file=file, found=found, hint=_HINTS.get(number))
