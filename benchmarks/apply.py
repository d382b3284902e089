# SPDX-License-Identifier: Apache-2.0
"""What applying costs inside the pause: `scatter` against vLLM's own loader: ``python -m benchmarks.apply``.

A real vLLM engine in this process serves a random Llama of about half a billion parameters. The same update is committed
by both ways in turn, everything included that the update call does in the pause: compare the old values, write, read back.
Medians with their smallest and largest. Progress goes to stderr, the result to stdout as one JSON object, and a table to
docs/performance.md.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report import machine, progress, write_section

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
)

DENSITIES = {"1pct": 0.01, "0p1pct": 0.001}
REPETITIONS = 7
WAYS = ("loader", "scatter")


def main() -> int:
    """Measure, print, and write the table."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "base"
        progress("making the model")
        _make_model(folder)
        progress("starting the engine")
        model, fitness = _serve(folder)
        elements = sum(spec.numel for spec in fitness.specs.values())
        measured = {name: _measure(model, fitness, folder, density) for name, density in DENSITIES.items()}
    result: dict[str, Any] = {"elements": elements, "repetitions": REPETITIONS, "seconds": measured}
    for name, seconds in measured.items():
        result[f"scatter_vs_loader_{name}"] = round(seconds["loader"][0] / seconds["scatter"][0], 2)
    _write_report(result)
    print(json.dumps(result))
    return 0


def _make_model(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1280,
        intermediate_size=3456,
        num_hidden_layers=22,
        num_attention_heads=20,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(config).save_pretrained(folder)
    torch.set_default_dtype(torch.float32)


def _serve(folder: Path) -> tuple[Any, Any]:
    """Start an engine and return its live model, and what the backend found out about it."""
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    llm = LLM(
        str(folder),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=1,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=32 << 20,
        distributed_executor_backend="uni",
        weight_transfer_config=WeightTransferConfig(backend="delta_snapshot"),
    )
    llm.init_weight_transfer_engine({"init_info": {}})
    worker = llm.llm_engine.model_executor.driver_worker.worker
    globals()["_alive"] = llm
    return worker.model_runner.get_model(), worker.weight_transfer_engine._fitness


def _measure(model: Any, fitness: Any, folder: Path, density: float) -> dict[str, list[float]]:
    from vllm_delta_snapshot.checkpoint import Checkpoint
    from vllm_delta_snapshot.engine.transaction import prepare
    from vllm_delta_snapshot.types import TensorPatch, position_dtype

    generator = np.random.default_rng(0)
    checkpoint = Checkpoint(folder)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for repetition in range(REPETITIONS):
        progress(f"density {density:g}: {repetition + 1}/{REPETITIONS}")
        for way in WAYS if repetition % 2 else reversed(WAYS):
            patches = []
            for spec, bits in checkpoint.items():
                chosen = np.unique(generator.integers(spec.numel, size=max(1, int(spec.numel * density))))
                values = bits[chosen] ^ np.uint16(1 + repetition % 3)
                patches.append(TensorPatch(spec, chosen.astype(position_dtype(spec.numel)), values))
            prepared = prepare(fitness, patches, {})
            started = time.perf_counter()
            with torch.no_grad():
                prepared.commit(model, way)
            times[way].append(time.perf_counter() - started)
    return {way: [round(f(values), 4) for f in (statistics.median, min, max)] for way, values in times.items()}


def _write_report(result: dict[str, Any]) -> None:
    rows = []
    for name, density in DENSITIES.items():
        spreads = ["{:.3f} ({:.3f}-{:.3f})".format(*result["seconds"][name][way]) for way in WAYS]
        rows.append([f"{100 * density:g} %", result[f"scatter_vs_loader_{name}"], *spreads])
    method = (
        f"`make bench-apply`. A random Llama of {result['elements'] / 1e6:.0f} M bf16 parameters in a real vLLM engine on"
        f" the CPU, changes at random positions of every tensor; {machine()}. The seconds are those of the whole update call"
        " in the pause (compare the old values, write, read back), prepared before. Medians of"
        f" {REPETITIONS} repetitions, the two ways in turn, smallest and largest in brackets."
    )
    heads = ["changed", "loader / scatter", "loader s", "scatter s"]
    write_section("apply", "What applying costs inside the pause", method, heads, rows)


if __name__ == "__main__":
    sys.exit(main())
