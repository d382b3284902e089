# SPDX-License-Identifier: Apache-2.0
"""``python -m vllm_delta_snapshot.host AREA``: the stager as a process. Started by the first worker, not by people."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path

from vllm_delta_snapshot.host.area import StageArea, try_lock
from vllm_delta_snapshot.host.stager import Stager


def main() -> int:
    """Run a stager for the area in argv, unless one is running."""
    area = StageArea(Path(sys.argv[1]))
    lock = try_lock(area.lock)
    if lock is None:
        return 0
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # A worker that vLLM pinned to its cores hands that down; this process must stay out of its way instead.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    with contextlib.suppress(OSError):
        os.nice(19)
    try:
        Stager(area).run()
    finally:
        area.state.unlink(missing_ok=True)
        os.close(lock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
