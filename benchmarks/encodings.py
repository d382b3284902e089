# SPDX-License-Identifier: Apache-2.0
"""Bytes and speed of the encodings, beside what others send: ``python -m benchmarks.encodings``.

On deltas recorded from real training in this run (`recorded`), and on weights moved along a real update direction to
densities from 0.1 to 30 %. Everything that is decoded is compared bit for bit. Speed is CPU time of one thread, and
wall time where two threads are compared with one, as ratios to a copy of the model's bytes taken beside each
repetition. Progress goes to stderr, the result to stdout as one JSON object, and tables to docs/performance.md.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.codec import Specs, apply, changes, copier, encode, kernel_set, peak_extra, ratio, two_processes
from benchmarks.peers import PEERS, Payload
from benchmarks.recorded import Weights, moved_to_density, record
from benchmarks.report import machine, progress, update_coefficients, write_section
from examples.grpo_arithmetic.model import prepare_base
from examples.grpo_arithmetic.settings import read_settings
from vllm_delta_snapshot.changes.merge import merge
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.format.blocks import Placed, encode_block, group_blocks
from vllm_delta_snapshot.types import Change, TensorDifference
from vllm_delta_snapshot.util.ordered import thread_pool

LEARNING_RATES = {1e-6: 2, 1e-5: 3, 3e-6: 20}
"""By learning rate, how many steps are recorded; of the last one the whole chain is merged."""
TIMED = (0, 2)
"""Which of the recorded steps are timed: the first one changes more than those that follow."""
DENSITIES = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3]
REPETITIONS = 3

RL, SPARSE = (0.01, 0.02), (0.0, 0.005)
"""Densities of recorded steps that stand for reinforcement learning, and for a sparser one."""


def main() -> int:
    """Measure, print, and write the tables."""
    base = prepare_base(read_settings())
    specs = Checkpoint(base).specs
    recorded: list[dict[str, Any]] = []
    merged: dict[str, float | int] = {}
    for learning_rate, steps in LEARNING_RATES.items():
        chain = []
        for number, (before, after) in enumerate(record(base, learning_rate, steps)):
            is_measured = number < 3
            row = measure(specs, before, after, is_timed=number in TIMED) if is_measured else {}
            if is_measured:
                recorded.append({"learning_rate": learning_rate} | row)
            chain.append(list(changes(specs, before, after, "auto")))
        merged = measure_merge(chain)
    constructed = []
    for density, before, after in moved_to_density(base, DENSITIES):
        progress(f"density {density:g}")
        constructed.append({"wanted": density} | measure(specs, before, after, is_timed=True))
    result = figures(recorded, constructed) | merged
    result |= {"recorded": recorded, "constructed": constructed, "repetitions": REPETITIONS}
    write_report(result, specs)
    _write_coefficients(recorded + constructed)
    print(json.dumps(result))
    return 0


def _write_coefficients(rows: Sequence[dict[str, Any]]) -> None:
    """Tell the planner how many bytes a change takes at which density."""
    table = sorted((row["density"], row["bytes"]["auto"]) for row in rows)
    update_coefficients(bytes_per_change=[[round(density, 6), round(size, 4)] for density, size in table])


def measure(specs: Specs, before: Weights, after: Weights, *, is_timed: bool) -> dict[str, Any]:
    """Measure one pair of states: bytes of every encoding and peer and, if wanted, their time."""
    elements = sum(bits.size for bits in before.values())
    changed = sum(int(np.count_nonzero(before[name] != after[name])) for name in before)
    row: dict[str, Any] = {"density": changed / elements, "bytes": {}, "encode_x": {}, "apply_x": {}}
    row |= {"threads_x": {}, "peak": {}}
    for policy in ("auto", "absolute", "raw", "difference", "packed", "bitmap_difference"):
        blocks = encode(specs, before, after, policy)
        row["bytes"][policy] = sum(block.num_bytes for block in blocks) / changed
        _check(before, after, lambda weights, blocks=blocks: apply(blocks, weights), policy)
    for peer in PEERS:
        payload = peer.encode(before, after)
        row["bytes"][peer.name] = _size(payload) / changed
        _check(before, after, lambda weights, p=payload, peer=peer: peer.apply(p, weights), peer.name)
    row["bytes"]["order-0 bound"] = _bound(before, after)
    if is_timed:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # for those of the peers that use torch
        _time_all(specs, before, after, row)
        torch.set_num_threads(threads)
    return row


def _bound(before: Weights, after: Weights) -> float:
    """Return bytes a change that no order-0 coder of positions (by each tensor's density) and differences can beat."""
    position_bits, moves = 0.0, []
    for name, old in before.items():
        moved = after[name] - old
        found = moved[moved != 0]
        density = found.size / max(1, moved.size)
        if 0 < density < 1:
            position_bits -= moved.size * (density * np.log2(density) + (1 - density) * np.log2(1 - density))
        moves.append(found)
    differences = np.concatenate(moves)
    shares = np.unique(differences, return_counts=True)[1] / differences.size
    return float(position_bits / differences.size - np.sum(shares * np.log2(shares))) / 8


def measure_merge(chain: list[list[Change]]) -> dict[str, float | int]:
    """Measure what recorded versions come to when they are merged, and how long that takes."""
    singles = sum(_encoded_bytes(step) for step in chain)
    started = time.process_time()
    merged = list(merge(chain))
    seconds = time.process_time() - started
    return {
        "merged_steps": len(chain),
        "merged_ratio": round(_encoded_bytes(merged) / singles, 3),
        "merge_s": round(seconds, 3),
        "merged_changes": sum(change.changed for change in merged),
        "sum_of_changes": sum(change.changed for step in chain for change in step),
    }


def figures(recorded: list[dict[str, Any]], constructed: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures that are promised, from recorded steps in the right range of density."""

    def median(rows: Sequence[dict[str, Any]], kind: str, name: str) -> float | None:
        values = [row[kind][name] for row in rows if name in row[kind]]
        return round(statistics.median(values), 3) if values else None

    rl = [row for row in recorded if RL[0] <= row["density"] <= RL[1]]
    sparse = [row for row in recorded if SPARSE[0] <= row["density"] < SPARSE[1]]
    return {
        "bytes_per_change": {
            "difference_rl": median(rl, "bytes", "difference"),
            "difference_sparse": median(sparse, "bytes", "difference"),
            "packed_rl": median(rl, "bytes", "packed"),
            "raw": median(rl, "bytes", "raw"),
            "xor_zstd": median(rl, "bytes", "XOR + zstd (SkyRL)"),
            "gaps_xor_zstd": median(rl, "bytes", "gaps + XOR + zstd (NeMo RL)"),
            "bound_rl": median(rl, "bytes", "order-0 bound"),
            "bound_sparse": median(sparse, "bytes", "order-0 bound"),
        },
        "rl_density": [round(row["density"], 5) for row in rl],
        "sparse_density": [round(row["density"], 5) for row in sparse],
        "encode_x_memcpy": median(rl, "encode_x", "numpy"),
        "encode_fast_x_memcpy": median(rl, "encode_x", "kernel"),
        "encode_with_digests_x_memcpy": median(rl, "encode_x", "numpy, digests"),
        "encode_fast_with_digests_x_memcpy": median(rl, "encode_x", "kernel, digests"),
        "two_thread_speedup": median(rl, "threads_x", "numpy, threads"),
        "two_thread_speedup_fast": median(rl, "threads_x", "kernel, threads"),
        "two_process_speedup": median(rl, "threads_x", "numpy, processes"),
        "two_process_speedup_fast": median(rl, "threads_x", "kernel, processes"),
        "decode_apply_x_memcpy": median(rl, "apply_x", "difference"),
    }


def _time_all(specs: Specs, before: Weights, after: Weights, row: dict[str, Any]) -> None:
    target = {name: np.empty_like(bits) for name, bits in before.items()}
    memcpy = copier(after, target)

    def ours(**options: Any) -> Callable[[], object]:
        return lambda: encode(specs, before, after, "auto", **options)

    with thread_pool(2) as pool:
        for name, is_compiled in (("numpy", False), ("kernel", True)):
            with kernel_set(to=is_compiled) as can_be:
                if not can_be:
                    continue
                ours(is_digested=True)()  # compiles
                row["encode_x"][name] = ratio(ours(), memcpy, REPETITIONS)
                row["encode_x"][f"{name}, digests"] = ratio(ours(is_digested=True), memcpy, REPETITIONS)
                row["threads_x"][f"{name}, threads"] = ratio(ours(), ours(pool=pool), REPETITIONS, time.perf_counter)
                row["threads_x"][f"{name}, processes"] = two_processes(ours())
    row["threads_x"]["memcpy, processes"] = two_processes(memcpy)
    model_bytes = sum(bits.nbytes for bits in after.values())
    with kernel_set(to=False):
        row["peak"]["auto"] = round(peak_extra(ours()) / model_bytes, 3)
    for policy in ("difference", "packed", "raw", "auto"):
        blocks = encode(specs, before, after, policy)
        row["apply_x"][policy] = ratio(lambda blocks=blocks: apply(blocks, target), memcpy, REPETITIONS)
    for peer in PEERS:
        row["encode_x"][peer.name] = ratio(lambda peer=peer: peer.encode(before, after), memcpy, REPETITIONS)
        row["peak"][peer.name] = round(peak_extra(lambda peer=peer: peer.encode(before, after)) / model_bytes, 3)
        payload = peer.encode(before, after)
        row["apply_x"][peer.name] = ratio(lambda p=payload, peer=peer: peer.apply(p, target), memcpy, REPETITIONS)


def _check(before: Weights, after: Weights, apply_to: Callable[[Weights], None], what: str) -> None:
    weights = {name: bits.copy() for name, bits in before.items()}
    apply_to(weights)
    wrong = [name for name in after if not np.array_equal(weights[name], after[name])]
    if wrong:
        raise AssertionError(f"{what}: {wrong[0]} came out wrong")


def _encoded_bytes(step: Sequence[Change]) -> int:
    placed = (Placed(place, change, _encoding_of(change)) for place, change in enumerate(step))
    return sum(encoded.num_bytes for block in group_blocks(placed) for encoded in encode_block(block))


def _encoding_of(change: Change) -> str:
    if isinstance(change, TensorDifference):
        return "raw_difference" if change.is_mixed else "difference"
    return "packed"


def _size(payload: Payload) -> int:
    return sum(len(part) if isinstance(part, bytes) else part.nbytes for parts in payload.values() for part in parts)


def write_report(result: dict[str, Any], specs: Specs) -> None:
    """Write two tables: bytes, and speed."""
    elements = sum(spec.numel for spec in specs.values())
    rows = [(f"recorded, learning rate {row['learning_rate']:g}", row) for row in result["recorded"]]
    rows += [("constructed", row) for row in result["constructed"]]
    names = list(rows[0][1]["bytes"])
    write_section(
        "encodings",
        "Bytes per changed weight",
        f"`make bench-encodings`. SmolLM2-135M-Instruct ({elements / 1e6:.0f} M bf16 weights), GRPO on arithmetic with"
        f" AdamW on fp32 master weights, recorded in this run; below, weights moved along one real update direction until"
        f" a given share changes. {machine()}. Every row was decoded and compared bit for bit. `auto` is what `publish`"
        " sends by default. *order-0 bound* is what no coder of independent positions and differences can beat. The"
        " others are re-implementations (`benchmarks/peers.py`) of what their projects send."
        f" The {result['merged_steps']} steps of the last learning rate merged into one delta take"
        f" {result['merged_ratio']} of the bytes that they take one by one ({result['merged_changes'] / 1e6:.1f} M"
        f" changes of {result['sum_of_changes'] / 1e6:.1f} M), made in {result['merge_s']} s.",
        ["weights", "density", *names],
        [
            [what, f"{100 * row['density']:.3f} %", *(f"{row['bytes'][name]:.3f}" for name in names)]
            for what, row in rows
        ],
    )
    timed = [(what, row) for what, row in rows if row["encode_x"]]
    for kind, title, method in (
        (
            "encode_x",
            "Time to diff and encode, in copies of the model's bytes",
            "`digests` adds those of old and new values, which ours sends and no other has; `kernel` uses numba.",
        ),
        (
            "threads_x",
            "Two threads, and what two could reach",
            "Here wall time, of diff and encode: one thread's over two's; `processes`: what two get done over what one does.",
        ),
        ("apply_x", "Time to decode and apply, in copies of the model's bytes", "Into weights in memory."),
        (
            "peak",
            "Memory to diff and encode, as a share of the model's bytes",
            "Growth of the process while it works, result included, beyond the weights before and after.",
        ),
    ):
        names = list(timed[0][1][kind])
        write_section(
            f"encodings-{kind.replace('_', '-')}",
            title,
            f"The same run: CPU time of one thread, as a multiple of a copy of all weights taken beside each repetition;"
            f" medians of {result['repetitions']}. {method}",
            ["weights", "density", *names],
            [
                [what, f"{100 * row['density']:.3f} %", *(row[kind].get(name, "-") for name in names)]
                for what, row in timed
            ],
        )


if __name__ == "__main__":
    sys.exit(main())
