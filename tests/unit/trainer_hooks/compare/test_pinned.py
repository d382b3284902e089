"""The memory of a baseline: every array has its own bytes, whatever slab they are cut from, pinned or not."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from tests.support.tensors import random_bits
from trainer_hooks.compare.pinned import HostMemory, Slab

MIB = 1 << 20


class Slabs:
    """Gives memory as the system would, so much of it."""

    def __init__(self, room: int) -> None:
        self.given: list[Slab] = []
        self.room = room

    def __call__(self, num_bytes: int) -> Slab:
        if num_bytes > self.room:
            raise RuntimeError("CUDA error: out of memory")
        self.room -= num_bytes
        self.given.append(np.zeros(num_bytes, np.uint8))
        return self.given[-1]


def test_arrays_of_any_type_keep_their_bits_beside_each_other():
    slabs = Slabs(1 << 40)
    memory = HostMemory(is_pinned=True, allocate=slabs)
    wanted = [random_bits(code, size, code) for code in ("U8", "BF16", "F32", "F64") for size in (1, 7, 0, 333, 64)]
    found = [memory.copy_of(bits) for bits in wanted]
    for bits, copy in zip(wanted, found, strict=True):
        assert (copy.dtype, copy.tolist()) == (bits.dtype, bits.tolist())
        assert copy.flags.writeable
        assert copy.flags.c_contiguous
        assert copy.size == 0 or copy.ctypes.data % 64 == slabs.given[0].ctypes.data % 64
    for at, copy in enumerate(found):  # none of them is another's
        copy[...] = at
    assert [set(copy.tolist()) for copy in found if copy.size] == [{at} for at, copy in enumerate(found) if copy.size]
    assert len(slabs.given) == 1


def test_slabs_are_powers_of_two_and_what_is_left_of_a_large_one_is_used():
    slabs = Slabs(1 << 40)
    memory = HostMemory(is_pinned=True, allocate=slabs)
    for size in (1, 70 * MIB, 50 * MIB, 64 * MIB, 13 * MIB):
        memory.empty(size, np.dtype(np.uint8))
    assert [slab.size // MIB for slab in slabs.given] == [64, 128, 64]


def test_what_cannot_be_pinned_is_plain_memory_and_said_once(caplog: pytest.LogCaptureFixture):
    slabs = Slabs(64 * MIB)
    memory = HostMemory(is_pinned=True, allocate=slabs)
    with caplog.at_level(logging.WARNING):
        found = [memory.copy_of(random_bits("BF16", 10, seed)) for seed in range(3)]
        large = memory.empty(64 * MIB, np.dtype(np.uint8))
        found += [memory.copy_of(random_bits("BF16", 10, seed)) for seed in range(3, 6)]
    assert large.size == 64 * MIB
    assert [copy.tolist() for copy in found] == [random_bits("BF16", 10, seed).tolist() for seed in range(6)]
    assert len(slabs.given) == 1
    assert len(caplog.records) == 1


def test_plain_memory_is_asked_of_nobody():
    memory = HostMemory(is_pinned=False, allocate=Slabs(0))
    assert memory.copy_of(random_bits("F32", 5)).tolist() == random_bits("F32", 5).tolist()
