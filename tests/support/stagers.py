"""The stagers of a host: its one stage area, and the processes that run for it."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from tests.support.waiting import eventually
from vllm_delta_snapshot.host.area import StageArea


def area_in(root: Path) -> StageArea:
    """Return the one stage area in a folder for them."""
    (folder,) = (path for path in root.iterdir() if path.is_dir())
    return StageArea(folder)


def stagers(area: StageArea) -> set[int]:
    """Return the ids of the living stager processes of an area."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended
            argv = (process / "cmdline").read_bytes().split(b"\0")
            if b"vllm_delta_snapshot.host" in argv and str(area.path).encode() in argv:
                found.add(int(process.name))
    return found


def the_stager(area: StageArea) -> int:
    """Return the one stager of an area, once those that workers started beside it have seen it and gone."""
    eventually(lambda: len(stagers(area)) == 1)
    (pid,) = stagers(area)
    return pid


def downloads(area: StageArea) -> list[int]:
    """Return the versions that stagers of an area have fetched, in order, each as often as it was."""
    return [int(version) for version in re.findall(r"fetched version=(\d+) ", area.log.read_text())]
