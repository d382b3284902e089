# SPDX-License-Identifier: Apache-2.0
"""The diff of weights on a GPU: ``python -m benchmarks.gpu_diff [--device cuda] [--params 1e9] [--threads 4]``.

Needs torch and this package, not vLLM. The weights are random bf16 tensors of a transformer's shapes, changed by one unit in
the last place at random positions. `device` streams the pinned baseline to the GPU and compares there; `device_plain` does
so from plain memory; `host` brings the weights to pinned memory and compares on the CPU; `copy` only copies the whole model
to pinned memory, in one go, and compares nothing; `naive` copies each tensor with ``.cpu()`` and compares on the CPU, which is
what a trainer does without any of this. Everything found is checked bit for bit, digests too. One JSON object on stdout.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainer_hooks.compare.device_diff import DeviceDiff, DiffOn
from trainer_hooks.compare.diff import Piece, TensorDiff, diff_tensor, pieces
from trainer_hooks.compare.differ import diff_pieces
from trainer_hooks.compare.pinned import HostMemory
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.types import TensorSpec
from vllm_delta_snapshot.util.ordered import thread_pool

DENSITIES = {"0p1pct": 0.001, "1pct": 0.01, "5pct": 0.05}
REPETITIONS = 5


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """One tensor: on the device, and its baseline, pinned and plain."""

    spec: TensorSpec
    live: torch.Tensor
    pinned: Bits
    plain: Bits


def main() -> int:
    """Measure, check and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cpu runs it all without a GPU, to try the script")
    parser.add_argument("--params", type=float, default=1e9)
    parser.add_argument("--threads", type=int, default=4)
    arguments = parser.parse_args()
    is_cuda = arguments.device.startswith("cuda")
    if is_cuda and not torch.cuda.is_available():
        print(json.dumps({"skipped": "torch finds no CUDA device here"}))
        return 0
    device = torch.device(arguments.device)
    weights = _weights(int(arguments.params), device, is_pinned=is_cuda)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if is_cuda else "cpu",
        "torch": torch.__version__,
        "threads": arguments.threads,
        "elements": sum(weight.spec.numel for weight in weights),
        "seconds": {},
    }
    staging = [torch.empty(w.spec.numel, dtype=torch.bfloat16, device="cpu", pin_memory=is_cuda) for w in weights]
    with thread_pool(arguments.threads) as pool:
        for name, density in DENSITIES.items():
            print(f"density {density:g}", file=sys.stderr, flush=True)
            seconds, peaks = _measure(weights, staging, density, pool)
            result["seconds"][name] = seconds
            result["device_bytes"] = peaks
            result[f"device_vs_copy_{name}"] = round(seconds["device"][0] / seconds["copy"][0], 2)
            result[f"host_vs_device_{name}"] = round(seconds["host"][0] / seconds["device"][0], 2)
    print(json.dumps(result))
    return 0


def _weights(elements: int, device: torch.device, *, is_pinned: bool) -> list[Weight]:
    """Return bf16 tensors: two thirds in large matrices, the rest in smaller ones."""
    generator = torch.Generator(device).manual_seed(0)
    memory = HostMemory(is_pinned=is_pinned)
    made = []
    for number, size in enumerate([elements // 40] * 27 + [elements // 160] * 52):
        live = torch.randn(size, dtype=torch.bfloat16, device=device, generator=generator)
        bits = live.cpu().view(torch.int16).numpy().view(np.uint16)
        made.append(Weight(TensorSpec(f"w{number}", (size,), "BF16"), live, memory.copy_of(bits), np.array(bits)))
    return made


def _measure(
    weights: Sequence[Weight], staging: Sequence[torch.Tensor], density: float, pool: ThreadPoolExecutor | None
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Return seconds by way, median, least and most, and the most device memory that each took."""
    device = weights[0].live.device
    _change(weights, density)
    expected = [diff_tensor(w.spec, w.plain, w.live.cpu()) for w in weights]

    def copy() -> list[TensorDiff]:
        for weight, into in zip(weights, staging, strict=True):
            into.copy_(weight.live, non_blocking=True)
        _synchronize(device)
        return []

    def naive() -> list[TensorDiff]:
        cut = (piece for w in weights for piece in pieces(w.spec, w.plain, w.live.cpu()))
        return list(diff_pieces(cut, pool))

    ways: dict[str, Callable[[], list[TensorDiff]]] = {
        "device": _way(weights, "device", pool, is_pinned=True),
        "device_plain": _way(weights, "device", pool, is_pinned=False),
        "host": _way(weights, "host", pool, is_pinned=False),
        "naive": naive,
        "copy": copy,
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    peaks: dict[str, int] = {}
    for repetition in range(REPETITIONS + 1):  # the first warms up
        for way, run in ways.items():
            seconds, peak, found = _timed(device, run)
            if way != "copy":
                _check(found, [diff for diff in expected if diff is not None], way)
            if repetition:
                times[way].append(seconds)
                peaks[way] = max(peaks.get(way, 0), peak)
    for weight in weights:  # back, for the next density
        weight.live.copy_(torch.from_numpy(weight.plain.view(np.int16)).view(torch.bfloat16))
    return {way: [round(f(v), 5) for f in (statistics.median, min, max)] for way, v in times.items()}, peaks


def _way(
    weights: Sequence[Weight], where: DiffOn, pool: ThreadPoolExecutor | None, *, is_pinned: bool
) -> Callable[[], list[TensorDiff]]:
    device_diff = DeviceDiff(where)

    def cut() -> Iterator[Piece]:
        for weight in weights:
            yield from pieces(weight.spec, weight.pinned if is_pinned else weight.plain, weight.live)

    return lambda: list(diff_pieces(cut(), pool, device_diff=device_diff))


def _change(weights: Sequence[Weight], density: float) -> None:
    for seed, weight in enumerate(weights):
        generator = torch.Generator(weight.live.device).manual_seed(seed)
        is_hit = torch.rand(weight.spec.numel, device=weight.live.device, generator=generator) < density
        weight.live.view(torch.int16).bitwise_xor_(is_hit.to(torch.int16))


def _check(found: Sequence[TensorDiff], expected: Sequence[TensorDiff], way: str) -> None:
    is_right = len(found) == len(expected) and all(
        a.spec == b.spec
        and np.array_equal(a.positions, b.positions)
        and np.array_equal(a.old, b.old)
        and np.array_equal(a.new, b.new)
        and (a.old_digest, a.new_digest) == (b.old_digest, b.new_digest)
        for a, b in zip(found, expected, strict=True)
    )
    if not is_right:
        raise SystemExit(f"wrong bits by {way}")


def _timed(device: torch.device, work: Callable[[], list[TensorDiff]]) -> tuple[float, int, list[TensorDiff]]:
    _synchronize(device)
    before = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    started = time.perf_counter()
    found = work()
    _synchronize(device)
    seconds = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
    return seconds, peak, found


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
