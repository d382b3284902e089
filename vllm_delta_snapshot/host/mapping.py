# SPDX-License-Identifier: Apache-2.0
"""Map: an update's changes -> lanes, the elements of one worker by live storage, ready for one indexed write each.

A lane is what the pause needs and nothing else: storage positions and values, and beside them the seeds with which
the worker proves old and new values (format/digest.py) without knowing checkpoint positions. Differences stay
differences: the worker has the old values. The stager maps and writes lanes to files that workers map into memory; a
worker without a stager maps for itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.errors import ApplyError, CorruptFile
from vllm_delta_snapshot.format.digest import term_seeds
from vllm_delta_snapshot.format.safetensors_io import MappedFile, NamedBits, file_chunks
from vllm_delta_snapshot.host.places import Index, PlaceMap
from vllm_delta_snapshot.types import Change, TensorPatch, TensorSpec

__all__ = ["Lane", "Run", "map_update", "read_lanes", "write_lanes"]

_FILE: Final = "lanes.safetensors"


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive elements of a lane that come from one piece of one tensor.

    Attributes:
        name: the tensor's checkpoint name.
        piece: which of its pieces on this worker.
        start: where in the lane.
    """

    name: str
    piece: int
    start: int


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """The elements that an update changes in one storage, of tensors of one type.

    Attributes:
        storage: the number of the storage in the worker's list.
        dtype: the safetensors code of the values.
        index: where they go in the storage, int64, shape ``(k,)``.
        values: the new bit patterns, in the checkpoint's type, shape ``(k,)``.
        seeds: see `term_seeds`, uint64, shape ``(k,)``.
        runs: which tensors they are; none is empty.
        relative: where True, ``values`` holds a difference, to be added to the old bit pattern; ``None``: nowhere.
    """

    storage: int
    dtype: str
    index: Index
    values: Bits
    seeds: NDArray[np.uint64]
    runs: Sequence[Run]
    relative: NDArray[np.bool_] | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(self.index.size)

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where each run begins."""
        return np.array([run.start for run in self.runs], np.int64)

    def resolve(self, old: Bits) -> Bits:
        """Return the new bit patterns for given old ones, both in the checkpoint's type, shape ``(k,)``."""
        if self.relative is None:
            return self.values
        new: Bits = old * self.relative  # in unsigned integers of the same width: the old one, or 0
        new += self.values
        return new


@dataclass(slots=True)
class _Growing:
    index: list[Index]
    values: list[Bits]
    seeds: list[NDArray[np.uint64]]
    relative: list[NDArray[np.bool_]]
    runs: list[Run]
    size: int = 0

    def lane(self, storage: int, dtype: str) -> Lane:
        """Return what has grown."""
        relative = np.concatenate(self.relative)
        return Lane(
            storage,
            dtype,
            np.concatenate(self.index),
            np.concatenate(self.values),
            np.concatenate(self.seeds),
            tuple(self.runs),
            relative if relative.any() else None,
        )


def map_update(changes: Sequence[Change], places: PlaceMap) -> list[Lane]:
    """Find every changed element that a worker holds.

    Args:
        changes: the update; tensors that the worker does not hold are left out.
        places: the worker's.

    Returns:
        One lane for each storage and element type that the update touches.

    Raises:
        ApplyError: tensors that share memory in the engine are to become different.
    """
    growing: dict[tuple[int, str], _Growing] = {}
    for change in changes:
        if not change.changed:
            continue
        positions = change.positions.astype(np.int64)
        seeds = term_seeds(change.spec, positions)
        relative = _relative(change)
        for number, piece in enumerate(places.pieces.get(change.spec.name, ())):
            selected, index = piece.map(positions)
            if not index.size:
                continue
            lane = growing.setdefault((piece.storage, change.spec.dtype), _Growing([], [], [], [], []))
            lane.runs.append(Run(change.spec.name, number, lane.size))
            lane.index.append(index)
            lane.values.append(change.values[selected])
            lane.seeds.append(seeds[selected])
            lane.relative.append(relative[selected])
            lane.size += int(index.size)
    lanes = [lane.lane(storage, dtype) for (storage, dtype), lane in growing.items()]
    _check_shared(lanes, places)
    return lanes


def _relative(change: Change) -> NDArray[np.bool_]:
    if isinstance(change, TensorPatch):
        return np.zeros(change.changed, np.bool_)
    return np.ones(change.changed, np.bool_) if change.absolute is None else ~change.absolute


def _check_shared(lanes: Sequence[Lane], places: PlaceMap) -> None:
    """Where tensors share memory (tied embeddings that the checkpoint stores twice), they must agree."""
    for storage in places.shared:
        inside = [lane for lane in lanes if lane.storage == storage]
        if not inside:
            continue
        index = np.concatenate([lane.index for lane in inside])
        order = np.argsort(index, kind="stable")
        same = np.flatnonzero(index[order][1:] == index[order][:-1])
        if not same.size:
            continue
        if len({(lane.dtype, lane.relative is None) for lane in inside}) == 1:
            values = np.concatenate([lane.values for lane in inside])[order]
            is_same = values[same] == values[same + 1]
            if inside[0].relative is not None:
                relative = np.concatenate([lane.relative for lane in inside if lane.relative is not None])[order]
                is_same &= relative[same] == relative[same + 1]
            same = same[~is_same]
        if same.size:
            raise ApplyError(
                "tensors that are one in the engine (tied weights) are to become different",
                tensor=", ".join(sorted({run.name for lane in inside for run in lane.runs})[:5]),
                hint="Tie them in the trainer, or serve the model with untied weights.",
            )


def write_lanes(folder: Path, lanes: Sequence[Lane], head: Mapping[str, object]) -> None:
    """Write lanes into a folder of the stage area.

    Args:
        folder: exists.
        lanes: what to write.
        head: what else the worker has to know, JSON values.

    Raises:
        OSError: it cannot be written.
    """
    tensors = []
    for number, lane in enumerate(lanes):
        for key, dtype, array in (
            ("index", "I64", lane.index.view(np.uint64)),
            ("values", f"U{8 * lane.values.dtype.itemsize}", lane.values),
            ("seeds", "U64", lane.seeds),
        ):
            tensors.append(NamedBits(TensorSpec(f"{number}.{key}", (lane.size,), dtype), array))
        if lane.relative is not None:
            spec = TensorSpec(f"{number}.relative", (lane.size,), "U8")
            tensors.append(NamedBits(spec, lane.relative.view(np.uint8)))
    described = [
        {"storage": lane.storage, "dtype": lane.dtype, "runs": [[run.name, run.piece, run.start] for run in lane.runs]}
        for lane in lanes
    ]
    text = json.dumps({"lanes": described, "head": head}, separators=(",", ":"))
    with (folder / _FILE).open("wb") as file:
        for chunk in file_chunks(tensors, {"delta_snapshot": text}):
            file.write(chunk)


def read_lanes(folder: Path) -> tuple[list[Lane], dict[str, object]]:
    """Read what `write_lanes` wrote: private views of the mapped file.

    Raises:
        CorruptFile: it is not that.
    """
    file = MappedFile(folder / _FILE, is_private=True)
    try:
        described = json.loads(file.metadata["delta_snapshot"])
        lanes = [
            Lane(
                entry["storage"],
                entry["dtype"],
                file.bits(f"{number}.index").view(np.int64),
                file.bits(f"{number}.values"),
                file.bits(f"{number}.seeds"),
                tuple(Run(*run) for run in entry["runs"]),
                file.bits(relative).view(np.bool_) if (relative := f"{number}.relative") in file.specs else None,
            )
            for number, entry in enumerate(described["lanes"])
        ]
        return lanes, described["head"]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptFile("a mapped update cannot be read", file=str(folder / _FILE), found=error) from error
