# SPDX-License-Identifier: Apache-2.0
"""Live weights, read and written bit for bit through a load plan.

A `MappedPatch` is a patch with its places in this worker's storage. Gather, write, compare: integer views only, so no
bit pattern is special.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_delta_snapshot.engine.bits import bits_of, integer_of
from vllm_delta_snapshot.engine.load_plan import LoadPlan
from vllm_delta_snapshot.format.digest import patch_digest
from vllm_delta_snapshot.types import TensorPatch

__all__ = ["MappedPatch", "Place", "map_patch"]


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where some of a patch's elements lie.

    Attributes:
        storage: live storage, flat, as integers.
        index: storage positions, int64, shape ``(k,)``.
        selected: which elements of the patch these are, int64 on the host, shape ``(k,)``.
        new: their new values, as integers on the storage's device.
    """

    storage: torch.Tensor
    index: torch.Tensor
    selected: torch.Tensor
    new: torch.Tensor

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.index.numel()

    def gather(self) -> torch.Tensor:
        """Return the values that are there now."""
        return self.storage[self.index]

    def write(self, values: torch.Tensor) -> None:
        """Write values."""
        self.storage[self.index] = values


@dataclass(frozen=True, slots=True, eq=False)
class MappedPatch:
    """A patch and its places on this worker; none if the tensor, or the touched part of it, lies elsewhere."""

    patch: TensorPatch
    places: Sequence[Place]

    def gather(self) -> list[torch.Tensor]:
        """Return the values that are there now, place by place."""
        return [place.gather() for place in self.places]

    def write(self, values: Sequence[torch.Tensor]) -> None:
        """Write values, place by place."""
        for place, value in zip(self.places, values, strict=True):
            place.write(value)

    def write_new(self) -> None:
        """Write the patch."""
        self.write([place.new for place in self.places])

    def matches(self) -> bool:
        """Say whether the live values are the patch's, bit for bit."""
        return all(torch.equal(place.gather(), place.new) for place in self.places)

    def digest_of(self, values: Sequence[torch.Tensor]) -> int | None:
        """Return the digest of values gathered here, or ``None`` if this worker has not all of the patch's elements."""
        found = torch.from_numpy(self.patch.values.view(f"<i{self.patch.values.dtype.itemsize}").copy())
        covered = torch.zeros(self.patch.changed, dtype=torch.bool)
        for place, value in zip(self.places, values, strict=True):
            found[place.selected] = value.cpu().view(found.dtype)
            covered[place.selected] = True
        if not bool(covered.all()):
            return None
        return patch_digest(self.patch.spec, self.patch.positions, bits_of(found))


def map_patch(plan: LoadPlan, patch: TensorPatch) -> MappedPatch:
    """Find a patch's places through the plan. Cost grows with the patch, not with the tensor."""
    places = []
    segments = plan.segments.get(patch.spec.name, [])
    positions = torch.from_numpy(patch.positions.astype("int64"))
    values = integer_of(patch.values)
    for segment in segments:
        inside, index = segment.map(positions)
        if index.numel() == 0:
            continue
        device = segment.storage.device
        selected = inside.nonzero(as_tuple=True)[0]
        new = values[selected].view(segment.storage.dtype).to(device)
        places.append(Place(segment.storage, index.to(device), selected, new))
    return MappedPatch(patch, places)
