# SPDX-License-Identifier: Apache-2.0
"""Our way from two states to bytes and back, and its speed beside a copy: what several benchmarks measure."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from benchmarks.measure import peak, reset_peak
from benchmarks.recorded import Weights
from trainer_hooks.compare.diff import pieces
from trainer_hooks.compare.differ import diff_pieces
from trainer_hooks.compare.kernel import _load_kernel, load_kernel
from vllm_delta_snapshot.format.blocks import EncodedBlock, Placed, decode_parts, encode_block, group_blocks
from vllm_delta_snapshot.format.choose import choose
from vllm_delta_snapshot.types import Change, TensorDifference, TensorSpec
from vllm_delta_snapshot.util.ordered import ordered_map

__all__ = ["Specs", "apply", "changes", "copier", "encode", "kernel_set", "peak_extra", "ratio", "two_processes"]

Specs = Mapping[str, TensorSpec]


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


@contextlib.contextmanager
def kernel_set(*, to: bool) -> Iterator[bool]:
    """Have the diff use the compiled kernel or not; says whether it can be done."""
    before = os.environ.get("DELTA_SNAPSHOT_KERNEL")
    os.environ["DELTA_SNAPSHOT_KERNEL"] = "1" if to else "0"
    _load_kernel.cache_clear()
    yield not to or load_kernel() is not None
    os.environ.pop("DELTA_SNAPSHOT_KERNEL")
    if before is not None:
        os.environ["DELTA_SNAPSHOT_KERNEL"] = before
    _load_kernel.cache_clear()


def copier(source: Weights, target: Weights) -> Callable[[], None]:
    """Return the yardstick: a copy of all weights, into memory that has been touched."""

    def copy() -> None:
        for name, bits in source.items():
            np.copyto(target[name], bits)

    copy()
    return copy


def two_processes(work: Callable[[], object], *, rounds: int = 3) -> float:
    """Return how much more two processes get done than one: what two threads could reach on this machine at most."""
    context = multiprocessing.get_context("fork")

    def run(barrier: Any, answers: Any) -> None:
        work()
        barrier.wait()
        started = time.perf_counter()
        for _ in range(rounds):
            work()
        answers.put(time.perf_counter() - started)

    def slowest(processes: int) -> float:
        barrier, answers = context.Barrier(processes), context.Queue()
        started = [context.Process(target=run, args=(barrier, answers)) for _ in range(processes)]
        for process in started:
            process.start()
        seconds = max(float(answers.get()) for _ in started)
        for process in started:
            process.join()
        return seconds

    return round(2 * slowest(1) / slowest(2), 3)


def ratio(
    work: Callable[[], object],
    against: Callable[[], object],
    repetitions: int,
    clock: Callable[[], float] = time.process_time,
) -> float:
    """Return the median of the ratios of two works, done in turn."""
    ratios = []
    for _ in range(repetitions):
        started = clock()
        work()
        middle = clock()
        against()
        ratios.append((middle - started) / max(1e-9, clock() - middle))
    return round(statistics.median(ratios), 3)


def peak_extra(work: Callable[[], object]) -> int:
    """Return by how many bytes the process grows at most while it works."""
    ctypes.CDLL(None).malloc_trim(0)
    before = reset_peak()
    result = work()
    most = peak() - before
    del result
    return most


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
