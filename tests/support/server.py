"""A real vLLM server in a process of its own, on loopback."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.digests import merged
from vllm_delta_snapshot.drive import ServerClient

_ROOT = Path(__file__).parents[2]
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


@contextlib.contextmanager
def server(model: Path, log: Path, *options: str, **environment: str) -> Iterator[CheckedServer]:
    """Start a server with the plugin's backend, wait until it answers, and stop it afterwards."""
    port = _free_port()
    argv = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m", "--skip-tokenizer-init"),
        *("--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "4"),
        *("--kv-cache-memory-bytes", str(64 << 20)),
        *("--weight-transfer-config", '{"backend": "delta_snapshot"}'),
        *("--worker-extension-cls", "tests.support.digests.DigestsOfWorker"),
        *options,
    ]
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **_ENVIRONMENT, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        client = CheckedServer(f"http://127.0.0.1:{port}")
        try:
            try:
                client.wait_ready(timeout_s=300, is_alive=lambda: process.poll() is None)
            except Exception as error:
                raise AssertionError(log.read_text(errors="replace")[-4000:]) from error
            yield client
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


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
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
