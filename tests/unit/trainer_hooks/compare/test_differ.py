"""Comparing on threads: however pieces are put together and wherever they are compared, the result is the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.support.tensors import random_bits, rng_of, to_torch
from trainer_hooks.compare import diff as diff_module
from trainer_hooks.compare import differ as differ_module
from trainer_hooks.compare.diff import Piece, TensorDiff, diff_tensor, pieces
from trainer_hooks.compare.differ import diff_pieces
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.types import TensorSpec
from vllm_delta_snapshot.util.ordered import thread_pool

PIECE = 64
SIZES = (0, 1, 3, 10, PIECE - 1, PIECE, 5, PIECE + 1, 3 * PIECE, 3 * PIECE + 5, 2, 0, 7)
CHANGED = (False, True, True, False, True, True, False, True, True, True, False, False, True)
Tensors = list[tuple[TensorSpec, Bits, Bits]]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff_module, "PIECE_ELEMENTS", PIECE)
    monkeypatch.setattr(diff_module, "_OF_THREAD", threading.local())


@pytest.fixture(params=["caller's thread", "pool"])
def pool(request: pytest.FixtureRequest) -> Iterator[ThreadPoolExecutor | None]:
    if request.param != "pool":
        yield None
        return
    with thread_pool(3) as threads:
        yield threads


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    found = []
    for number, (size, is_changed) in enumerate(zip(SIZES, CHANGED, strict=True)):
        spec = TensorSpec(f"w{number}", (size,), "BF16")
        before = random_bits("BF16", size, number)
        after = before.copy()
        if is_changed:
            after[rng_of(number).random(size) < 0.2] ^= 1
            after[-1] ^= 2
        found.append((spec, before, after))
    return found


def cut(tensors: Tensors) -> Iterator[Piece]:
    for spec, before, after in tensors:
        yield from pieces(spec, before, to_torch(after, spec))


def said(diffs: Sequence[TensorDiff]) -> list[tuple[object, ...]]:
    return [
        (of.spec.name, of.positions.tolist(), of.old.tolist(), of.new.tolist(), of.old_digest, of.new_digest)
        for of in diffs
    ]


def expected(tensors: Tensors) -> list[tuple[object, ...]]:
    found = [diff_tensor(spec, before, to_torch(after, spec)) for spec, before, after in tensors]
    return said([of for of in found if of is not None])


@pytest.mark.parametrize("batch", [1, 10, PIECE, 4 * PIECE, 10**6])
def test_batches_of_any_size_give_the_same_on_any_thread(
    tensors: Tensors, pool: ThreadPoolExecutor | None, batch: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(differ_module, "PIECE_ELEMENTS", batch)
    found = list(diff_pieces(cut(tensors), pool))
    assert said(found) == expected(tensors)
    assert [of.spec.name for of in found] == [f"w{number}" for number, is_changed in enumerate(CHANGED) if is_changed]


def test_small_pieces_are_put_together_and_none_waits_for_more_than_it_needs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(differ_module, "PIECE_ELEMENTS", 10)
    spec = TensorSpec("w", (100,), "U8")

    def piece(size: int) -> Piece:
        bits = np.zeros(size, np.uint8)
        return Piece(spec, 0, bits, to_torch(bits, TensorSpec("p", (size,), "U8")), is_last=True)

    sizes = [4, 4, 4, 10, 1, 25, 0, 9, 1, 3]
    batches = [[of.baseline.size for of in batch] for batch in differ_module._batches(map(piece, sizes))]
    assert batches == [[4, 4, 4], [10], [1, 25], [0, 9, 1], [3]]
    assert list(differ_module._batches([])) == []


def test_nothing_or_no_change_gives_nothing(tensors: Tensors, pool: ThreadPoolExecutor | None):
    assert list(diff_pieces([], pool)) == []
    same = [(spec, before, before) for spec, before, _ in tensors]
    assert list(diff_pieces(cut(same), pool)) == []


def test_digests_are_left_out_where_nobody_wants_them(tensors: Tensors, pool: ThreadPoolExecutor | None):
    found = list(diff_pieces(cut(tensors), pool, is_digested=False))
    assert {(of.old_digest, of.new_digest) for of in found} == {(0, 0)}
    assert [row[:4] for row in said(found)] == [row[:4] for row in expected(tensors)]


def test_source_that_fails_in_the_middle_fails_the_pass(tensors: Tensors, pool: ThreadPoolExecutor | None):
    def failing() -> Iterator[Piece]:
        yield from cut(tensors[:6])
        raise RuntimeError("the trainer's memory is gone")

    with pytest.raises(RuntimeError, match="memory is gone"):
        list(diff_pieces(failing(), pool))
