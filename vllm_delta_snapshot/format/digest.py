# SPDX-License-Identifier: Apache-2.0
"""Digests: of files (xxh3-128) and of weights (a sum that a delta updates in O(changed)).

The state digest of a checkpoint is the sum, modulo 2**64, of one pseudo-random 64-bit term per element. A term
depends on the tensor (name, type, shape), the flat position and the bit pattern, so a missed, doubled, misplaced
or wrong update changes the sum and escapes with a chance near 2**-64. Because it is a sum, a delta moves it by
``sum(new terms) - sum(old terms)`` over the touched positions, shards add up, and order does not matter.

It finds accidents, not forgers: a sum of hashes can be steered on purpose (docs/format.md, "Trust").
The finalizer is that of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.types import Positions, TensorSpec

__all__ = [
    "STATE_DIGEST_ALGORITHM",
    "add_digests",
    "file_digest",
    "format_digest",
    "patch_digest",
    "seeded_digests",
    "slice_digest",
    "state_digest",
    "tensor_digest",
    "tensor_key",
    "term_seeds",
]

STATE_DIGEST_ALGORITHM: Final = "summix64"
"""Name of the algorithm in run.json; a change of any constant below needs a new name."""

_MASK: Final = (1 << 64) - 1
GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
VALUE: Final = np.uint64(0xD6E8FEB86659FD93)
MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
MIX_2: Final = np.uint64(0x94D049BB133111EB)
_CHUNK: Final = 1 << 16  # 2 buffers of 512 KiB stay in the second-level cache


def tensor_key(spec: TensorSpec) -> int:
    """Return the 64-bit key that ties terms to one tensor: xxh3-64 of name, type and shape."""
    text = f"{spec.name}\n{spec.dtype}\n{','.join(map(str, spec.shape))}"
    return xxhash.xxh3_64_intdigest(text.encode())


def tensor_digest(spec: TensorSpec, bits: Bits) -> int:
    """Return the digest of a whole tensor.

    Args:
        spec: the tensor.
        bits: all its elements, flat, shape ``(spec.numel,)``.
    """
    return _sum_terms(tensor_key(spec), None, bits)


def patch_digest(spec: TensorSpec, positions: Positions, values: Bits) -> int:
    """Return the digest of some elements of a tensor: the part they have in `tensor_digest`.

    Args:
        spec: the tensor.
        positions: flat positions, shape ``(k,)``.
        values: the bit patterns there, shape ``(k,)``.
    """
    return _sum_terms(tensor_key(spec), positions, values)


def slice_digest(spec: TensorSpec, start: int, bits: Bits) -> int:
    """Return the digest of consecutive elements of a tensor: the part they have in `tensor_digest`.

    Args:
        spec: the tensor.
        start: the position of the first.
        bits: the elements, shape ``(k,)``.
    """
    return _sum_terms((tensor_key(spec) + start * int(GOLDEN)) & _MASK, None, bits)


def term_seeds(spec: TensorSpec, positions: Positions) -> NDArray[np.uint64]:
    """Return the part of each element's term that does not depend on its value; see `seeded_digests`.

    Args:
        spec: the tensor.
        positions: flat positions, shape ``(k,)``.
    """
    seeds = positions.astype(np.uint64)
    seeds *= GOLDEN
    seeds += np.uint64(tensor_key(spec))
    return seeds


def seeded_digests(seeds: NDArray[np.uint64], bits: Bits, starts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the digests of runs of elements whose seeds are known: `patch_digest` of each, in one sweep.

    Args:
        seeds: from `term_seeds`, shape ``(k,)``.
        bits: the bit patterns, shape ``(k,)``.
        starts: where each run begins, increasing, the first at 0; none is empty.
    """
    sums = np.zeros(starts.size, np.uint64)
    a, b = np.empty(min(bits.size, _CHUNK), np.uint64), np.empty(min(bits.size, _CHUNK), np.uint64)
    for start in range(0, bits.size, _CHUNK):
        n = min(_CHUNK, bits.size - start)
        terms = a[:n]
        np.multiply(bits[start : start + n], VALUE, out=terms, dtype=np.uint64)
        terms ^= seeds[start : start + n]
        _finalize(terms, b[:n])
        first = int(np.searchsorted(starts, start, side="right")) - 1
        inner = starts[first + 1 : int(np.searchsorted(starts, start + n))] - start
        cuts = np.concatenate([np.zeros(1, np.int64), inner])
        sums[first : first + cuts.size] += np.add.reduceat(terms, cuts, dtype=np.uint64)
    return sums


def state_digest(tensors: Iterable[tuple[TensorSpec, Bits]], *, threads: int = 2) -> int:
    """Return the digest of a checkpoint: the sum over its tensors. Reads every byte once; numpy frees the GIL."""
    with ThreadPoolExecutor(max_workers=max(1, threads)) as pool:
        return add_digests(*pool.map(lambda item: tensor_digest(*item), tensors))


def add_digests(*digests: int) -> int:
    """Add digests modulo 2**64. Pass a negative number to take one away."""
    return sum(digests) & _MASK


def format_digest(digest: int) -> str:
    """Write a digest as metadata does: 16 hexadecimal digits."""
    return f"{digest & _MASK:016x}"


def file_digest(path: Path) -> str:
    """Return the xxh3-128 of a file, 32 hexadecimal digits.

    Raises:
        OSError: the file cannot be read.
    """
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _sum_terms(key: int, positions: Positions | None, bits: Bits) -> int:
    """Sum the terms of `bits` at `positions` (``None``: 0, 1, 2, ...) in cache-sized chunks."""
    total = 0
    size = min(bits.size, _CHUNK)
    x, y = np.empty(size, np.uint64), np.empty(size, np.uint64)
    ramp = np.arange(size, dtype=np.uint64) * GOLDEN
    for start in range(0, bits.size, _CHUNK):
        n = min(_CHUNK, bits.size - start)
        a, b = x[:n], y[:n]
        if positions is None:
            np.add(ramp[:n], np.uint64((key + start * int(GOLDEN)) & _MASK), out=a)
        else:
            a[...] = positions[start : start + n]
            a *= GOLDEN
            a += np.uint64(key)
        np.multiply(bits[start : start + n], VALUE, out=b, dtype=np.uint64)
        a ^= b
        _finalize(a, b)
        total += int(a.sum(dtype=np.uint64))
    return total & _MASK


def _finalize(a: NDArray[np.uint64], scratch: NDArray[np.uint64]) -> None:
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        np.right_shift(a, np.uint64(shift), out=scratch)
        a ^= scratch
        a *= factor
    np.right_shift(a, np.uint64(31), out=scratch)
    a ^= scratch
