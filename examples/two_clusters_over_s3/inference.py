# SPDX-License-Identifier: Apache-2.0
"""The inference cluster: a vLLM server, and `delta-snapshot follow` beside it. Knows nothing of the trainer."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from examples.grpo.server import VllmServer
from vllm_delta_snapshot.drive import ServerClient

SAMPLER = "far-0"
STOP_TIMEOUT_S = 20.0


@contextlib.contextmanager
def inference(base: Path, sync_dir: str, out: Path) -> Iterator[ServerClient]:
    """Start both, and stop them afterwards. Blocks until the server answers.

    Args:
        base: the checkpoint that the server loads.
        sync_dir: the run's folder, as seen from here.
        out: for logs and staged updates.

    Raises:
        ExampleError: the server did not start.
    """
    with VllmServer(base, out / "vllm.log", DELTA_SNAPSHOT_STAGE_DIR=str(out / "stage")) as server:
        command = ["follow", "--sync-dir", sync_dir, "--server", server.url, "--sampler", SAMPLER]
        with _delta_snapshot(command, out / "follow.log"):
            yield server.client


@contextlib.contextmanager
def _delta_snapshot(arguments: list[str], log: Path) -> Iterator[None]:
    command = [sys.executable, "-c", "from vllm_delta_snapshot.cli import main; main()", *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            yield
        finally:
            process.terminate()  # it ends an update that is under way, never in the middle of one
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
