"""Tensors as bits: at random, with every special pattern, to and from torch, and patched by hand."""

from __future__ import annotations

import zlib

import numpy as np
import torch

from vllm_delta_snapshot.dtypes import ALL_CODES, Bits, dtype_of
from vllm_delta_snapshot.types import Change, TensorDifference, TensorPatch, TensorSpec, position_dtype

TORCH_CODES = tuple(code for code in ALL_CODES if hasattr(torch, dtype_of(code).torch_name))
"""Codes that this torch knows."""

_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def rng_of(*parts: object) -> np.random.Generator:
    """Return a generator that depends on nothing but its arguments."""
    return np.random.default_rng(zlib.crc32(repr(parts).encode()))


def random_bits(code: str, count: int, *seed: object) -> Bits:
    """Return any bit patterns at all, NaNs and infinities among them; only 0 and 1 for BOOL."""
    if code == "BOOL":
        return rng_of(code, count, *seed).integers(0, 2, count, dtype=np.uint8)
    element = dtype_of(code)
    return np.frombuffer(rng_of(code, count, *seed).bytes(count * element.itemsize), dtype=element.bits).copy()


def special_bits(code: str) -> Bits:
    """Return every run of ones and its complement.

    Both zeros, both infinities, the largest and smallest subnormals, quiet and signalling NaNs of any float type are
    among them, so no table of formats is needed.
    """
    if code == "BOOL":
        return np.array([0, 1], dtype=np.uint8)
    width = 8 * dtype_of(code).itemsize
    ones = (1 << width) - 1
    runs = {((1 << length) - 1) << start for start in range(width) for length in range(width - start + 1)}
    return np.array(sorted(runs | {ones ^ run for run in runs}), dtype=dtype_of(code).bits)


def to_torch(bits: Bits, spec: TensorSpec) -> torch.Tensor:
    """Return a tensor of its own memory with these bits."""
    signed = np.array(bits).view(_SIGNED[spec.element.itemsize])
    return torch.from_numpy(signed).view(getattr(torch, spec.element.torch_name)).reshape(spec.shape)


def bits_of(tensor: torch.Tensor) -> Bits:
    """Return the bits of a tensor, flat, in memory of their own."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    array = tensor.detach().contiguous().reshape(-1).view(integer).numpy()
    return array.view(f"<u{tensor.element_size()}").copy()


def random_patch(spec: TensorSpec, count: int, *seed: object) -> TensorPatch:
    """Return a patch of `count` random positions and random values."""
    rng = rng_of(spec, count, *seed)
    if spec.numel > 1 << 32:
        drawn = set(rng.integers(0, spec.numel, count).tolist())
        positions = np.array(sorted(drawn), dtype=position_dtype(spec.numel))
    else:
        positions = np.sort(rng.choice(spec.numel, count, replace=False)).astype(position_dtype(spec.numel))
    return TensorPatch(spec, positions, random_bits(spec.dtype, positions.size, *seed))


def patch_of(spec: TensorSpec, changes: dict[int, int]) -> TensorPatch:
    """Return a patch of these positions and bit patterns."""
    positions = np.array(sorted(changes), dtype=position_dtype(spec.numel))
    return TensorPatch(spec, positions, np.array([changes[p] for p in sorted(changes)], dtype=spec.element.bits))


def apply_by_hand(bits: Bits, change: Change) -> Bits:
    """Return the changed bits; one element after the other, as slow and simple as can be."""
    result = bits.copy()
    for at, (position, value) in enumerate(zip(change.positions.tolist(), change.values.tolist(), strict=True)):
        if isinstance(change, TensorDifference) and (change.absolute is None or not change.absolute[at]):
            result[position] = (int(result[position]) + value) % (1 << 8 * bits.dtype.itemsize)
        else:
            result[position] = value
    return result


def same_patch(one: TensorPatch, other: TensorPatch) -> bool:
    """Say whether two patches are the same in tensor, positions and bits."""
    return (
        one.spec == other.spec
        and one.positions.tolist() == other.positions.tolist()
        and one.values.dtype == other.values.dtype
        and one.values.tolist() == other.values.tolist()
    )


def assert_same_patches(found: list[TensorPatch], expected: list[TensorPatch]) -> None:
    """Compare two lists of patches."""
    assert [p.spec for p in found] == [p.spec for p in expected]
    assert all(same_patch(f, e) for f, e in zip(found, expected, strict=True))
