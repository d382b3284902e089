# SPDX-License-Identifier: Apache-2.0
"""On which file system a folder lies, and with which options it is mounted. Linux; elsewhere nothing is known."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["MOUNTINFO", "Mount", "mount_of"]

MOUNTINFO: Final = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system.

    Attributes:
        point: where.
        kind: its type, such as ``nfs4``, ``ext4`` or ``fuse.s3fs``.
        source: what is mounted, such as ``server:/export``.
        options: of the mount and of the file system, by name; ``""`` for those without a value.
    """

    point: str
    kind: str
    source: str
    options: Mapping[str, str]

    @property
    def is_nfs(self) -> bool:
        """Whether it is NFS."""
        return self.kind in ("nfs", "nfs4")


def mount_of(folder: Path, mountinfo: Path = MOUNTINFO) -> Mount | None:
    """Return the mount that a folder lies on, which need not exist yet; ``None`` if that cannot be found out.

    Args:
        folder: the folder.
        mountinfo: a file in the form of ``/proc/self/mountinfo``.
    """
    target = folder.resolve()
    try:
        lines = mountinfo.read_text(errors="replace").splitlines()
    except OSError:
        return None
    best = None
    for line in lines:
        mount = _parsed(line)
        # Of two on one point the later one lies on top.
        if mount and target.is_relative_to(mount.point) and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def _parsed(line: str) -> Mount | None:
    before, separator, after = line.partition(" - ")
    first, last = before.split(" "), after.split(" ")
    if not separator or len(first) < 6 or len(last) < 3:
        return None
    pairs = (option.partition("=") for option in (*first[5].split(","), *last[2].split(",")))
    options = {name: value for name, _, value in pairs}
    return Mount(_plain(first[4]), last[0], _plain(last[1]), options)


def _plain(text: str) -> str:
    """Undo the escapes of spaces and the like."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
