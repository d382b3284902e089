# SPDX-License-Identifier: Apache-2.0
"""Find the places of tensors that a loader rearranges before it copies, by loading numbers instead of weights.

Every element is given a code that names it. What the loader would write tells where each element goes, however it is
transposed, split, interleaved or shuffled on the way. Codes are spread over all 32 (or 64) bits, so a loader that
computes on values yields codes that name nothing, and is found out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_delta_snapshot.engine.plan.recorder import LiveStorages, written_by
from vllm_delta_snapshot.host.places import Piece, Segment, Table, strided_positions
from vllm_delta_snapshot.types import TensorSpec

__all__ = ["probe_index"]

_MOST_CUTS: Final = 64

_FACTOR: Final = {32: 0x9E3779B1, 64: 0x9E3779B97F4A7C15}
_SHIFT: Final = {32: 0x85EBCA6B, 64: 0xC2B2AE3D27D4EB4F}


def probe_index(model: Any, spec: TensorSpec, live: LiveStorages) -> list[Piece] | str:
    """Run the model's loader on the codes of one tensor. Changes no weight. Transient memory: 4 or 8 bytes an element.

    Args:
        model: the live model.
        spec: the tensor.
        live: its storages; gets those that are new.

    Returns:
        Its pieces on this worker, none if the loader does not use it here; or why it has no exact place.
    """
    bits = 32 if spec.numel < 2**31 else 64
    recorder = _CodeRecorder(live, spec, bits)
    try:
        with torch.no_grad(), recorder:
            model.load_weights(iter([(spec.name, torch.from_numpy(_codes(spec.numel, bits)).view(spec.shape))]))
    except Exception as error:  # noqa: BLE001 - any failure of a foreign loader means the same
        return f"its loader cannot be probed ({type(error).__name__}: {error})"
    return recorder.problem or recorder.pieces


def _codes(count: int, bits: int) -> NDArray[Any]:
    kind: Any = np.uint32 if bits == 32 else np.uint64
    codes = np.arange(count, dtype=kind)
    codes *= kind(_FACTOR[bits])
    codes += kind(_SHIFT[bits])
    signed: NDArray[Any] = codes.view(np.int32 if bits == 32 else np.int64)
    return signed


def _positions(codes: NDArray[Any], bits: int) -> NDArray[np.int64]:
    kind: Any = np.uint32 if bits == 32 else np.uint64
    positions = codes.view(kind) - kind(_SHIFT[bits])
    positions *= kind(pow(_FACTOR[bits], -1, 1 << bits))
    result: NDArray[np.int64] = positions.astype(np.int64)
    return result


class _CodeRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own base is untyped
    def __init__(self, live: LiveStorages, spec: TensorSpec, bits: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pieces: list[Piece] = []
        self.problem: str | None = None
        self._live = live
        self._spec = spec
        self._bits = bits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = [tensor for tensor in written_by(func, args, kwargs) if self._live.holds(tensor)]
        if not written:
            return func(*args, **kwargs)
        if func is torch.ops.aten.copy_.default:
            self.problem = self.problem or self._record(args[0], args[1])
        elif func is torch.ops.aten.fill_.Scalar or func is torch.ops.aten.zero_.default:
            self.problem = self.problem or self._fill(args[0])
        else:
            self.problem = self.problem or f"its loader writes by {func}, not by a copy"
        return args[0] if args else None

    def _record(self, target: torch.Tensor, source: torch.Tensor) -> str | None:
        if self._live.reason(target):
            return self._live.reason(target)
        if source.element_size() * 8 != self._bits or source.is_floating_point():
            return f"its loader converts it to {source.dtype} before copying it"
        if source.shape != target.shape:
            return f"its loader spreads {list(source.shape)} over {list(target.shape)}"
        positions = _positions(source.contiguous().cpu().numpy(), self._bits)
        if positions.size and (positions.min() < 0 or positions.max() >= self._spec.numel):
            return "its loader computes on the values"
        number = self._live.number(target)
        pieces = _fit(number, positions, int(target.storage_offset()), tuple(target.stride()), depth=3)
        if pieces is None:
            source_order = np.argsort(positions, axis=None, kind="stable")
            sources = positions.reshape(-1)[source_order]
            if (sources[1:] == sources[:-1]).any():
                return "its loader repeats elements"
            targets = _target_positions(target).reshape(-1)[source_order]
            pieces = [Table(number, sources, targets)]
        elif len(pieces) > 1:
            # Twice the same part is fine, as in two copies; parts that overlap are not.
            is_there = np.zeros(self._spec.numel, np.bool_)
            is_there[positions] = True
            if sum({piece.box: piece.size for piece in pieces}.values()) != np.count_nonzero(is_there):
                return "its loader repeats elements"
        self.pieces += pieces
        return None

    def _fill(self, target: torch.Tensor) -> str | None:
        """Padding carries no element; but it must not hide one."""
        filled = np.sort(_target_positions(target), axis=None)
        number = self._live.number(target)
        hides = any(_turned(piece).map(filled)[1].size for piece in self.pieces if piece.storage == number)
        return "its loader overwrites what it has copied" if hides else None


def _turned(piece: Piece) -> Piece:
    """Return the piece from storage to checkpoint."""
    if isinstance(piece, Table):
        order = np.argsort(piece.target)
        return Table(piece.storage, piece.target[order], piece.source[order])
    return Segment(
        piece.storage,
        piece.shape,
        piece.target_offset,
        piece.target_stride,
        piece.source_offset,
        piece.source_stride,
    )


def _target_positions(target: torch.Tensor) -> NDArray[np.int64]:
    return strided_positions(int(target.storage_offset()), target.shape, target.stride())


def _fit(
    storage: int, positions: NDArray[np.int64], offset: int, stride: Sequence[int], *, depth: int
) -> list[Piece] | None:
    """Describe positions by strided segments, as few as need be; ``None`` if they are not that regular."""
    if positions.size == 0:
        return []
    segment = _as_segment(storage, positions, offset, stride)
    if segment is not None:
        return [segment]
    if depth == 0:
        return None
    for dim in range(positions.ndim):
        cuts = _cuts(positions, dim)
        if not 0 < len(cuts) <= _MOST_CUTS:
            continue
        pieces: list[Piece] = []
        for first, part in zip([0, *cuts], np.split(positions, cuts, axis=dim), strict=True):
            found = _fit(storage, part, offset + first * stride[dim], stride, depth=depth - 1)
            if found is None:
                break
            pieces += found
        else:
            return pieces
    return None


def _as_segment(storage: int, positions: NDArray[np.int64], offset: int, stride: Sequence[int]) -> Segment | None:
    first = int(positions.flat[0])
    lines = [_line(positions, dim) for dim in range(positions.ndim)]
    steps = [int(line[1] - line[0]) if line.size > 1 else 1 for line in lines]
    expected = strided_positions(first, positions.shape, steps)
    if min(steps, default=1) <= 0 or not np.array_equal(expected, positions):
        return None
    segment = Segment(storage, tuple(positions.shape), first, tuple(steps), offset, tuple(stride))
    return segment if segment.is_nested else None


def _line(positions: NDArray[np.int64], dim: int) -> NDArray[np.int64]:
    """Return the positions along one dimension, at the beginning of the others."""
    place: tuple[Any, ...] = tuple(slice(None) if other == dim else 0 for other in range(positions.ndim))
    line: NDArray[np.int64] = positions[place]
    return line


def _cuts(positions: NDArray[np.int64], dim: int) -> list[int]:
    """Return where steps along a dimension are not the usual one."""
    steps = np.diff(_line(positions, dim))
    if steps.size == 0:
        return []
    kinds, counts = np.unique(steps, return_counts=True)
    return [int(place) + 1 for place in np.flatnonzero(steps != kinds[counts.argmax()])]
