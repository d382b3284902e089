"""A real vLLM server in a process of its own, on loopback."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.compilers import ALL_COMPILED
from tests.support.digests import merged
from vllm_delta_snapshot.drive import ServerClient

_ROOT = Path(__file__).parents[2]
_RANDOM = random.SystemRandom()
_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
}


class CheckedServer(ServerClient):
    """A server that is asked for the digests of all it holds, whichever vLLM it is."""

    def checksums(self) -> dict[str, str]:
        """Return digests of the live parameters and buffers of every worker."""
        return merged(self.request("POST", "/collective_rpc", {"method": "weight_digests"})["results"])

    def drift(self) -> None:
        """Have every weight changed behind everybody's back."""
        self.request("POST", "/collective_rpc", {"method": "drift"})


class ServerProcess:
    """A server with the plugin's backend, in a session of its own: started, killed and started again on the same port.

    Args:
        model: the checkpoint.
        log: where all its processes write; a restart goes on in it.
        options: further ones of vLLM's.
        is_compiled: whether it compiles the model, as vLLM does by default.
        environment: further variables.
    """

    def __init__(
        self, model: Path, log: Path, *options: str, is_compiled: bool = ALL_COMPILED, **environment: str
    ) -> None:
        port = _free_port()
        self.log = log
        self.client = CheckedServer(f"http://127.0.0.1:{port}")
        self._argv = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m", "--skip-tokenizer-init"),
            *("--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", "4"),
            *(() if is_compiled else ("--enforce-eager",)),
            *("--kv-cache-memory-bytes", str(64 << 20)),
            *("--weight-transfer-config", '{"backend": "delta_snapshot"}'),
            *("--worker-extension-cls", "tests.support.digests.DigestsOfWorker"),
            *options,
        ]
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **_ENVIRONMENT, **environment}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it. It answers later: see `wait_ready`."""
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._argv,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Wait until it answers."""
        process = self._process
        assert process is not None
        try:
            self.client.wait_ready(timeout_s=300, is_alive=lambda: process.poll() is None)
        except Exception as error:
            raise AssertionError(self.log.read_text(errors="replace")[-4000:]) from error

    def kill(self) -> None:
        """Kill all its processes at once, as the machine's end would."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """End it. Nothing happens if it has ended."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def updates(self) -> int:
        """Return how many updates have been written, by what its log says."""
        return self.log.read_text(errors="replace").count("applied version=")


@contextlib.contextmanager
def servers(*processes: ServerProcess) -> Iterator[None]:
    """Start servers side by side, wait until all answer, and stop them afterwards."""
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.wait_ready()
        yield
    finally:
        for process in processes:
            process.stop()


@contextlib.contextmanager
def server(
    model: Path, log: Path, *options: str, is_compiled: bool = ALL_COMPILED, **environment: str
) -> Iterator[CheckedServer]:
    """Start a server with the plugin's backend, wait until it answers, and stop it afterwards."""
    process = ServerProcess(model, log, *options, is_compiled=is_compiled, **environment)
    with servers(process):
        yield process.client


def greedy(client: ServerClient, prompt: list[int], count: int) -> list[int]:
    """Return greedy tokens for a prompt."""
    answer = client.request("POST", "/v1/completions", _body(prompt, count))
    return list(answer["choices"][0]["token_ids"])


def stream(client: ServerClient, prompt: list[int], count: int) -> Iterator[tuple[list[int], str | None]]:
    """Yield the tokens of each event and the finish reason, as they arrive."""
    parts = urllib.parse.urlsplit(client.url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=120)
    body = json.dumps(_body(prompt, count) | {"stream": True})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    with contextlib.closing(connection):
        for line in response:
            if line.startswith(b"data: {"):
                choice = json.loads(line[6:])["choices"][0]
                yield choice.get("token_ids") or [], choice.get("finish_reason")


def _body(prompt: list[int], count: int) -> dict[str, Any]:
    return {
        "model": "m",
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "detokenize": False,
    }


def _free_port() -> int:
    """Return a port for later: a server binds it after some 20 seconds, while tests beside this one open many.

    So it is below those that the kernel hands out, and each process that runs tests has a thousand of its own.
    """
    first = 20_000 + 1_000 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 12)
    while True:
        port = first + _RANDOM.randrange(1_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
