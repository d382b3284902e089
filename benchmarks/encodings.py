# SPDX-License-Identifier: Apache-2.0
"""Bytes and speed of the encodings, beside what others send: ``python -m benchmarks.encodings``.

On deltas recorded from real training in this run (`recorded`), and on weights moved along a real update direction to
densities from 0.1 to 30 %. Everything that is decoded is compared bit for bit. Speed is CPU time of one thread, and
wall time where two threads are compared with one, as ratios to a copy of the model's bytes taken beside each
repetition. Progress goes to stderr, the result to stdout as one JSON object, and tables to docs/performance.md.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from benchmarks.measure import peak, reset_peak
from benchmarks.peers import PEERS, Payload
from benchmarks.recorded import Weights, moved_to_density, record
from benchmarks.report import machine, progress, update_coefficients, write_section
from examples.grpo_arithmetic.model import prepare_base
from examples.grpo_arithmetic.settings import read_settings
from trainer_hooks.diff import pieces
from trainer_hooks.differ import diff_pieces
from trainer_hooks.kernel import _load_kernel, load_kernel
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.format.blocks import EncodedBlock, Placed, decode_parts, encode_block, group_blocks
from vllm_delta_snapshot.format.choose import choose
from vllm_delta_snapshot.ordered import ordered_map, thread_pool
from vllm_delta_snapshot.stage.merge import merge
from vllm_delta_snapshot.types import Change, TensorDifference, TensorSpec

LEARNING_RATES = {1e-6: 1, 1e-5: 6}
"""By learning rate, how many steps are recorded."""
DENSITIES = [0.001, 0.01, 0.1]
REPETITIONS = 3
Specs = Mapping[str, TensorSpec]

RL, SPARSE = (0.01, 0.02), (0.0, 0.005)
"""Densities of recorded steps that stand for reinforcement learning, and for a sparser one."""


def main() -> int:
    """Measure, print, and write the tables."""
    base = prepare_base(read_settings())
    specs = Checkpoint(base).specs
    recorded: list[dict[str, Any]] = []
    merged: dict[str, float] = {}
    for learning_rate, steps in LEARNING_RATES.items():
        chain = []
        for number, (before, after) in enumerate(record(base, learning_rate, steps)):
            is_measured = number < 3
            row = measure(specs, before, after, is_timed=number == 0) if is_measured else {}
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


def changes(specs: Specs, before: Weights, after: Weights, policy: str) -> Iterator[Change]:
    """Diff two states, and yield what changed in the form that the policy chooses."""
    yield from (placed.change for placed in _placed(specs, before, after, policy))


def encode(
    specs: Specs,
    before: Weights,
    after: Weights,
    policy: str,
    pool: ThreadPoolExecutor | None = None,
    *,
    is_digested: bool = False,
) -> list[EncodedBlock]:
    """Diff and encode as `publish` does; with the digests of old and new values if wanted."""
    blocks = group_blocks(_placed(specs, before, after, policy, pool, is_digested=is_digested))
    return [block for encoded in ordered_map(encode_block, blocks, pool) for block in encoded]


def apply(blocks: Sequence[EncodedBlock], weights: Weights) -> None:
    """Decode blocks and write them into weights."""
    for block in blocks:
        for change in decode_parts(block.encoding, block.stated, block.parts):
            target = weights[change.spec.name]
            if isinstance(change, TensorDifference):
                target[change.positions] += change.values
            else:
                target[change.positions] = change.values


def measure(specs: Specs, before: Weights, after: Weights, *, is_timed: bool) -> dict[str, Any]:
    """Measure one pair of states: bytes of every encoding and peer and, if wanted, their time."""
    elements = sum(bits.size for bits in before.values())
    changed = sum(int(np.count_nonzero(before[name] != after[name])) for name in before)
    row: dict[str, Any] = {"density": changed / elements, "bytes": {}, "encode_x": {}, "apply_x": {}, "peak": {}}
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


def measure_merge(chain: list[list[Change]]) -> dict[str, float]:
    """Measure what recorded versions come to when they are merged, and how long that takes."""
    singles = sum(_encoded_bytes(step) for step in chain)
    started = time.process_time()
    merged = list(merge(chain))
    seconds = time.process_time() - started
    return {
        f"merged_ratio_{len(chain)}": round(_encoded_bytes(merged) / singles, 3),
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
        "two_thread_speedup": median(rl, "encode_x", "two threads"),
        "decode_apply_x_memcpy": median(rl, "apply_x", "difference"),
    }


def _placed(
    specs: Specs,
    before: Weights,
    after: Weights,
    policy: str,
    pool: ThreadPoolExecutor | None = None,
    *,
    is_digested: bool = False,
) -> Iterator[Placed]:
    work = (
        piece
        for name, spec in specs.items()
        for piece in pieces(
            spec, before[name], torch.from_numpy(after[name].view(np.int16)).view(torch.bfloat16).view(spec.shape)
        )
    )
    for place, diff in enumerate(diff_pieces(work, pool, is_digested=is_digested)):
        chosen = choose(policy, diff.spec, diff.positions, diff.old, diff.new)
        yield Placed(place, chosen.change, chosen.encoding)


def _time_all(specs: Specs, before: Weights, after: Weights, row: dict[str, Any]) -> None:
    target = {name: np.empty_like(bits) for name, bits in before.items()}

    def memcpy() -> None:
        for name, bits in after.items():
            np.copyto(target[name], bits)

    memcpy()
    for name, kernel in (("numpy", "0"), ("kernel", "1")):
        os.environ["DELTA_SNAPSHOT_KERNEL"] = kernel
        _load_kernel.cache_clear()
        if kernel == "1" and load_kernel() is None:
            continue
        encode(specs, before, after, "auto", is_digested=True)  # compiles
        row["encode_x"][name] = _ratio(lambda: encode(specs, before, after, "auto"), memcpy)
        row["encode_x"][f"{name}, digests"] = _ratio(
            lambda: encode(specs, before, after, "auto", is_digested=True), memcpy
        )
    os.environ["DELTA_SNAPSHOT_KERNEL"] = "0"
    _load_kernel.cache_clear()
    with thread_pool(2) as pool:
        row["encode_x"]["two threads"] = _ratio(
            lambda: encode(specs, before, after, "auto"),
            lambda: encode(specs, before, after, "auto", pool),
            clock=time.perf_counter,
        )
    model_bytes = sum(bits.nbytes for bits in after.values())
    row["peak"]["auto"] = round(_peak_extra(lambda: encode(specs, before, after, "auto")) / model_bytes, 3)
    for policy in ("difference", "packed", "raw", "auto"):
        blocks = encode(specs, before, after, policy)
        row["apply_x"][policy] = _ratio(lambda blocks=blocks: apply(blocks, target), memcpy)
    for peer in PEERS:
        row["encode_x"][peer.name] = _ratio(lambda peer=peer: peer.encode(before, after), memcpy)
        row["peak"][peer.name] = round(_peak_extra(lambda peer=peer: peer.encode(before, after)) / model_bytes, 3)
        payload = peer.encode(before, after)
        row["apply_x"][peer.name] = _ratio(lambda p=payload, peer=peer: peer.apply(p, target), memcpy)


def _ratio(
    work: Callable[[], object], against: Callable[[], object], clock: Callable[[], float] = time.process_time
) -> float:
    """Return the median of the ratios of two works, done in turn."""
    ratios = []
    for _ in range(REPETITIONS):
        started = clock()
        work()
        middle = clock()
        against()
        ratios.append((middle - started) / max(1e-9, clock() - middle))
    return round(statistics.median(ratios), 3)


def _peak_extra(work: Callable[[], object]) -> int:
    """Return by how many bytes the process grows at most while it works."""
    ctypes.CDLL(None).malloc_trim(0)
    before = reset_peak()
    result = work()
    most = peak() - before
    del result
    return most


def _check(before: Weights, after: Weights, apply_to: Callable[[Weights], None], what: str) -> None:
    weights = {name: bits.copy() for name, bits in before.items()}
    apply_to(weights)
    wrong = [name for name in after if not np.array_equal(weights[name], after[name])]
    if wrong:
        raise AssertionError(f"{what}: {wrong[0]} came out wrong")


def _encoded_bytes(step: Sequence[Change]) -> int:
    placed = (
        Placed(place, change, "difference" if isinstance(change, TensorDifference) else "packed")
        for place, change in enumerate(step)
    )
    return sum(encoded.num_bytes for block in group_blocks(placed) for encoded in encode_block(block))


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
        " sends by default. *order-0 bound* is what no coder of independent positions and differences can beat. The others are re-implementations (`benchmarks/peers.py`) of what their projects send.",
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
