# SPDX-License-Identifier: Apache-2.0
"""Scatter against NaN-staging on a GPU: ``python -m benchmarks.gpu_apply [--device cuda] [--params 1e9]``.

Needs torch and this package, not vLLM. The live weights are random bf16 tensors of a transformer's shapes. `nan` does what
vLLM's patch loader does for each patched tensor: fill a tensor of its full size with NaN, put the new values in, and select.
`commit` is this project's write with its read-back, from positions and values that are on the device already; `bare` the
indexed write alone; `prepare` bringing them there and gathering the old values. Every round is checked bit for bit, undone,
and checked again, with NaN payloads, infinities and -0.0 among the values. One JSON object on stdout.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_delta_snapshot.engine.plan.live import gather, scatter

DENSITIES = {"0p1pct": 0.001, "1pct": 0.01, "5pct": 0.05, "20pct": 0.2}
REPETITIONS = 7
SPECIAL = (0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x0001)
WAYS = ("nan", "commit", "bare", "prepare")


def main() -> int:
    """Measure, check and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--params", type=float, default=1e9)
    arguments = parser.parse_args()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        print(json.dumps({"skipped": "torch finds no CUDA device here"}))
        return 0
    device = torch.device(arguments.device)
    weights = _weights(int(arguments.params), device)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "elements": sum(weight.numel() for weight in weights),
        "seconds": {},
    }
    for name, density in DENSITIES.items():
        print(f"density {density:g}", file=sys.stderr, flush=True)
        seconds = _measure(weights, density)
        result["seconds"][name] = seconds
        result[f"scatter_vs_nan_{name}"] = round(seconds["nan"][0] / seconds["commit"][0], 2)
    print(json.dumps(result))
    return 0


def _weights(elements: int, device: torch.device) -> list[torch.Tensor]:
    """Return flat bf16 tensors, as integers: two thirds in large matrices, the rest in smaller ones."""
    sizes = [elements // 40] * 27 + [elements // 160] * 52
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(size, dtype=torch.bfloat16, device=device, generator=generator).view(torch.int16) for size in sizes
    ]


def _measure(weights: Sequence[torch.Tensor], density: float) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for repetition in range(REPETITIONS + 1):  # the first warms up
        updates = [_update(weight, density, repetition) for weight in weights]
        with_nan = repetition % 2 == 0
        round_times = _round(weights, updates, with_special=with_nan)
        if repetition:
            for way, seconds in round_times.items():
                times[way].append(seconds)
    return {way: [round(f(v), 6) for f in (statistics.median, min, max)] for way, v in times.items()}


def _update(weight: torch.Tensor, density: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sorted distinct positions and new values, on the host."""
    generator = torch.Generator().manual_seed(seed)
    gaps = torch.empty(max(1, int(weight.numel() * density)), dtype=torch.float64).geometric_(
        density, generator=generator
    )
    index = gaps.cumsum(0).long() - 1
    index = index[index < weight.numel()]
    values = torch.randn(index.numel(), generator=generator).to(torch.bfloat16).view(torch.int16)
    return index, values


def _round(
    weights: Sequence[torch.Tensor], updates: Sequence[tuple[torch.Tensor, torch.Tensor]], *, with_special: bool
) -> dict[str, float]:
    device = weights[0].device
    before = [weight.clone() for weight in weights]
    times: dict[str, float] = {}
    # NaN-staging cannot carry NaN: its values are plain ones, the scatter's have special patterns in every other round.
    on_device = [(index.to(device), values.to(device)) for index, values in updates]
    times["nan"] = _timed(device, lambda: [_nan_stage(w, i, v) for w, (i, v) in zip(weights, on_device, strict=True)])
    _require(all(torch.equal(w[i], v) for w, (i, v) in zip(weights, on_device, strict=True)), "nan-staging")
    for weight, old in zip(weights, before, strict=True):
        weight.copy_(old)
    if with_special:
        special = torch.tensor(SPECIAL, dtype=torch.int32).to(torch.int16)
        for _, values in updates:
            values[: special.numel()] = special[: values.numel()]
    prepared: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def prepare() -> None:
        for weight, (index, values) in zip(weights, updates, strict=True):
            there = index.to(device)
            prepared.append((there, values.to(device), gather(weight, there)))

    times["prepare"] = _timed(device, prepare)
    outcomes: list[bool] = []
    times["commit"] = _timed(
        device, lambda: outcomes.extend(scatter(w, i, v) for w, (i, v, _) in zip(weights, prepared, strict=True))
    )
    _require(all(outcomes), "scatter's read-back")
    for weight, old, (index, values, _) in zip(weights, before, prepared, strict=True):
        expected = old.clone()
        expected[index] = values
        _require(torch.equal(weight, expected), "scatter")
    _require(all(scatter(w, i, o) for w, (i, _, o) in zip(weights, prepared, strict=True)), "undo's read-back")
    _require(all(torch.equal(w, old) for w, old in zip(weights, before, strict=True)), "undo")
    times["bare"] = _timed(
        device, lambda: [w.index_copy_(0, i, v) for w, (i, v, _) in zip(weights, prepared, strict=True)]
    )
    for weight, old in zip(weights, before, strict=True):
        weight.copy_(old)
    return times


def _nan_stage(weight: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
    live = weight.view(torch.bfloat16)
    staged = torch.full_like(live, float("nan"))
    staged[index] = values.view(torch.bfloat16)
    torch.where(staged.isnan(), live, staged, out=live)


def _timed(device: torch.device, work: Callable[[], object]) -> float:
    _synchronize(device)
    started = time.perf_counter()
    work()
    _synchronize(device)
    return time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _require(is_right: bool, what: str) -> None:
    if not is_right:
        raise SystemExit(f"wrong bits after {what}")


if __name__ == "__main__":
    sys.exit(main())
