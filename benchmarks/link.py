# SPDX-License-Identifier: Apache-2.0
"""From a step's end in the trainer to the new weights in a live engine, over a slow link: ``python -m benchmarks.link``.

A real vLLM engine serves a random Llama of about half a billion parameters; 1 % of the weights change by one unit in the
last place, then each way brings them over: ours, ours with the encoding `raw` (what OpenRL sends), the XOR of whole
tensors with zstd into a local checkpoint that is then reloaded (SkyRL's way), and a full checkpoint that is reloaded.
The link is between the trainer and the store: what is written goes through at 100 Mbit/s, 1 Gbit/s, or freely. Each way
has a process of its own. Then ours again over a real link, see `two_networks`. Progress goes to stderr, the result to stdout as one JSON object, a table to
docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.apply import llama_config
from benchmarks.measure import spread, timed
from benchmarks.peers import SkyRL
from benchmarks.report import machine, progress, update_coefficients, write_section

RATES = {"free": 0.0, "1gbit": 1e9 / 8, "100mbit": 1e8 / 8}
"""Bytes a second; 0 for a link that holds nothing up."""
WAYS = ("auto", "raw", "xor_zstd", "full")
DENSITY = 0.01
REPETITIONS = {"auto": 5, "raw": 5, "xor_zstd": 3, "full": 1}


def main() -> int:
    """Measure, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=(*WAYS, "two_networks"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way == "two_networks":
        print(json.dumps(_over_two_networks()))
        return 0
    if arguments.way:
        print(json.dumps(_measure(arguments.way)))
        return 0
    ways = {way: _in_own_process(way) for way in WAYS}
    result: dict[str, Any] = {"density": DENSITY, "ways": ways}
    for rate in ("1gbit", "100mbit"):
        ours = ways["auto"]["seconds"][rate][0]
        payload_s = ways["auto"]["payload_bytes"] / RATES[rate]
        result[f"payload_s_{rate}"] = round(payload_s, 3)
        result[f"overhead_{rate}"] = round(ours / payload_s, 2)
        for way, name in (("full", "full_checkpoint"), ("raw", "raw"), ("xor_zstd", "xor_zstd")):
            result[f"vs_{name}_{rate}"] = round(ways[way]["seconds"][rate][0] / ours, 2)
    for name in ("full_checkpoint", "raw", "xor_zstd"):
        result[f"vs_{name}"] = result[f"vs_{name}_100mbit"]
    result["two_networks"] = _in_own_process("two_networks")
    result["plan_100mbit"] = _write_coefficients(ways["auto"])
    _write_report(result)
    print(json.dumps(result))
    return 0


def _write_coefficients(ours: dict[str, Any]) -> dict[str, float]:
    """Write what the planner multiplies with, and return what it makes of this run over 100 Mbit/s."""
    from vllm_delta_snapshot.cli.planner import Setup, measured_coefficients, plan

    measured = ours["coefficients"]
    changes = measured["changes"]
    update_coefficients(
        diff_s_per_element=measured["empty_publish_s"] / ours["elements"],
        encode_s_per_change=max(0.0, measured["publish_s"] - measured["empty_publish_s"]) / changes,
        publish_s=0.0,  # within the two above
        decode_s_per_change=measured["decode_s"] / changes,
        map_s_per_change=measured["map_s"] / changes,
        prepare_s_per_change=measured["prepare_s"] / changes,
        pause_s_per_change=measured["pause_s"] / changes,
        pause_s=0.0,
        machine=machine(),
    )
    planned = plan(Setup(ours["elements"], DENSITY, 0.1), measured_coefficients())
    # The store is a local folder here: nothing is fetched over the link.
    return {
        "planned_s": round(planned.total_s - planned.seconds["fetch"], 3),
        "measured_s": ours["seconds"]["100mbit"][0],
    }


def _in_own_process(way: str) -> dict[str, Any]:
    progress(f"way {way}")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.link", "--way", way], stdout=subprocess.PIPE, check=True, text=True
    )
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def _over_two_networks() -> dict[str, Any]:
    from benchmarks import two_networks

    with tempfile.TemporaryDirectory() as folder:
        return two_networks.measure(_Trainer(Path(folder) / "base"))


def _measure(way: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        trainer = _Trainer(folder / "base")
        bring: Callable[[float], tuple[int, dict[str, float]]]
        bring = _Ours(trainer, folder, way) if way in ("auto", "raw") else _Reloaded(trainer, folder, way)
        seconds, parts, sizes = {}, {}, []
        for rate, bytes_a_second in RATES.items():
            times = []
            for repetition in range(REPETITIONS[way] + 1):
                trainer.step()
                started = time.perf_counter()
                num_bytes, parts[rate] = bring(bytes_a_second)
                if repetition or REPETITIONS[way] == 1:  # the first is a rehearsal
                    times.append(time.perf_counter() - started)
                    sizes.append(num_bytes)
                if REPETITIONS[way] == 1:
                    break
            seconds[rate] = spread(times)
            progress(f"{way} {rate}: {seconds[rate][0]} s")
        bring.check()
        coefficients = bring.coefficients() if isinstance(bring, _Ours) and way == "auto" else None
    return {
        "coefficients": coefficients,
        "elements": trainer.elements,
        "payload_bytes": int(statistics.median(sizes)),
        "seconds": seconds,
        "parts": parts,
    }


class _Trainer:
    """Weights in memory that change by one unit in the last place at random positions."""

    def __init__(self, base: Path) -> None:
        from transformers import LlamaForCausalLM

        config = llama_config("0.6B")
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
        model.save_pretrained(base)
        self.base = base
        self.weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        self.elements = sum(tensor.numel() for tensor in self.weights.values())
        self._generator = np.random.default_rng(0)

    def step(self) -> None:
        """Change 1 % of every tensor: most by one unit in the last place, as training does."""
        for tensor in self.weights.values():
            flat = tensor.view(torch.int16).view(-1).numpy()
            gaps = self._generator.geometric(DENSITY, size=int(flat.size * DENSITY))
            chosen = np.cumsum(gaps) - 1
            chosen = chosen[chosen < flat.size]
            moves = np.where(self._generator.random(chosen.size) < 0.5, 1, -1).astype(np.int16)
            rare = self._generator.random(chosen.size) < 0.1
            moves[rare] *= self._generator.integers(2, 9, int(rare.sum()), dtype=np.int16)
            flat[chosen] += moves


class _Ours:
    """Publish through the link; the engine's stager takes it from the store."""

    def __init__(self, trainer: _Trainer, folder: Path, encoding: str) -> None:
        from trainer_hooks import DeltaPublisher

        self._trainer = trainer
        self._sync_dir = folder / "run"
        self._publisher = DeltaPublisher(
            trainer.weights, sync_dir=str(self._sync_dir), base=trainer.base, encoding=encoding, asynchronous=False
        )
        self._store = self._publisher._store
        self._llm = _llm(trainer.base)
        self._llm.init_weight_transfer_engine({"init_info": {"sync_dir": str(self._sync_dir)}})

    def __call__(self, rate: float) -> tuple[int, dict[str, float]]:
        from vllm_delta_snapshot.drive import sync_llm

        self._publisher._store = _Shaped(self._store, rate)
        started = time.perf_counter()
        report = self._publisher.publish().report
        published = time.perf_counter()
        sync_llm(self._llm, report.version, run_id=self._publisher.run_id)
        parts = {
            "diff_s": report.diff_s,
            "publish_s": published - started,
            "sync_s": time.perf_counter() - published,
        }
        return report.payload_bytes, parts

    def coefficients(self) -> dict[str, Any]:
        """Measure what the planner multiplies with: medians of a few versions."""
        self._publisher._store = self._store
        rows = [self._one_by_one() for _ in range(3)]
        return {name: statistics.median(row[name] for row in rows) for name in rows[0]}

    def _one_by_one(self) -> dict[str, float]:
        """Bring a version over, stage by stage."""
        from vllm_delta_snapshot.changes.decode import decode
        from vllm_delta_snapshot.errors import NotStaged
        from vllm_delta_snapshot.host.mapping import map_update, write_lanes
        from vllm_delta_snapshot.runs.run_folder import RunFolder

        empty_s = timed(self._publisher.publish)
        self._bring_there()
        self._trainer.step()
        started = time.perf_counter()
        report = self._publisher.publish().report
        publish_s = time.perf_counter() - started
        folder = RunFolder(self._store)
        record = folder.read_version(report.version)
        metadata = folder.read_metadata(record)
        specs = folder.read_run().specs()
        started = time.perf_counter()
        changes = decode(metadata, self._sync_dir / record.folder, specs)
        decode_s = time.perf_counter() - started
        lanes_folder = self._sync_dir.with_name("lanes")
        lanes_folder.mkdir(exist_ok=True)
        places = _worker(self._llm).weight_transfer_engine._fitness.plan.places
        map_s = timed(lambda: write_lanes(lanes_folder, map_update(changes, places), {}))
        self._llm.start_weight_update()
        while True:
            started = time.perf_counter()
            try:
                self._update(report.version, "prepare")
                break
            except NotStaged:
                time.sleep(0.05)
        prepare_s = time.perf_counter() - started
        pause_s = timed(lambda: self._update(report.version, "apply"))
        self._llm.finish_weight_update()
        return {
            "empty_publish_s": empty_s,
            "publish_s": publish_s,
            "decode_s": decode_s,
            "map_s": map_s,
            "prepare_s": prepare_s,
            "pause_s": pause_s,
            "changes": report.changed_elements,
            "density": report.density,
            "payload_bytes": report.payload_bytes,
        }

    def _bring_there(self) -> None:
        from vllm_delta_snapshot.drive import sync_llm

        sync_llm(self._llm, self._publisher.version, run_id=self._publisher.run_id)

    def _update(self, version: int, action: str) -> None:
        asked = {"version": version, "run": self._publisher.run_id, "action": action}
        self._llm.update_weights({"update_info": asked})

    def check(self) -> None:
        """See that the engine has what the trainer has."""
        from vllm_delta_snapshot.drive import verify_llm

        verify_llm(self._llm)


class _Reloaded:
    """Bring a checkpoint folder up to date through the link, and have vLLM reload it."""

    def __init__(self, trainer: _Trainer, folder: Path, way: str) -> None:
        from safetensors.torch import load_file

        self._trainer, self._way = trainer, way
        self._file = trainer.base / "model.safetensors"
        self._payload = folder / "payload"
        self._llm = _llm(trainer.base)
        self._before = {name: _bits(tensor).copy() for name, tensor in load_file(self._file).items()}
        self._local = {name: bits.copy() for name, bits in self._before.items()}

    def __call__(self, rate: float) -> tuple[int, dict[str, float]]:
        from safetensors.torch import save, save_file

        after = {name: _bits(tensor) for name, tensor in self._trainer.weights.items()}
        if self._way == "full":
            num_bytes = _write_shaped(self._file, [memoryview(save(self._trainer.weights, {"format": "pt"}))], rate)
        else:
            codec = SkyRL()
            payload = codec.encode(self._before, after)
            num_bytes = _write_shaped(self._payload, (memoryview(part) for (part,) in payload.values()), rate)
            self._before = {name: bits.copy() for name, bits in after.items()}
            codec.apply(payload, self._local)
            tensors = {
                name: torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16) for name, bits in self._local.items()
            }
            shaped = {name: tensors[name].view(tensor.shape) for name, tensor in self._trainer.weights.items()}
            save_file(shaped, self._file, {"format": "pt"})
        _worker(self._llm).reload_weights()
        return num_bytes, {}

    def check(self) -> None:
        """See that the engine has what the trainer has, at one tensor."""
        name = "model.norm.weight"
        live = _worker(self._llm).model_runner.get_model().get_parameter(name)
        assert torch.equal(live.view(torch.int16), self._trainer.weights[name].view(torch.int16))


class _Shaped:
    """A store whose writes go through a link of so many bytes a second."""

    def __init__(self, store: Any, rate: float) -> None:
        self._store, self._rate = store, rate

    def put(self, key: str, chunks: Iterable[memoryview]) -> int:
        """Write an object at the link's rate."""
        num_bytes: int = self._store.put(key, _paced(chunks, self._rate))
        return num_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def _paced(chunks: Iterable[memoryview], rate: float) -> Iterator[memoryview]:
    started, sent = time.perf_counter(), 0
    for chunk in chunks:
        flat = memoryview(chunk).cast("B")
        for first in range(0, len(flat), 1 << 16):
            piece = flat[first : first + (1 << 16)]
            sent += len(piece)
            if rate:
                time.sleep(max(0.0, started + sent / rate - time.perf_counter()))
            yield piece


def _write_shaped(path: Path, chunks: Iterable[memoryview], rate: float) -> int:
    with path.open("wb") as file:
        return sum(file.write(piece) for piece in _paced(chunks, rate))


def _llm(base: Path) -> Any:
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    progress("starting an engine")
    return LLM(
        str(base),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=1,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=32 << 20,
        distributed_executor_backend="uni",
        weight_transfer_config=WeightTransferConfig(backend="delta_snapshot"),
    )


def _worker(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker


def _bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().view(torch.int16).numpy().view(np.uint16).ravel()


def _write_report(result: dict[str, Any]) -> None:
    ways = result["ways"]
    rows = []
    for way, name in (
        ("auto", "ours"),
        ("raw", "ours, `raw`"),
        ("xor_zstd", "XOR + zstd, reload"),
        ("full", "full, reload"),
    ):
        spreads = ["{:.2f} ({:.2f}-{:.2f})".format(*ways[way]["seconds"][rate]) for rate in RATES]
        rows.append([name, f"{ways[way]['payload_bytes'] / 1e6:.1f}", *spreads])
    parts = ways["auto"]["parts"]["100mbit"]
    method = (
        f"`make bench-link`. A random Llama of {ways['auto']['elements'] / 1e6:.0f} M bf16 parameters in a real vLLM engine on"
        f" the CPU, {100 * DENSITY:g} % of every tensor changed by small steps; {machine()}. Seconds from the step's end until"
        " the engine has the weights, publish, stage, pause and all; what is written goes through a link of the given rate"
        f" between trainer and store. Medians of {REPETITIONS['auto']} repetitions ({REPETITIONS['xor_zstd']} for XOR, one for"
        " full checkpoints), smallest and largest in brackets. Over 100 Mbit/s the payload alone takes"
        f" {result['payload_s_100mbit']} s, all of ours {result['overhead_100mbit']} times that; of the last repetition"
        f" {parts['publish_s']:.2f} s were publishing ({parts['diff_s']:.2f} s of it the diff) and {parts['sync_s']:.2f} s"
        f" staging and the pause. The planner makes {result['plan_100mbit']['planned_s']} s of it"
        f" ({result['plan_100mbit']['measured_s']} s measured)." + _two_networks_note(result["two_networks"])
    )
    write_section(
        "link", "From the trainer to a live engine", method, ["way", "MB", *(f"{rate}, s" for rate in RATES)], rows
    )


def _two_networks_note(found: dict[str, Any]) -> str:
    if "skipped" in found:
        return f" Two network namespaces: skipped, {found['skipped']}."
    return (
        " In two network namespaces joined by a link shaped to 100 Mbit/s, with a real S3 server (MiniStack) beside the trainer and"
        f" `delta-snapshot follow` beside a vLLM server on the other side: {found['seconds'][0]} s from the step's end until the"
        f" version is served ({found['seconds'][1]}-{found['seconds'][2]}), {found['overhead']} times what the payload alone takes;"
        f" {found['publish_s']} s of it publishing, which the link does not hold up there, and {found['pause_s']} s the pause."
    )


if __name__ == "__main__":
    sys.exit(main())
