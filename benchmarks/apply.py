# SPDX-License-Identifier: Apache-2.0
"""What applying costs inside the pause: ``python -m benchmarks.apply``.

A real vLLM engine serves a random Llama of about half a billion parameters. The same update is applied in turn by vLLM's
own patch loader, and by this project: `commit` is all that a worker does in the pause (look for drift, write, read back,
agree), `prepare` what it does before (gather the old values, prove them). Beside them the bare indexed write, vLLM's
`load_weights` of the whole model from memory, and vLLM's layerwise reload from disk. Then the pause for a fixed number of
changes in a small and in a twenty times larger model. Each engine has a process of its own. Progress goes to stderr, the
result to stdout as one JSON object, and tables to docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure import peak, reset_peak, spread, timed
from benchmarks.report import machine, progress, write_section

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
)

DENSITIES = {"0p1pct": 0.001, "1pct": 0.01, "5pct": 0.05, "20pct": 0.2}
REPETITIONS = {"0p1pct": 9, "1pct": 7, "5pct": 5, "20pct": 3}
WAYS = ("loader", "commit", "prepare", "bare")
CHANGES = 1_000_000
SHAPES = {  # hidden, inner, layers, vocabulary: about 0.1, 0.46, 0.59 and 2 billion parameters
    "0.1B": (768, 2048, 8, 32000),
    "0.5B": (1280, 3456, 22, 32000),
    "0.6B": (1536, 4096, 20, 32000),
    "2B": (2560, 6912, 24, 32000),
}


def main() -> int:
    """Measure, print, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--densities", help=argparse.SUPPRESS)
    parser.add_argument("--growth", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.densities:
        print(json.dumps(_measure_densities(arguments.densities)))
        return 0
    if arguments.growth:
        print(json.dumps(_measure_growth(arguments.growth)))
        return 0
    result = _in_own_process("--densities", "0.5B")
    small, large = (_in_own_process("--growth", size) for size in ("0.1B", "2B"))
    result["growth"] = {"0.1B": small, "2B": large}
    seconds = result["seconds"]
    for name in DENSITIES:
        result[f"scatter_vs_loader_{name}"] = round(seconds[name]["loader"][0] / seconds[name]["commit"][0], 2)
    result["scatter_vs_reload_1pct"] = round(result["reload_s"][0] / seconds["1pct"]["commit"][0], 2)
    result["scatter_vs_dense_1pct"] = round(result["dense_s"][0] / seconds["1pct"]["commit"][0], 2)
    result["pause_growth_model_x20"] = round(large["commit_s"][0] / small["commit_s"][0], 2)
    result["model_growth"] = round(large["elements"] / small["elements"], 1)
    result["peak_extra_bytes_per_change"] = result["peak_extra"]["1pct"]
    _write_report(result)
    print(json.dumps(result))
    return 0


def _in_own_process(option: str, size: str) -> dict[str, Any]:
    progress(f"{option[2:]}: an engine of {size} parameters")
    command = [sys.executable, "-m", "benchmarks.apply", option, size]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def _measure_densities(size: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "base"
        config = llama_config(size)
        torch.set_default_dtype(torch.bfloat16)
        from transformers import LlamaForCausalLM

        LlamaForCausalLM(config).save_pretrained(folder)
        torch.set_default_dtype(torch.float32)
        engine = _Engine(folder, _specs(config))
        seconds, peaks = {}, {}
        for name, density in DENSITIES.items():
            progress(f"density {density:g}")
            seconds[name], peaks[name] = _measure_update(engine, density, REPETITIONS[name], Path(temporary) / name)
        progress("dense load from memory, and reload from disk")
        weights = _dense_weights(folder)
        dense = spread([timed(lambda: engine.model.load_weights(iter(weights))) for _ in range(3)])
        reload_s = spread([timed(engine.worker.reload_weights) for _ in range(3)])
    return {
        "elements": engine.elements,
        "repetitions": REPETITIONS,
        "seconds": seconds,
        "peak_extra": peaks,
        "dense_s": dense,
        "reload_s": reload_s,
    }


def _measure_growth(size: str) -> dict[str, Any]:
    """Time the pause for a fixed number of changes. The weights are vLLM's dummy ones; no file is read."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "base"
        config = llama_config(size)
        config.save_pretrained(folder)
        described = json.loads((folder / "config.json").read_text())
        described["architectures"] = ["LlamaForCausalLM"]
        (folder / "config.json").write_text(json.dumps(described))
        engine = _Engine(folder, _specs(config), load_format="dummy")
        times = []
        for repetition in range(REPETITIONS["1pct"]):
            patches = engine.patches(CHANGES / engine.elements, repetition)
            prepared = engine.prepare(patches, Path(temporary) / str(repetition))
            times.append(timed(lambda: prepared.commit(engine.model, "scatter")))  # noqa: B023 - called at once
    return {"elements": engine.elements, "changes": CHANGES, "commit_s": spread(times)}


class _Engine:
    """An in-process vLLM engine, its load plan, and updates for it."""

    def __init__(self, folder: Path, specs: Mapping[str, Any], **options: Any) -> None:
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        from vllm_delta_snapshot.engine.plan.load_plan import record_load_plan
        from vllm_delta_snapshot.engine.ways import Choice
        from vllm_delta_snapshot.engine.write.fitness import Fitness

        settings: dict[str, Any] = {
            "dtype": "bfloat16",
            "enforce_eager": True,
            "max_model_len": 64,
            "max_num_seqs": 1,
            "skip_tokenizer_init": True,
            "kv_cache_memory_bytes": 32 << 20,
            "distributed_executor_backend": "uni",
            "weight_transfer_config": WeightTransferConfig(backend="delta_snapshot"),
        }
        self.llm: Any = LLM(str(folder), **(settings | options))
        self.worker: Any = self.llm.llm_engine.model_executor.driver_worker.worker
        self.model: Any = self.worker.model_runner.get_model()
        self.specs = specs
        self.elements = sum(spec.numel for spec in specs.values())
        choices = {name: Choice("scatter") for name in specs}
        self.fitness = Fitness(record_load_plan(self.model, specs), specs, choices)

    def patches(self, density: float, seed: int) -> list[Any]:
        """Return changes at random positions of every tensor: other bits than the live ones."""
        from vllm_delta_snapshot.engine.bits import bits_of
        from vllm_delta_snapshot.engine.plan.live import gather
        from vllm_delta_snapshot.host.mapping import map_update
        from vllm_delta_snapshot.types import TensorPatch, position_dtype

        generator = np.random.default_rng(seed)
        patches = []
        for spec in self.specs.values():
            gaps = generator.geometric(density, size=max(1, int(spec.numel * density)))
            chosen = np.cumsum(gaps) - 1
            chosen = chosen[chosen < spec.numel].astype(position_dtype(spec.numel))
            if not chosen.size:
                continue
            blank = TensorPatch(spec, chosen, np.zeros(chosen.size, np.uint16))
            (lane,) = map_update([blank], self.fitness.plan.places)
            live = gather(self.fitness.plan.storages[lane.storage].flat, torch.from_numpy(lane.index))
            patches.append(TensorPatch(spec, chosen, bits_of(live) ^ np.uint16(1)))
        return patches

    def prepare(self, patches: Sequence[Any], folder: Path, *, proven: bool = True) -> Any:
        """Stage patches as the stager does, and prepare them as a worker does."""
        from vllm_delta_snapshot.engine.write.transaction import prepare

        return prepare(self.fitness, self.staged(patches, folder, proven=proven))

    def staged(self, patches: Sequence[Any], folder: Path, *, proven: bool = True) -> Any:
        """Map patches, write them to files and read those, as the stager and a worker do."""
        from vllm_delta_snapshot.engine.write.updates import Update
        from vllm_delta_snapshot.format.digest import format_digest, patch_digest
        from vllm_delta_snapshot.host.mapping import map_update, read_lanes, write_lanes

        folder.mkdir()
        write_lanes(folder, map_update(patches, self.fitness.plan.places), {})
        lanes, _ = read_lanes(folder)
        changed = {patch.spec.name: patch.changed for patch in patches}
        old = {p.spec.name: format_digest(patch_digest(p.spec, p.positions, p.values ^ np.uint16(1))) for p in patches}
        return Update(1, "", changed, old if proven else {}, {}, lanes, lambda: patches)


def _measure_update(
    engine: _Engine, density: float, repetitions: int, folder: Path
) -> tuple[dict[str, list[float]], float]:
    from vllm_delta_snapshot.engine.write.lanes import undo_lanes
    from vllm_delta_snapshot.engine.write.loader import apply_by_loader
    from vllm_delta_snapshot.engine.write.transaction import prepare

    times: dict[str, list[float]] = {way: [] for way in WAYS}
    peaks = []
    folder.mkdir()
    for repetition in range(repetitions):
        patches = engine.patches(density, repetition)
        update = engine.staged(patches, folder / str(repetition))
        changes = sum(patch.changed for patch in patches)

        def by_loader() -> None:
            times["loader"].append(timed(lambda: apply_by_loader(engine.model, patches)))  # noqa: B023

        def by_commit() -> None:
            started = time.perf_counter()
            prepared = prepare(engine.fitness, update)  # noqa: B023
            times["prepare"].append(time.perf_counter() - started)
            before = reset_peak()
            times["commit"].append(timed(lambda: prepared.commit(engine.model, "scatter")))
            peaks.append((peak() - before) / changes)  # noqa: B023
            undo_lanes(prepared.lanes)
            times["bare"].append(
                timed(lambda: [lane.flat.index_copy_(0, lane.index, lane.new) for lane in prepared.lanes])
            )
            undo_lanes(prepared.lanes)

        by_commit()
        by_loader()
        shutil.rmtree(folder / str(repetition))
    return {way: spread(values) for way, values in times.items()}, round(max(peaks), 2)


def llama_config(size: str) -> Any:
    """Return the configuration of a Llama of about this size."""
    from transformers import LlamaConfig

    hidden, inner, layers, vocabulary = SHAPES[size]
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )


def _specs(config: Any) -> dict[str, Any]:
    from transformers import LlamaForCausalLM

    from vllm_delta_snapshot.types import TensorSpec

    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return {name: TensorSpec(name, tuple(tensor.shape), "BF16") for name, tensor in model.state_dict().items()}


def _dense_weights(folder: Path) -> list[tuple[str, torch.Tensor]]:
    from safetensors.torch import load_file

    return [item for path in sorted(folder.glob("*.safetensors")) for item in load_file(path).items()]


def _write_report(result: dict[str, Any]) -> None:
    rows = []
    for name, density in DENSITIES.items():
        spreads = ["{:.4f} ({:.4f}-{:.4f})".format(*result["seconds"][name][way]) for way in WAYS]
        rows.append([f"{100 * density:g} %", result[f"scatter_vs_loader_{name}"], *spreads])
    growth = result["growth"]
    method = (
        f"`make bench-apply`. A random Llama of {result['elements'] / 1e6:.0f} M bf16 parameters in a real vLLM engine on"
        f" the CPU, changes at random positions of every tensor; {machine()}. *loader* is vLLM's own"
        " `load_checkpoint_weight_patches` alone. *commit* is all that a worker does in the pause: look for drift, write,"
        " read every element back, agree. *prepare* is what it does before, with generation standing still for that long"
        " too: gather the old values and prove their digests. *bare* is the indexed write alone. Seconds are medians of 3"
        " (20 %) to 9 (0.1 %) repetitions, smallest and largest in brackets.\n\n"
        f"In the same run: vLLM's `load_weights` of the whole model from memory {result['dense_s'][0]:.3f} s, vLLM's"
        f" layerwise reload from disk (in the page cache) {result['reload_s'][0]:.3f} s,"
        f" {result['scatter_vs_reload_1pct']} times the commit at 1 %. Memory in the pause beyond what was prepared: at most"
        f" {result['peak_extra_bytes_per_change']} bytes a change at 1 %. A fixed {CHANGES:,} changes: commit"
        f" {growth['0.1B']['commit_s'][0]:.4f} s in {growth['0.1B']['elements'] / 1e6:.0f} M parameters,"
        f" {growth['2B']['commit_s'][0]:.4f} s in {growth['2B']['elements'] / 1e6:.0f} M ({result['model_growth']} times as"
        f" many): {result['pause_growth_model_x20']} times the time, since changes lie farther apart."
    )
    heads = ["changed", "loader / commit", "loader s", "commit s", "prepare s", "bare s"]
    write_section("apply", "What applying costs inside the pause", method, heads, rows)


if __name__ == "__main__":
    sys.exit(main())
