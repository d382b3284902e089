# SPDX-License-Identifier: Apache-2.0
"""How cost grows with the model and with the density: ``python -m benchmarks.scale``.

Random bf16 weights in tensors of 16 Mi elements, changed at random positions by small steps, as training does; from
0.1 to 4 GB of model at one density, and from nothing to 10 % at one size. Diff and encode, decode and apply, as ratios
to a copy of the model's bytes taken beside each repetition. Progress goes to stderr, the result to stdout as one JSON
object, a table to docs/performance.md.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.codec import Specs, apply, copier, encode, kernel_set, peak_extra, ratio
from benchmarks.recorded import Weights
from benchmarks.report import machine, progress, write_section
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.types import TensorSpec
from vllm_delta_snapshot.util.ordered import thread_pool

SIZES_GB, AT_DENSITY = (0.1, 0.4, 1.0, 2.0, 4.0), 0.01
DENSITIES, AT_GB = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1), 1.0
TENSOR_SHAPE = (4096, 4096)
REPETITIONS = 5


def main() -> int:
    """Measure, print, and write the table."""
    points = [(gb, AT_DENSITY) for gb in SIZES_GB]
    points += [(AT_GB, density) for density in DENSITIES if density != AT_DENSITY]
    rows = [_measure(gb, density) for gb, density in points]
    result: dict[str, Any] = {"rows": rows, "repetitions": REPETITIONS}
    result |= {"encode_growth_4gb": _growth(rows, "numpy"), "encode_fast_growth_4gb": _growth(rows, "kernel")}
    result["apply_growth_4gb"] = _growth(rows, "apply")
    _write_report(result)
    print(json.dumps(result))
    return 0


def _growth(rows: list[dict[str, Any]], figure: str) -> float | None:
    """Return a figure of the largest model over that of the smallest, both in copies of their own size."""
    of_size = [row[figure] for row in rows if row["density_wanted"] == AT_DENSITY]
    return round(of_size[-1] / of_size[0], 2) if None not in of_size else None


def _measure(gb: float, density: float) -> dict[str, Any]:
    progress(f"{gb} GB, density {density:g}")
    specs, before, after = _states(gb, density)
    target = {name: bits.copy() for name, bits in before.items()}
    blocks = encode(specs, before, after, "auto")
    apply(blocks, target)
    if not all(np.array_equal(target[name], bits) for name, bits in after.items()):
        raise AssertionError("weights came out wrong")
    changed = sum(int(np.count_nonzero(before[name] != bits)) for name, bits in after.items())
    memcpy = copier(after, target)
    model_bytes = sum(bits.nbytes for bits in after.values())

    def ours(**options: Any) -> Callable[[], object]:
        return lambda: encode(specs, before, after, "auto", is_digested=True, **options)

    row: dict[str, Any] = {
        "gb": model_bytes / 1e9,
        "density_wanted": density,
        "density": changed / (model_bytes / 2),
        "bytes_per_change": round(sum(block.num_bytes for block in blocks) / changed, 3) if changed else None,
        "apply": ratio(lambda: apply(blocks, target), memcpy, REPETITIONS),
    }
    with thread_pool(2) as pool:
        for name, is_compiled in (("numpy", False), ("kernel", True)):
            with kernel_set(to=is_compiled) as can_be:
                if can_be:
                    ours()()  # compiles
                row[name] = ratio(ours(), memcpy, REPETITIONS) if can_be else None
                speedup = ratio(ours(), ours(pool=pool), REPETITIONS, time.perf_counter) if can_be else None
                row[f"{name}_threads"] = speedup
    with kernel_set(to=False):
        row["peak_mb"] = round(peak_extra(ours()) / 1e6)
    return row


def _states(gb: float, density: float) -> tuple[Specs, Weights, Weights]:
    rng = np.random.default_rng(0)
    elements = TENSOR_SHAPE[0] * TENSOR_SHAPE[1]
    specs, before, after = {}, {}, {}
    for number in range(max(1, round(gb * 1e9 / (2 * elements)))):
        name = f"layers.{number}.weight"
        specs[name] = TensorSpec(name, TENSOR_SHAPE, "BF16")
        before[name] = (rng.standard_normal(elements, np.float32) * 0.02).view(np.uint32) >> np.uint32(16)
        before[name] = before[name].astype(np.uint16)
        after[name] = _moved(before[name], density, rng)
    return specs, before, after


def _moved(bits: Bits, density: float, rng: np.random.Generator) -> Bits:
    """Return bits changed at random positions: by one unit in the last place, one in ten by up to eight."""
    moved = bits.copy()
    if not density:
        return moved
    gaps = rng.geometric(density, size=int(1.2 * bits.size * density) + 100)
    chosen = np.cumsum(gaps) - 1
    chosen = chosen[chosen < bits.size]
    moves = np.where(rng.random(chosen.size) < 0.5, 1, -1).astype(np.int16)
    rare = rng.random(chosen.size) < 0.1
    moves[rare] *= rng.integers(2, 9, int(rare.sum()), dtype=np.int16)
    moved[chosen] += moves.view(np.uint16)
    return moved


def _write_report(result: dict[str, Any]) -> None:
    heads = ["model, GB", "density", "bytes a change", "diff + encode, numpy", "two threads", "kernel", "two threads"]
    heads += ["decode + apply", "memory, MB"]
    keys = ("numpy", "numpy_threads", "kernel", "kernel_threads", "apply", "peak_mb")
    write_section(
        "scale",
        "How cost grows",
        f"`make bench-scale`. Random bf16 weights in tensors of 16 Mi elements, changed at random positions by small"
        f" steps, in memory; {machine()}. Medians of {result['repetitions']} repetitions. Diff and encode (digests"
        " included) and decode and apply are CPU time of one thread in copies of the model's bytes, *two threads* is one"
        " thread's wall time over two's, *memory* what a publication's diff and encode need beyond the weights and the"
        " baseline, result included.",
        heads,
        [
            [f"{row['gb']:.2f}", f"{100 * row['density']:.2f} %", row["bytes_per_change"] or "-"]
            + ["-" if row[key] is None else row[key] for key in keys]
            for row in result["rows"]
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
