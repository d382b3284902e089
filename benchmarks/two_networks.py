# SPDX-License-Identifier: Apache-2.0
"""The same way over a real link: trainer and S3 server in one network namespace, vLLM and its follower in another.

Part of ``python -m benchmarks.link``. The link is a veth pair shaped to 100 Mbit/s; the payload goes through it once, from
the store to the sampler's host. Seconds are from the step's end until the sampler's acknowledgement says that the
version is served; both clocks are this machine's.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import spread
from benchmarks.report import progress

MBIT = 100
REPETITIONS = 5


def measure(trainer: Any) -> dict[str, Any]:
    """Bring versions over; or say why there can be no two networks here.

    Args:
        trainer: weights that change at every ``step``, and the folder of their base checkpoint.
    """
    from tools.two_sides import why_not

    reason = why_not()
    if reason is not None:
        progress(f"two networks: skipped, {reason}")
        return {"skipped": reason}
    with tempfile.TemporaryDirectory() as folder, _ends(trainer, Path(folder)) as (sides, publisher):
        rows = []
        for number in range(REPETITIONS + 1):
            with sides.near():
                trainer.step()
                started = time.time()
                report = publisher.publish().wait()
                said = publisher.wait_applied(["far"], timeout_s=300)["far"]
            applied_s = said.applied_at - started
            payload_s = report.payload_bytes / (MBIT * 1e6 / 8)
            progress(f"two networks: {applied_s:.2f} s, {applied_s / payload_s:.2f} x the payload's own time")
            if number:  # the first is a rehearsal
                rows.append((applied_s, payload_s, report.total_s, said.pause_s))
    seconds, payload, publish, pause = zip(*rows, strict=True)
    return {
        "seconds": spread(list(seconds)),
        "payload_s": round(statistics.median(payload), 3),
        "publish_s": round(statistics.median(publish), 3),
        "pause_s": round(statistics.median(pause), 3),
        "overhead": round(statistics.median(seconds) / statistics.median(payload), 2),
    }


@contextlib.contextmanager
def _ends(trainer: Any, folder: Path) -> Iterator[tuple[Any, Any]]:
    from tests.support.follower import follower
    from tests.support.object_stores import ministack
    from tests.support.server import ServerProcess, servers
    from tools.two_sides import two_sides
    from trainer_hooks import DeltaPublisher

    with contextlib.ExitStack() as ends:
        sides = ends.enter_context(two_sides(mbit=MBIT))
        with sides.near():
            store = ends.enter_context(ministack(folder / "s3.log", sides.near_address))
            os.environ.update(store.environment)
            sync_dir = f"s3://{store.make_bucket()}/run"
            publisher = ends.enter_context(DeltaPublisher(trainer.weights, sync_dir=sync_dir, base=trainer.base))
        with sides.far():
            progress("two networks: starting a server")
            engine = ServerProcess(trainer.base, folder / "vllm.log", DELTA_SNAPSHOT_STAGE_DIR=str(folder / "stage"))
            ends.enter_context(servers(engine))
            options = ("--sampler", "far", "--max-lag", "0")
            ends.enter_context(follower(sync_dir, engine.client.url, folder / "follow.log", *options))
        yield sides, publisher
