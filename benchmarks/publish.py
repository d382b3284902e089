# SPDX-License-Identifier: Apache-2.0
"""What publishing costs the trainer, beside what it is compared with: ``python -m benchmarks.publish``.

In one process, alternating, on one random Llama in bf16: a copy of the model's bytes in memory, how long asynchronous
`publish` blocks and when its version is committed, the blocking `publish`, and `save_pretrained` of the whole model. All
that is written is synced to disk. Memory is measured in a fresh process. Medians of the repetitions with their smallest
and largest. Progress goes to stderr, the result to stdout as one JSON object, and a table to docs/performance.md.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.measure import peak, reset_peak, spread, timed
from benchmarks.report import machine, progress, write_section
from trainer_hooks import DeltaPublisher
from trainer_hooks.compare.kernel import load_kernel
from vllm_delta_snapshot.checkpoint import Checkpoint

SHAPE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 6, "vocab_size": 8192}
HEADS = {"num_attention_heads": 12, "num_key_value_heads": 12, "tie_word_embeddings": False}
DENSITIES = (0.001, 0.01, 0.1)
AT_DENSITY = 0.01
REPETITIONS = 5
TIMES = ("memcpy", "blocked", "committed", "sync", "save_pretrained")
PROOFS = ("unchanged", "skip_frozen", "audit", "audit_every=10", "audit_every=1")


def main() -> int:
    """Measure, print, and write the table."""
    torch.manual_seed(0)
    disable_progress_bar()
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, **HEADS)).bfloat16()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        base = folder / "base"
        model.save_pretrained(base)
        rows = {density: _measure(model, base, folder / f"{density:g}", density) for density in DENSITIES}
        proofs = _prove(model, base, folder)
    at = rows[AT_DENSITY]
    result = {
        "blocking_async_vs_sync": at["blocked_vs_sync"][0],
        "peak_extra_bytes_per_rank_byte": at["peak_async"],
        "vs_save_pretrained": at["blocked_vs_save"][0],
        "at_density": AT_DENSITY,
        "model_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "repetitions": REPETITIONS,
        "by_density": {f"{density:g}": row for density, row in rows.items()},
        "proofs": proofs,
    }
    _write_report(result)
    print(json.dumps(result))
    return 0


def _measure(model: LlamaForCausalLM, base: Path, folder: Path, density: float) -> dict[str, Any]:
    weights = [parameter.data for parameter in model.parameters()]
    target = [torch.empty_like(tensor) for tensor in weights]
    behind = DeltaPublisher(model, sync_dir=str(folder / "async"), base=base)
    blocking = DeltaPublisher(model, sync_dir=str(folder / "sync"), base=base, asynchronous=False)
    times: dict[str, list[float]] = {name: [] for name in TIMES}
    bytes_per_change: list[float] = []
    for repetition in range(-1, REPETITIONS):
        progress(f"density {density:g}: {repetition + 1}/{REPETITIONS}")
        _change(weights, density, repetition + 1)
        found = {"memcpy": timed(lambda: [to.copy_(tensor) for to, tensor in zip(target, weights, strict=True)])}
        started = time.perf_counter()
        publication = behind.publish()
        found["blocked"] = time.perf_counter() - started
        report = publication.wait()
        found["committed"] = time.perf_counter() - started
        found["sync"] = timed(blocking.publish)
        found["save_pretrained"] = timed(lambda: _save_durably(model, folder / "full"))
        if repetition < 0:
            continue  # a first one, in which pages are touched and libraries loaded
        bytes_per_change.append(report.payload_bytes / report.changed_elements)
        for name, seconds in found.items():
            times[name].append(seconds)
    return {
        "bytes_per_change": round(statistics.median(bytes_per_change), 3),
        "blocked_vs_sync": _ratio(times["blocked"], times["sync"]),
        "blocked_vs_save": _ratio(times["blocked"], times["save_pretrained"]),
        "blocked_x_memcpy": _ratio(times["blocked"], times["memcpy"]),
        "peak_async": _in_fresh_process(_peak, base, folder / "peak-async", density, True),
        "peak_sync": _in_fresh_process(_peak, base, folder / "peak-sync", density, False),
        "seconds": {name: spread(values) for name, values in times.items()},
    }


def _prove(model: LlamaForCausalLM, base: Path, folder: Path) -> dict[str, list[float]]:
    """Time what comparing a frozen model costs, what skipping it saves, and what audits take, beside a memory copy."""
    weights = [parameter.data for parameter in model.requires_grad_(False).parameters()]
    target = [torch.empty_like(tensor) for tensor in weights]
    publishers = {
        name: DeltaPublisher(model, sync_dir=str(folder / name), base=base, **options)
        for name, options in (
            ("unchanged", {}),
            ("skip_frozen", {"skip_frozen": True}),
            ("audit_every=10", {"audit_every": 10}),
            ("audit_every=1", {"audit_every": 1}),
        )
    }
    times: dict[str, list[float]] = {name: [] for name in ("memcpy", *PROOFS)}
    for repetition in range(-1, REPETITIONS):
        progress(f"proofs: {repetition + 1}/{REPETITIONS}")
        found = {"memcpy": timed(lambda: [to.copy_(tensor) for to, tensor in zip(target, weights, strict=True)])}
        for name, publisher in publishers.items():
            started = time.perf_counter()
            publication = publisher.publish()
            found[name] = time.perf_counter() - started
            publication.wait()
        found["audit"] = timed(publishers["unchanged"].audit)
        for name, seconds in found.items() if repetition >= 0 else ():
            times[name].append(seconds)
    model.requires_grad_()
    return {name: spread(values) for name, values in times.items()}


def _peak(base: Path, sync_dir: Path, density: float, asynchronous: bool) -> float:
    """Return the most memory that a publisher took while publishing, baseline and all, in bytes a byte of weights."""
    weights = {name: tensor.clone() for name, tensor in load_file(base / "model.safetensors").items()}
    # The compiler (numba's LLVM, 80 MB) is loaded once, whatever the model's size: not of the weights.
    if (kernel := load_kernel()) is not None:
        kernel.warm_up(Checkpoint(base).specs.values())
    gc.collect()
    before = reset_peak()
    publisher = DeltaPublisher(weights, sync_dir=str(sync_dir), base=base, asynchronous=asynchronous)
    gc.collect()
    reset_peak()  # opening reads the base through a mapping, whose pages are no memory of ours
    for repetition in range(2):
        _change(weights.values(), density, repetition)
        publisher.publish().wait()
    return round((peak() - before) / sum(tensor.nbytes for tensor in weights.values()), 3)


def _in_fresh_process(function: Callable[..., float], *args: object) -> float:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def _change(weights: Iterable[torch.Tensor], density: float, seed: int) -> None:
    """Move about `density` of the elements by one unit in the last place, as a small learning rate does."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in weights:
        count = max(1, int(tensor.numel() * density))
        chosen = torch.randint(tensor.numel(), (count,), generator=generator)
        signs = 2 * torch.randint(2, (count,), generator=generator, dtype=torch.int16) - 1
        tensor.view(torch.int16).view(-1)[chosen] += signs


def _save_durably(model: LlamaForCausalLM, folder: Path) -> None:
    model.save_pretrained(folder)
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _ratio(ours: list[float], theirs: list[float]) -> list[float]:
    """Return median, smallest and largest of the ratios of each repetition."""
    return [round(value, 3) for value in spread([a / b for a, b in zip(ours, theirs, strict=True)])]


def _write_report(result: dict[str, Any]) -> None:
    rows = []
    for density, row in result["by_density"].items():
        ratios = [
            "{} ({}-{})".format(*row[name]) for name in ("blocked_vs_sync", "blocked_vs_save", "blocked_x_memcpy")
        ]
        spreads = ["{:.3f} ({:.3f}-{:.3f})".format(*row["seconds"][name]) for name in TIMES]
        peaks = [row["peak_async"], row["peak_sync"]]
        rows.append([f"{100 * float(density):g} %", row["bytes_per_change"], *ratios, *peaks, *spreads])
    heads = ["changed", "bytes per change", "blocked / sync", "blocked / save_pretrained", "blocked / memcpy"]
    heads += ["memory, async", "memory, sync", *(f"{name} s" for name in TIMES)]
    method = (
        f"`make bench-publish`. A random Llama in bf16 ({result['model_bytes'] / 1e6:.0f} MB), changed by one unit in the last"
        f" place at random positions of every tensor; {machine()}. *blocked* is how long asynchronous `publish` holds up the"
        " training step, *committed* is when its version is durable and visible, *sync* is `publish` with"
        " `asynchronous=False`, *save_pretrained* writes and syncs the whole model, *memcpy* copies its bytes in memory."
        f" Medians of {REPETITIONS} alternating repetitions, smallest and largest in brackets; ratios are those of each"
        " repetition. *memory* is what a publisher takes while it publishes, its baseline included, in bytes a byte of"
        " weights, in a process of its own that has loaded the compiler of the diff before (80 MB, whatever the model)."
    )
    write_section("publish", "What publishing costs the trainer", method, heads, rows)
    proofs = [["{:.3f} ({:.3f}-{:.3f})".format(*result["proofs"][name]) for name in ("memcpy", *PROOFS)]]
    method = (
        f"`make bench-publish`. The same model ({result['model_bytes'] / 1e6:.0f} MB), frozen and unchanged; {machine()}."
        " How long `publish` blocks when it compares everything and finds nothing (*unchanged*), and with `skip_frozen=True`;"
        " how long `audit()` takes; and how long `publish` blocks when it audits a tenth of the weights, or all, beside."
        f" Seconds; medians of {REPETITIONS} repetitions, smallest and largest in brackets."
    )
    write_section("proofs", "What comparing and proving everything costs", method, ["memcpy s", *PROOFS], proofs)


if __name__ == "__main__":
    sys.exit(main())
