"""The processes of a soak that are killed and started again: a trainer, the host's stagers, whoever else.

A kill is SIGKILL to one process or to its whole session; nobody is warned.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

ANSWER_TIMEOUT_S = 300.0


class TrainerDied(Exception):
    """The trainer ended before it answered."""


class TrainerProcess:
    """One trainer, see `tests.soak.trainer`. It is started again when it is asked for something and is dead.

    Args:
        base: the checkpoint.
        sync_dir: its run.
        states: where it leaves what each version must be.
        log: what it says beside its answers.
    """

    def __init__(self, base: Path, sync_dir: Path, states: Path, log: Path) -> None:
        self.sync_dir, self.states = sync_dir, states
        self._base, self._log = base, log
        self._process: subprocess.Popen[str] | None = None
        self.run_id = ""
        self.version = 0
        self.starts = 0

    def ensure(self, seed: int) -> None:
        """Start it if it is dead, and wait until it has opened its run."""
        if self._process is not None and self._process.poll() is None:
            return
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.soak.trainer"),
                    *(str(self._base), str(self.sync_dir), str(self.states), str(seed)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self.starts += 1
        self._take(self._answer())

    def ask(self, count: int) -> None:
        """Have it make and publish steps. `answer` waits."""
        self._send({"do": "step", "count": count})

    def answer(self) -> dict[str, Any]:
        """Wait for its answer. Raises: TrainerDied."""
        answer = self._answer()
        self._take(answer)
        return answer

    def signal(self, number: int, *, is_all: bool = False) -> None:
        """Send it a signal, or its whole session. Nothing happens if it has ended."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if is_all else os.kill)(self._process.pid, number)

    def close(self) -> None:
        """Have it end well."""
        if self._process is not None and self._process.poll() is None:
            self._send({"do": "close"})
            try:
                self._process.wait(ANSWER_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.signal(signal.SIGKILL, is_all=True)
                raise

    def _send(self, command: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer that does not come says it
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        watchdog = threading.Timer(ANSWER_TIMEOUT_S, process.kill)
        watchdog.start()
        try:
            line = process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            process.wait()
            raise TrainerDied(f"exit status {process.returncode}; see {self._log}")
        return dict(json.loads(line))

    def _take(self, answer: dict[str, Any]) -> None:
        self.run_id, self.version = answer["run_id"], answer["version"]


def stager_pids(stage_root: Path) -> list[int]:
    """Return the stagers of this soak that are alive: those whose command names its stage folder."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                if b"vllm_delta_snapshot.host" in words and any(str(stage_root).encode() in word for word in words):
                    found.append(int(process.name))
    return found


def kill_stagers(stage_root: Path) -> int:
    """Kill them; return how many there were."""
    pids = stager_pids(stage_root)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(pids)
