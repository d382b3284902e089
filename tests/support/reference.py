"""The state digest written down a second time, in plain Python integers."""

from __future__ import annotations

import xxhash

from vllm_delta_snapshot.types import TensorSpec

MASK = 2**64 - 1


def splitmix64_finalizer(x: int) -> int:
    """Return the finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def term(spec: TensorSpec, position: int, bits: int) -> int:
    """Return the term of one element."""
    shape = ",".join(str(size) for size in spec.shape)
    key = xxhash.xxh3_64_intdigest(f"{spec.name}\n{spec.dtype}\n{shape}".encode())
    place = (key + position * 0x9E3779B97F4A7C15) & MASK
    return splitmix64_finalizer(place ^ ((bits * 0xD6E8FEB86659FD93) & MASK))


def digest(spec: TensorSpec, positions: list[int], values: list[int]) -> int:
    """Return the sum of the terms of some elements."""
    return sum(term(spec, p, v) for p, v in zip(positions, values, strict=True)) & MASK
