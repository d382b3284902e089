"""Stagers killed while they bring a mirror along a run: ``python -m tests.support.keeper_crash RUN BASE AREA``.

Forks one process for every seventh moment of death. AREA is a stage area whose mirror is at version 1; its copies are
brought to version 3. Prints the areas that the dead left as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.support import mirror_crash
from tests.support.mirror_crash import copier, killed_at_lines
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.host import mirror_keeper, update_folders
from vllm_delta_snapshot.host.area import StageArea
from vllm_delta_snapshot.host.fetched import FetchedVersions
from vllm_delta_snapshot.host.mirror_keeper import MirrorKeeper
from vllm_delta_snapshot.host.update_folders import UpdateFolders
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store.posix import PosixStore

mirror_crash.TRACED |= {mirror_keeper.__file__, update_folders.__file__}


def keep(sync_dir: Path, base: Path, area: StageArea, version: int) -> None:
    """Bring an area's mirror to a version, as a stager that just started."""
    folder, checkpoint = RunFolder(PosixStore(sync_dir)), Checkpoint(base)
    run = folder.read_run()
    fetched = FetchedVersions(folder, area, checkpoint, 0)
    keeper = MirrorKeeper(area, checkpoint, run.run_id, 0)
    keeper.keep(version, UpdateFolders(area, run.run_id, fetched, checkpoint, 0, keeper).absolute)


def main(sync_dir: Path, base: Path, area: Path) -> list[str]:
    """Kill what brings copies of the mirror to version 3, once before every seventh line."""

    def forward(folder: Path) -> None:
        keep(sync_dir, base, StageArea(folder), 3)

    return killed_at_lines(forward, copier(area), area.parent / "dead", every=7)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*map(Path, sys.argv[1:]))))
