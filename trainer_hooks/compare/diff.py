# SPDX-License-Identifier: Apache-2.0
"""Diff: which elements of a tensor differ from the baseline, bit for bit, in the serving dtype.

Compares unsigned views, so a changed sign of zero is a change and an unchanged NaN is none. Works in cache-sized
chunks: the cast to the serving dtype and the comparison never hold more than one chunk beside the result. Safe on many
threads, of different pieces of one tensor too; numpy and the compiled kernel let other threads run.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_hooks.compare.kernel import load_kernel
from trainer_hooks.source.castable import check_dtype, serving_dtype
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.errors import SourceError
from vllm_delta_snapshot.format.digest import add_digests, patch_digest, tensor_key
from vllm_delta_snapshot.types import Positions, TensorSpec, position_dtype

__all__ = [
    "Found",
    "Piece",
    "TensorDiff",
    "check_castable",
    "diff_piece",
    "diff_tensor",
    "difference",
    "find_changes",
    "find_in_chunks",
    "join_pieces",
    "pieces",
    "served",
    "tensor_bits",
]

CHUNK_ELEMENTS: Final = 1 << 19
"""512 Ki elements: both sides and the mask stay in the cache (docs/design.md, "Diff")."""

PIECE_ELEMENTS: Final = 1 << 22
"""4 Mi elements: what one thread compares at a time."""

_MEMCMP: Final = ctypes.CDLL(None).memcmp
_MEMCMP.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

_SIGNED: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_OF_THREAD: Final = threading.local()

Found = tuple[NDArray[np.signedinteger], Bits, Bits]
"""Positions, and the old and new bits there."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorDiff:
    """How a tensor, or a piece of one, differs from the baseline.

    Attributes:
        spec: the whole tensor.
        positions: flat positions in the whole tensor, shape ``(changed,)``, strictly increasing; changed > 0.
        old: the bit patterns there in the baseline, shape ``(changed,)``.
        new: the bit patterns there now, shape ``(changed,)``.
        old_digest: the digest of the old values.
        new_digest: the digest of the new values.
    """

    spec: TensorSpec
    positions: Positions
    old: Bits
    new: Bits
    old_digest: int
    new_digest: int


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Consecutive elements of a tensor, to be compared on one thread.

    Attributes:
        spec: the whole tensor.
        start: where the piece starts in it.
        baseline: the published bits of the piece, shape ``(k,)``.
        current: the trainer's elements of the piece, any device, shape ``(k,)``.
        is_last: whether the tensor ends here.
        places: turns positions as counted from `start` into positions in the whole tensor, where the elements are not
            consecutive there; keeps their order.
    """

    spec: TensorSpec
    start: int
    baseline: Bits
    current: torch.Tensor
    is_last: bool
    places: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None = None


def pieces(spec: TensorSpec, baseline: Bits, tensor: torch.Tensor) -> Iterator[Piece]:
    """Cut a tensor into pieces; at least one.

    Args:
        spec: the tensor in the base checkpoint.
        baseline: its published bits, shape ``(spec.numel,)``.
        tensor: the trainer's full tensor, any device, any layout of strides, castable to the serving dtype.

    Raises:
        SourceError: shape or dtype do not fit (see `check_castable`).
    """
    check_castable(spec, tensor)
    flat = tensor.detach().resolve_neg().reshape(-1)  # a lazily negated tensor has no bits to look at
    for start in range(0, max(1, spec.numel), PIECE_ELEMENTS):
        end = start + PIECE_ELEMENTS
        yield Piece(spec, start, baseline[start:end], flat[start:end], end >= spec.numel)


def diff_piece(piece: Piece, *, is_digested: bool = True) -> TensorDiff | None:
    """Compare a piece with its baseline on the host, in this thread: see `find_in_chunks` and `difference`."""
    return difference(piece, find_in_chunks(piece), is_digested=is_digested)


def find_in_chunks(piece: Piece) -> list[Found]:
    """Find what differs in a piece, chunk by chunk, on the host. Blocks.

    What lies on an accelerator is copied there on this thread's current stream; `device_diff` has better ways.
    """
    return [find_changes(start, tensor_bits(now, piece.spec), before) for start, now, before in _chunks(piece)]


def difference(piece: Piece, found: Sequence[Found], *, is_digested: bool = True) -> TensorDiff | None:
    """Make a piece's difference of what was found in it.

    Args:
        piece: the piece.
        found: its parts in order, positions counted from the piece's start.
        is_digested: whether to compute the digests; a benchmark that has no use for them gets zeros.

    Returns:
        The difference, with arrays of its own; ``None`` if there is none.
    """
    spec = piece.spec
    found = [item for item in found if item[0].size]
    if not found:
        return None
    where, old, new = _joined(found)
    if piece.places is not None:
        where, start = piece.places(where.astype(np.int64) + piece.start), 0
    else:
        start = piece.start
    positions = where.astype(position_dtype(spec.numel))
    positions += start
    digests = [_digest(spec, positions, values) for values in (old, new)] if is_digested else [0, 0]
    return TensorDiff(spec, positions, old, new, *digests)


def _chunks(piece: Piece) -> Iterator[tuple[int, torch.Tensor, Bits]]:
    """Cut a piece so that a cast or a copy to the host stays in the cache; leave it whole where there is none."""
    is_plain = piece.current.device.type == "cpu" and serving_dtype(piece.spec) is piece.current.dtype
    size = piece.baseline.size if is_plain else CHUNK_ELEMENTS
    for start in range(0, piece.baseline.size, max(1, size)):
        yield start, piece.current[start : start + size], piece.baseline[start : start + size]


def join_pieces(diffs: Sequence[TensorDiff]) -> TensorDiff:
    """Put the differences of a tensor's pieces together; at least one, in the order of the pieces."""
    if len(diffs) == 1:
        return diffs[0]
    return TensorDiff(
        diffs[0].spec,
        np.concatenate([diff.positions for diff in diffs]),
        np.concatenate([diff.old for diff in diffs]),
        np.concatenate([diff.new for diff in diffs]),
        add_digests(*(diff.old_digest for diff in diffs)),
        add_digests(*(diff.new_digest for diff in diffs)),
    )


def diff_tensor(spec: TensorSpec, baseline: Bits, tensor: torch.Tensor) -> TensorDiff | None:
    """Compare a whole tensor with its baseline, in the caller's thread: see `pieces` and `diff_piece`."""
    diffs = [diff for diff in map(diff_piece, pieces(spec, baseline, tensor)) if diff is not None]
    return join_pieces(diffs) if diffs else None


def find_changes(start: int, current: Bits, baseline: Bits) -> Found:
    """Return where two arrays differ, counted from `start` on, and the values there, old and new, in own arrays."""
    if _is_equal(current, baseline):
        return np.empty(0, np.int64), baseline[:0], current[:0]
    kernel = load_kernel()
    if kernel is not None and kernel.takes(current, baseline):
        positions, old, new = _buffers(current)
        count = kernel.find(current, baseline, positions, old, new)
        return positions[:count] + start, old[:count].copy(), new[:count].copy()
    chunks: list[Found] = []
    for first in range(0, current.size, CHUNK_ELEMENTS):
        now, before = current[first : first + CHUNK_ELEMENTS], baseline[first : first + CHUNK_ELEMENTS]
        if _is_equal(now, before):
            continue
        at = _positions(now, before)
        # The positions are in range; mode="clip" only spares numpy the check.
        chunks.append((at + (start + first), before.take(at, mode="clip"), now.take(at, mode="clip")))
    return _joined(chunks) if chunks else (np.empty(0, np.int64), baseline[:0], current[:0])


def _is_equal(current: Bits, baseline: Bits) -> bool:
    """Say whether two arrays are equal, at the price of one read of both; if not, at next to none."""
    if not (current.flags.c_contiguous and baseline.flags.c_contiguous):
        return False
    return bool(_MEMCMP(current.ctypes.data, baseline.ctypes.data, current.nbytes) == 0)


def _joined(found: Sequence[Found]) -> Found:
    if len(found) == 1:
        return found[0]
    positions, old, new = zip(*found, strict=True)
    return np.concatenate(positions), np.concatenate(old), np.concatenate(new)


def _positions(current: Bits, baseline: Bits) -> NDArray[np.int64]:
    """Return where two arrays differ.

    numpy's `flatnonzero` of bytes pays for every hit of a sparse mask; so it goes through eight elements at once
    first, and through the few words that have one again.
    """
    differs = np.empty(-(-current.size // 8) * 8, np.bool_)
    differs[current.size :] = False
    np.not_equal(current, baseline, out=differs[: current.size])
    words = differs.view(np.uint64)
    hits = np.flatnonzero(words != 0)
    inside = np.flatnonzero(words.take(hits, mode="clip").view(np.bool_))
    positions: NDArray[np.int64] = hits.take(inside >> 3, mode="clip")
    positions <<= 3
    inside &= 7
    positions += inside
    return positions


def _buffers(like: Bits) -> tuple[NDArray[np.int32], Bits, Bits]:
    """Return this thread's buffers for what a kernel finds; only as much of them is touched as it finds."""
    buffers: dict[np.dtype[np.unsignedinteger], tuple[NDArray[np.int32], Bits, Bits]]
    buffers = _OF_THREAD.__dict__.setdefault("buffers", {})
    if like.dtype not in buffers or buffers[like.dtype][0].size <= like.size:
        # One element more than there are: the kernel writes before it knows whether it keeps.
        size = max(PIECE_ELEMENTS, like.size) + 1
        buffers[like.dtype] = (np.empty(size, np.int32), np.empty(size, like.dtype), np.empty(size, like.dtype))
    return buffers[like.dtype]


def _digest(spec: TensorSpec, positions: Positions, values: Bits) -> int:
    kernel = load_kernel()
    if kernel is None:
        return patch_digest(spec, positions, values)
    return kernel.digest(tensor_key(spec), positions, values)


def tensor_bits(flat: torch.Tensor, spec: TensorSpec) -> Bits:
    """Return a flat tensor's bits in the serving dtype, on the host; a view where nothing had to be converted."""
    # Not `numpy()`: torch would never again let the trainer give that memory back (``resize_``).
    bits: Bits = np.from_dlpack(served(flat, spec).cpu().contiguous()).view(spec.element.bits)
    return bits


def served(flat: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return a flat tensor's bits in the serving dtype, as integers, on its device; a view where nothing is cast."""
    return flat.to(serving_dtype(spec)).view(_SIGNED[spec.element.itemsize])


def check_castable(spec: TensorSpec, tensor: torch.Tensor) -> None:
    """Check that a trainer's tensor can stand for the checkpoint's.

    Raises:
        SourceError: the shape differs; or a cast to the serving dtype is no plain rounding: between floating point
            and integers, or to fp8, whose values belong to scales that only the quantizer knows.
    """
    if tuple(tensor.shape) != spec.shape:
        raise SourceError(
            "the tensor has another shape than in the base checkpoint",
            tensor=spec.name,
            expected=spec,
            found=f"{tensor.dtype} {list(tensor.shape)}",
            hint="Give it in the shape of the base checkpoint.",
        )
    check_dtype(spec, tensor.dtype)
