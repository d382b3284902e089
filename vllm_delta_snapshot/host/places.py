# SPDX-License-Identifier: Apache-2.0
"""Places: where one worker holds each element of the checkpoint, as plain numbers.

A worker finds them out once (engine/plan/load_plan.py) and writes them into the stage area; the stager, which has
neither torch nor the model, uses them to map an update's positions while generation goes on. A place is a `Segment`, a
strided view of the checkpoint tensor that lies in a strided view of some live storage; or a `Table`, one pair of
positions an element, for loaders that shuffle.

Pure numbers: no tensor, no address. Two workers with the same `id` can use the same mapped update.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vllm_delta_snapshot.errors import CorruptFile

__all__ = ["Box", "Index", "Piece", "PlaceMap", "Segment", "Table", "strided_positions"]

Index = NDArray[np.int64]
"""Flat positions in a live storage, in elements."""

Box = tuple[Any, ...]
"""Which elements of a checkpoint tensor a piece takes; equal boxes on two workers are replicas."""

_FILE: Final = "places.json"


def strided_positions(offset: int, shape: Sequence[int], stride: Sequence[int]) -> Index:
    """Return the flat positions of a strided view's elements, in the view's shape."""
    positions = np.array(offset, np.int64)
    for dim, (size, step) in enumerate(zip(shape, stride, strict=True)):
        along = [1] * len(shape)
        along[dim] = size
        positions = positions + (np.arange(size, dtype=np.int64) * step).reshape(along)
    return positions


@dataclass(frozen=True, slots=True)
class Segment:
    """A strided view of the checkpoint tensor that lies in a strided view of a storage.

    Attributes:
        storage: the number of the storage in the worker's list.
        shape: the shape of both views.
        source_offset, source_stride: the view of the checkpoint tensor, in elements.
        target_offset, target_stride: the view of the storage, in elements.
    """

    storage: int
    shape: tuple[int, ...]
    source_offset: int
    source_stride: tuple[int, ...]
    target_offset: int
    target_stride: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def box(self) -> Box:
        """Which elements of the checkpoint tensor these are; wherever in the storage they lie."""
        dims: list[tuple[int, int]] = []
        for stride, size in sorted(zip(self.source_stride, self.shape, strict=True), reverse=True):
            if size == 1:
                continue
            if dims and dims[-1][0] == stride * size:
                dims[-1] = (stride, dims[-1][1] * size)
            else:
                dims.append((stride, size))
        return ("segment", self.source_offset, tuple(dims))

    @property
    def dims(self) -> list[tuple[int, int, int]]:
        """Source stride, size and target stride of each dimension, outermost in the source first; as few as can be."""
        dims: list[tuple[int, int, int]] = []
        for source, size, target in sorted(
            zip(self.source_stride, self.shape, self.target_stride, strict=True), reverse=True
        ):
            if size == 1:
                continue
            if dims and dims[-1][0] == source * size and dims[-1][2] == target * size:
                dims[-1] = (source, dims[-1][1] * size, target)
            else:
                dims.append((source, size, target))
        return dims

    @property
    def is_nested(self) -> bool:
        """Whether each element of the checkpoint tensor is in the view at most once, one dimension inside the other."""
        reach = 1
        for source, size, _ in reversed(self.dims):
            if source < reach:
                return False
            reach = source * (size - 1) + reach
        return True

    @property
    def extent(self) -> tuple[int, int]:
        """First and last storage position, inclusive."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.target_stride, strict=True))
        return self.target_offset, self.target_offset + last

    def map(self, positions: Index) -> tuple[slice | Index, Index]:
        """Map checkpoint positions to storage positions.

        Args:
            positions: strictly increasing, shape ``(k,)``.

        Returns:
            Which of the positions lie in this segment, and the storage positions of those.
        """
        dims = self.dims
        last = self.source_offset + sum((size - 1) * stride for stride, size, _ in dims)
        low, high = np.searchsorted(positions, (self.source_offset, last + 1))
        rest = positions[low:high] - self.source_offset
        if not dims or (len(dims) == 1 and dims[0][0] == 1):
            step = dims[0][2] if dims else 1
            return slice(int(low), int(high)), rest * step + self.target_offset
        target = np.full(rest.shape, self.target_offset, np.int64)
        inside = np.ones(rest.shape, np.bool_)
        for source, size, step in dims:
            if source == 1:
                inside &= rest < size
                target += rest * step
                rest = rest - rest
                continue
            quotient = rest // source
            rest -= quotient * source
            inside &= quotient < size
            target += quotient * step
        inside &= rest == 0
        return np.flatnonzero(inside) + int(low), target[inside]

    def to_json(self) -> list[Any]:
        """Return this as JSON values."""
        return [
            self.storage,
            self.shape,
            self.source_offset,
            self.source_stride,
            self.target_offset,
            self.target_stride,
        ]

    @classmethod
    def of_json(cls, value: list[Any]) -> Segment:
        """Return what `to_json` wrote."""
        storage, shape, source_offset, source_stride, target_offset, target_stride = value
        return cls(storage, tuple(shape), source_offset, tuple(source_stride), target_offset, tuple(target_stride))


@dataclass(frozen=True, eq=False)
class Table:
    """Pairs of positions, for elements that a loader shuffles in no regular way.

    Attributes:
        storage: the number of the storage in the worker's list.
        source: positions in the checkpoint tensor, strictly increasing, int64, shape ``(n,)``.
        target: positions in the storage, int64, shape ``(n,)``.
    """

    storage: int
    source: Index
    target: Index

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(self.source.size)

    @cached_property
    def box(self) -> Box:
        """Which elements of the checkpoint tensor these are."""
        return ("table", self.size, hashlib.sha256(self.source.tobytes()).hexdigest())

    @property
    def extent(self) -> tuple[int, int]:
        """First and last storage position, inclusive."""
        return int(self.target.min()), int(self.target.max())

    def map(self, positions: Index) -> tuple[slice | Index, Index]:
        """Map checkpoint positions to storage positions: see `Segment.map`."""
        found = np.searchsorted(self.source, positions)
        found[found == self.size] = 0
        hit = np.flatnonzero(self.source[found] == positions)
        return hit, self.target[found[hit]]


Piece = Segment | Table


class PlaceMap:
    """All places of one worker.

    Args:
        pieces: by checkpoint name; a tensor without any is not on this worker.

    Attributes:
        pieces: the same.
        id: names the content.
    """

    def __init__(self, pieces: Mapping[str, list[Piece]]) -> None:
        self.pieces = pieces
        self._text = json.dumps(
            {name: [_piece_to_json(piece) for piece in of_name] for name, of_name in pieces.items()},
            separators=(",", ":"),
        )
        self.id = hashlib.sha256(self._text.encode()).hexdigest()[:16]

    def __iter__(self) -> Iterator[tuple[str, Piece]]:
        """Yield every piece with its tensor's name, always in the same order."""
        for name, pieces in self.pieces.items():
            for piece in pieces:
                yield name, piece

    @cached_property
    def shared(self) -> frozenset[int]:
        """The storages in which pieces may lie on top of each other, as those of tied tensors do."""
        ends: dict[int, list[tuple[int, int]]] = {}
        for _, piece in self:
            if piece.size:
                ends.setdefault(piece.storage, []).append(piece.extent)
        shared = set()
        for storage, extents in ends.items():
            reached = -1
            for first, last in sorted(extents):
                if first <= reached:
                    shared.add(storage)
                reached = max(reached, last)
        return frozenset(shared)

    def save(self, folder: Path) -> None:
        """Write this into `folder`, whole or not at all: it appears by rename.

        Raises:
            OSError: it cannot be written.
        """
        if folder.exists():
            return
        work = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
        work.mkdir(parents=True)
        try:
            for number, table in enumerate(self._tables()):
                np.save(work / f"{number}.npy", np.stack([table.source, table.target]))
            (work / _FILE).write_text(self._text)
            work.rename(folder)
        except OSError:
            if not folder.exists():  # else another worker with the same places was first
                raise
        finally:
            shutil.rmtree(work, ignore_errors=True)

    @classmethod
    def load(cls, folder: Path) -> PlaceMap:
        """Read what `save` wrote. Tables are mapped, not loaded.

        Raises:
            CorruptFile: it is not that.
        """
        try:
            text = (folder / _FILE).read_text()
            raw: dict[str, list[Any]] = json.loads(text)
            count = 0
            pieces: dict[str, list[Piece]] = {}
            for name, values in raw.items():
                of_name: list[Piece] = []
                for value in values:
                    if isinstance(value, dict):
                        both = np.load(folder / f"{count}.npy", mmap_mode="r", allow_pickle=False)
                        of_name.append(Table(value["storage"], both[0], both[1]))
                        count += 1
                    else:
                        of_name.append(Segment.of_json(value))
                pieces[name] = of_name
            places = cls(pieces)
            if places._text != text:
                raise ValueError("its tables are others")
            return places
        except (ValueError, KeyError, TypeError, AttributeError, EOFError, OSError) as error:
            raise CorruptFile("a worker's places cannot be read", file=str(folder / _FILE), found=error) from error

    def _tables(self) -> list[Table]:
        return [piece for _, piece in self if isinstance(piece, Table)]


def _piece_to_json(piece: Piece) -> Any:
    if isinstance(piece, Segment):
        return piece.to_json()
    content = hashlib.sha256(piece.source.tobytes() + piece.target.tobytes()).hexdigest()
    return {"storage": piece.storage, "size": piece.size, "content": content}
