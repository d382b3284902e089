# SPDX-License-Identifier: Apache-2.0
"""An unmodified vLLM server as a child process: start it, know whether it lives, stop it for certain."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from examples.grpo import ExampleError
from vllm_delta_snapshot.drive import ServerClient, ServerError

MODEL_NAME = "policy"
READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0

ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # makes vLLM serve the weight update routes
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


class VllmServer:
    """A server on a free port of 127.0.0.1, as a context manager that waits until it is ready.

    Args:
        model: the checkpoint folder that it loads.
        log: where its output goes.
        options: further ones of vLLM's.
        environment: further variables.
    """

    def __init__(self, model: Path, log: Path, *options: str, **environment: str) -> None:
        self.log = log
        self._model = model
        self._options = options
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._port = _free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.client = ServerClient(self.url)
        self.ready_s = 0.0

    def __enter__(self) -> Self:
        started = time.monotonic()
        try:
            self._output = self.log.open("wb")
            # A session of its own: vLLM's own children can be stopped with it, whatever state they are in.
            self._process = subprocess.Popen(
                self._command(),
                env={**os.environ, **ENVIRONMENT, **self._environment},
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self.client.wait_ready(timeout_s=READY_TIMEOUT_S, is_alive=self.is_alive)
        except ServerError as error:
            words = self.last_words()
            self.stop()
            raise ExampleError(f"the vLLM server did not start: {error}\n{words}\nserver log: {self.log}") from error
        except BaseException:
            self.stop()
            raise
        self.ready_s = time.monotonic() - started
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        what = f"the vLLM server died: {error}\n{self.last_words()}" if not self.is_alive() else str(error)
        self.stop()
        if isinstance(error, ServerError):
            raise ExampleError(f"{what}\nserver log: {self.log}") from error

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """Stop the server and all its processes. Does nothing twice."""
        process, self._process = self._process, None
        if process is not None:
            _signal_group(process.pid, signal.SIGTERM)
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_TIMEOUT_S)
            finally:
                _signal_group(process.pid, signal.SIGKILL)
                process.wait()
        if self._output is not None:
            self._output.close()

    def last_words(self, lines: int = 15) -> str:
        """Return the end of the log."""
        text = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(f"  | {line}" for line in text[-lines:])

    def _command(self) -> list[str]:
        options = {
            "--model": str(self._model),
            "--served-model-name": MODEL_NAME,
            "--host": "127.0.0.1",
            "--port": str(self._port),
            "--dtype": "bfloat16",
            "--max-model-len": "512",
            "--max-num-seqs": "64",
            "--generation-config": "vllm",
            "--seed": "0",
            "--weight-transfer-config": '{"backend": "delta_snapshot"}',
        }
        # Eager, for a machine without a C++ compiler, and because two servers would compile longer than they serve.
        # Seeded requests crash vLLM 0.32's CPU backend when a prompt is prefilled in chunks, so none is.
        flags = ["--enforce-eager", "--no-enable-chunked-prefill"]
        arguments = [text for option in options.items() for text in option]
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags, *arguments, *self._options]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
