# SPDX-License-Identifier: Apache-2.0
"""What publishing costs the trainer, beside what it is compared with: ``python -m benchmarks.publish``.

In one process, alternating, on one model of random bf16 weights: a copy of the model's bytes in memory, the diff, the
whole `publish`, and `save_file` of a full checkpoint. Medians of the repetitions with their smallest and largest.
Progress goes to stderr, the result to stdout as one JSON object, and a table to docs/performance.md.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.measure import spread, timed
from benchmarks.report import machine, progress, write_section
from trainer_hooks import DeltaPublisher
from trainer_hooks.diff import diff_tensor
from vllm_delta_snapshot.checkpoint import Checkpoint

TENSORS, ROWS, COLUMNS = 24, 2048, 2048
DENSITIES = (0.001, 0.01, 0.1)
REPETITIONS = 7


def main() -> int:
    """Measure, print, and write the table."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        weights = {f"layers.{n}.weight": torch.randn(ROWS, COLUMNS).bfloat16() for n in range(TENSORS)}
        base = folder / "base"
        base.mkdir()
        save_file(weights, base / "model.safetensors")
        results = {f"{density:g}": _measure(weights, base, folder / f"{density:g}", density) for density in DENSITIES}
    model_bytes = TENSORS * ROWS * COLUMNS * 2
    result = {
        "model_bytes": model_bytes,
        "repetitions": REPETITIONS,
        "threads": torch.get_num_threads(),
        "by_density": results,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    _write_report(result)
    print(json.dumps(result))
    return 0


def _measure(weights: dict[str, torch.Tensor], base: Path, sync_dir: Path, density: float) -> dict[str, Any]:
    publisher = DeltaPublisher(weights, sync_dir=str(sync_dir), base=base)
    checkpoint = Checkpoint(base)
    baseline = {name: np.array(checkpoint.bits(name)) for name in weights}
    target = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    times: dict[str, list[float]] = {"memcpy": [], "diff": [], "publish": [], "save_file": []}
    payload_bytes: list[float] = []
    for repetition in range(REPETITIONS):
        progress(f"density {density:g}: {repetition + 1}/{REPETITIONS}")
        _change(weights, density, repetition)
        times["memcpy"].append(timed(lambda: [target[n].copy_(t) for n, t in weights.items()]))
        started = time.perf_counter()
        patches = [diff_tensor(checkpoint.specs[n], baseline[n], tensor) for n, tensor in weights.items()]
        times["diff"].append(time.perf_counter() - started)
        for patch in patches:
            if patch is not None:
                baseline[patch.spec.name][patch.positions] = patch.new
        started = time.perf_counter()
        report = publisher.publish().report
        times["publish"].append(time.perf_counter() - started)
        payload_bytes.append(report.payload_bytes / max(1, report.changed_elements))
        times["save_file"].append(timed(lambda: _save_durably(weights, sync_dir / "full.safetensors")))
    memcpy = statistics.median(times["memcpy"])
    return {
        "bytes_per_change": round(statistics.median(payload_bytes), 3),
        "diff_x_memcpy": round(statistics.median(times["diff"]) / memcpy, 2),
        "publish_x_memcpy": round(statistics.median(times["publish"]) / memcpy, 2),
        "publish_vs_save_file": round(statistics.median(times["publish"]) / statistics.median(times["save_file"]), 3),
        "seconds": {name: spread(values) for name, values in times.items()},
    }


def _change(weights: dict[str, torch.Tensor], density: float, seed: int) -> None:
    """Move about `density` of the elements by one unit in the last place, as a small learning rate does."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in weights.values():
        count = int(tensor.numel() * density)
        chosen = torch.randint(tensor.numel(), (count,), generator=generator)
        flat = tensor.view(torch.int16).view(-1)
        flat[chosen] += 1


def _save_durably(weights: dict[str, torch.Tensor], path: Path) -> None:
    save_file(weights, path)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _write_report(result: dict[str, Any]) -> None:
    names = ("memcpy", "diff", "publish", "save_file")
    rows = []
    for density, row in result["by_density"].items():
        ratios = [row[key] for key in ("bytes_per_change", "diff_x_memcpy", "publish_x_memcpy", "publish_vs_save_file")]
        spreads = ["{:.3f} ({:.3f}-{:.3f})".format(*row["seconds"][name]) for name in names]
        rows.append([f"{100 * float(density):g} %", *ratios, *spreads])
    heads = ["changed", "bytes per change", "diff / memcpy", "publish / memcpy", "publish / save_file"]
    heads += [f"{name} s" for name in names]
    method = (
        f"`make bench-publish`. {TENSORS} random bf16 tensors of {ROWS} x {COLUMNS} ({result['model_bytes'] / 1e6:.0f} MB),"
        f" changed by one unit in the last place at random positions; {machine()}; the diff is numpy on one thread."
        f" Medians of {REPETITIONS} alternating repetitions, smallest and largest in brackets. `memcpy` copies the bytes;"
        " `publish` is the whole call, durable on disk; `save_file` writes and syncs a full checkpoint."
    )
    write_section("publish", "What publishing costs the trainer", method, heads, rows)


if __name__ == "__main__":
    sys.exit(main())
