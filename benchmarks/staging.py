# SPDX-License-Identifier: Apache-2.0
"""Does generation stand still while a large update is staged? ``python -m benchmarks.staging``.

A real vLLM server streams tokens while three versions that change 10 % of the weights each are fetched, checked,
decoded, merged and mapped: by the stager, a process of its own, as it is; and, side by side, the very same code in a
thread of the worker and inside a worker RPC. Two controls say what any other process costs here: one that only counts,
one that only copies memory, both at the stager's priority. Token rates are relative to those just before. Then the
update is applied, and the longest gap between two tokens is taken of each. Progress goes to stderr, the result to stdout as one JSON
object, a table to docs/performance.md.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.apply import llama_config
from benchmarks.measure import spread
from benchmarks.report import machine, progress, write_section
from examples.grpo.server import MODEL_NAME, VllmServer
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.drive import ServerClient, sync_server, verify_server

DENSITY, VERSIONS = 0.1, 3
REPETITIONS = 3
WINDOW_S = 6.0
"""For how long the undisturbed rate is taken before each measurement."""
CONTEXT: Final = 8192
WAYS = {"process": "the stager, a process", "thread": "in a thread of the worker", "rpc": "inside a worker RPC"}

CONTROLS = {
    "counting": ("a process that only counts", "while True: pass"),
    "copying": (
        "a process that only copies memory",
        "import numpy as np; a = np.zeros(1 << 26, np.uint8); b = a.copy()\nwhile True: np.copyto(b, a)",
    ),
}


class StagingWorker:
    """Added to the server's worker: stages there what the stager stages in its own process."""

    def ready_stager(self, sync_dir: str, checkpoint: str, root: str) -> None:
        """Make a stager that follows, so that only staging is left to be done."""
        from vllm_delta_snapshot.host.area import StageArea, StagerConfig
        from vllm_delta_snapshot.host.attachment import Attachment
        from vllm_delta_snapshot.host.stager import Stager

        area = StageArea.of(Path(root), StagerConfig(sync_dir=sync_dir, checkpoint=checkpoint))
        places = vars(self)["weight_transfer_engine"]._fitness.plan.places
        places.save(area.places / places.id)
        attachment = Attachment(area)
        attachment.tell(0, places.id)
        stager = Stager(area)
        stager.start()
        vars(self)["_staging"] = (area, attachment, stager)

    def stage_here(self) -> None:
        """Stage, and come back when it is done."""
        area, attachment, stager = vars(self)["_staging"]
        while not _is_staged(area.path):
            stager.step()
        attachment.close()

    def stage_in_thread(self) -> None:
        """Begin to stage in a thread, and come back at once."""
        threading.Thread(target=self.stage_here, daemon=True).start()


def main() -> int:
    """Measure, print, and write the table."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.environ["DELTA_SNAPSHOT_STAGE_DIR"] = str(folder / "stage")
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0"
        os.environ["PYTHONPATH"] = str(Path(__file__).parent.parent)
        trainer = _Trainer(folder)
        with _Server(folder / "base", folder / "server.log") as server:
            server.client.init(sync_dir=str(trainer.sync_dir), init_timeout_s=600)
            result = _measure(server.client, trainer, folder)
    _write_report(result)
    print(json.dumps(result))
    return 0


def _measure(client: ServerClient, trainer: _Trainer, folder: Path) -> dict[str, Any]:
    rates: dict[str, list[float]] = {way: [] for way in (*WAYS, *CONTROLS, "undisturbed")}
    gaps: dict[str, list[float]] = {way: [] for way in (*WAYS, *CONTROLS, "undisturbed", "applying")}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    pauses: list[float] = []
    first_copy = trainer.publish_hidden(folder / "copy")
    for repetition in range(REPETITIONS):
        if repetition:
            trainer.publish_hidden(None)
        with _Stream(client) as stream:
            for way in WAYS:
                progress(f"repetition {repetition + 1}/{REPETITIONS}: {way}")
                before = stream.window(WINDOW_S)
                if way == "process":
                    span = trainer.reveal_and_wait(folder / "stage")
                else:
                    span = _stage_in_worker(client, way, first_copy, trainer, folder / f"{way}-{repetition}")
                during = stream.between(*span)
                rates[way].append(during.rate / before.rate)
                rates["undisturbed"].append(stream.window(WINDOW_S).rate / before.rate)
                gaps[way].append(during.longest_gap)
                gaps["undisturbed"].append(before.longest_gap)
                seconds[way].append(span[1] - span[0])
            for control, (_, code) in CONTROLS.items():
                before, during = _beside(stream, code)
                rates[control].append(during.rate / before.rate)
                gaps[control].append(during.longest_gap)
            started = time.perf_counter()
            pauses.append(sync_server(client, trainer.version, run_id=trainer.run_id).pause_s)
            gaps["applying"].append(stream.between(started, time.perf_counter()).longest_gap)
    verify_server(client, trainer.version)
    return {
        "token_rate_while_staging": _median(rates["process"]),
        "token_rate_in_thread": _median(rates["thread"]),
        "token_rate_in_rpc": _median(rates["rpc"]),
        "token_rate_beside_counting": _median(rates["counting"]),
        "token_rate_beside_copying": _median(rates["copying"]),
        "token_rate_undisturbed": _median(rates["undisturbed"]),
        "longest_gap_s": max(gaps["process"]),
        "pause_s": _median(pauses),
        "rates": {way: spread(values) for way, values in rates.items()},
        "gaps_s": {way: spread(values) for way, values in gaps.items()},
        "seconds": {way: spread(values) for way, values in seconds.items()},
        "elements": trainer.elements,
        "changes": trainer.changes,
        "repetitions": REPETITIONS,
    }


def _beside(stream: _Stream, code: str) -> tuple[_Window, _Window]:
    """Return what comes before, and beside a process of the stager's priority that runs `code`."""
    before = stream.window(WINDOW_S)
    program = f"import os; os.nice(19); print(flush=True)\n{code}"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        during = stream.window(WINDOW_S)
        other.kill()
    return before, during


def _stage_in_worker(client: ServerClient, way: str, copy: Path, trainer: _Trainer, root: Path) -> tuple[float, float]:
    """Stage in the server's worker; return when that began and ended."""
    arguments = {"sync_dir": str(copy), "checkpoint": str(trainer.base), "root": str(root)}
    _call(client, "ready_stager", **arguments)
    time.sleep(1.0)  # past the gap that making it has cost
    started = time.perf_counter()
    if way == "rpc":
        _call(client, "stage_here")
    else:
        _call(client, "stage_in_thread")
        [area] = root.iterdir()
        while not _is_staged(area):
            time.sleep(0.01)
    ended = time.perf_counter()
    shutil.rmtree(root)
    return started, ended


def _call(client: ServerClient, method: str, **arguments: str) -> None:
    client.request("POST", "/collective_rpc", {"method": method, "kwargs": arguments})


def _is_staged(area: Path, version: int = VERSIONS) -> bool:
    """Say whether an update to `version` is mapped. It appears under a hidden name first."""
    return any((area / "mapped").glob(f"[0-9]*-{version:08d}-*"))


class _Trainer:
    """Publishes versions that nobody sees yet, and reveals them together."""

    def __init__(self, folder: Path) -> None:
        from transformers import LlamaForCausalLM

        config = llama_config("0.1B")
        config.max_position_embeddings = CONTEXT
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
        self.base, self.sync_dir = folder / "base", folder / "run"
        model.save_pretrained(self.base)
        self._weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        self.elements = sum(tensor.numel() for tensor in self._weights.values())
        self._publisher = DeltaPublisher(self._weights, sync_dir=str(self.sync_dir), base=self.base, asynchronous=False)
        self._hidden: list[tuple[Path, Path]] = []
        self._generator = torch.Generator().manual_seed(0)
        self.run_id = self._publisher.run_id
        self.version = self.changes = 0

    def publish_hidden(self, copy: Path | None) -> Path:
        """Publish versions, and hide their records; leave a copy of the run in which they are seen, if wanted."""
        self.changes = 0
        for _ in range(VERSIONS):
            for tensor in self._weights.values():
                bits = tensor.view(torch.int16).view(-1)
                bits[torch.rand(bits.numel(), generator=self._generator) < DENSITY] += 1
            report = self._publisher.publish().report
            self.changes += report.changed_elements
            self.version = report.version
            record = self.sync_dir / "versions" / f"{report.version:08d}.json"
            hidden = self.sync_dir.with_name(record.name)
            record.rename(hidden)
            self._hidden.append((hidden, record))
        if copy is not None:
            shutil.copytree(self.sync_dir, copy)
            for hidden, record in self._hidden:
                shutil.copy(hidden, copy / "versions" / record.name)
        return copy or self.sync_dir

    def reveal_and_wait(self, root: Path) -> tuple[float, float]:
        """Reveal what is hidden; return when, and when the stager had it mapped."""
        started = time.perf_counter()
        seen = self.sync_dir / "versions"
        complete = shutil.copytree(seen, self.sync_dir / "versions.all")
        for hidden, record in self._hidden:
            hidden.rename(complete / record.name)
        self._hidden.clear()
        seen.rename(self.sync_dir / "versions.old")
        complete.rename(seen)  # the stager sees none or all
        shutil.rmtree(self.sync_dir / "versions.old")
        [area] = root.iterdir()
        while not _is_staged(area, self.version):
            time.sleep(0.01)
        return started, time.perf_counter()


class _Server(VllmServer):
    """The demo's server with a longer context, and with `StagingWorker` in its worker."""

    def _command(self) -> list[str]:
        command = super()._command()
        command[command.index("--max-model-len") + 1] = str(CONTEXT)
        extension = "benchmarks.staging.StagingWorker"
        return [*command, "--skip-tokenizer-init", "--worker-extension-cls", extension]


class _Window:
    """The tokens of some seconds."""

    def __init__(self, times: list[float], started: float, ended: float) -> None:
        self.rate = len(times) / (ended - started)
        self.longest_gap = max(b - a for a, b in zip([started, *times], [*times, ended], strict=True))


class _Stream:
    """One request that streams until the context ends; the times at which its tokens arrived."""

    def __init__(self, client: ServerClient) -> None:
        self._connection = http.client.HTTPConnection(urllib.parse.urlsplit(client.url).netloc, timeout=300)
        self._times: list[float] = []
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> _Stream:
        self._thread.start()
        while len(self._times) < 20:
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection.sock is not None:
            self._connection.sock.close()
        self._thread.join(30)

    def window(self, seconds: float) -> _Window:
        """Wait, and return what came meanwhile."""
        started = time.perf_counter()
        time.sleep(seconds)
        return self.between(started, time.perf_counter())

    def between(self, started: float, ended: float) -> _Window:
        """Return what came meanwhile."""
        if not self._thread.is_alive():
            raise RuntimeError("the stream ended before the measurement did")
        return _Window([moment for moment in list(self._times) if started <= moment <= ended], started, ended)

    def _read(self) -> None:
        body = {
            "model": MODEL_NAME,
            "prompt": [1, 2, 3],
            "max_tokens": CONTEXT - 16,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "return_token_ids": True,
            "detokenize": False,
        }
        self._connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        try:
            for line in self._connection.getresponse():
                if line.startswith(b"data: {"):
                    self._times.append(time.perf_counter())
        except (OSError, ValueError, http.client.HTTPException):
            return  # the context has ended


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 4)


def _write_report(result: dict[str, Any]) -> None:
    rows = [
        [name, *("{:.3f} ({:.3f}-{:.3f})".format(*result[kind][way]) for kind in ("rates", "gaps_s", "seconds"))]
        for way, name in WAYS.items()
    ]
    rows += [
        [name, *("{:.3f} ({:.3f}-{:.3f})".format(*result[kind][way]) for kind in ("rates", "gaps_s")), "-"]
        for way, (name, _) in CONTROLS.items()
    ]
    undisturbed = ("{:.3f} ({:.3f}-{:.3f})".format(*result[kind]["undisturbed"]) for kind in ("rates", "gaps_s"))
    rows.append(["nothing", *undisturbed, "-"])
    rows.append(["applying it", "-", "{:.3f} ({:.3f}-{:.3f})".format(*result["gaps_s"]["applying"]), "-"])
    write_section(
        "staging",
        "Generation while an update is staged",
        f"`make bench-staging`. A real vLLM server with a random Llama of {result['elements'] / 1e6:.0f} M parameters on one"
        f" core streams one request; {VERSIONS} versions of together {result['changes'] / 1e6:.1f} M changes are staged"
        f" meanwhile. {machine()}. Medians of {result['repetitions']} repetitions, smallest and largest in brackets; token"
        " rates relative to the seconds just before. The pause, as the driver saw it, took"
        f" {result['pause_s']:.2f} s.",
        ["what goes on", "token rate", "longest gap, s", "staging took, s"],
        rows,
    )


if __name__ == "__main__":
    sys.exit(main())
