# SPDX-License-Identifier: Apache-2.0
"""An update's lanes on the device of the live weights: old values gathered, new values in the type of the storage.

Made before the pause. Where the engine keeps a tensor in a wider or narrower type than the checkpoint, new values are
converted as the model's loader converts them, by torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from vllm_delta_snapshot.dtypes import dtype_of
from vllm_delta_snapshot.engine.bits import bits_of, integer_type, torch_dtype_of
from vllm_delta_snapshot.engine.live import gather, scatter, to_device
from vllm_delta_snapshot.engine.load_plan import LoadPlan
from vllm_delta_snapshot.errors import ApplyError, BaseMismatch
from vllm_delta_snapshot.format.digest import seeded_digests
from vllm_delta_snapshot.stage.mapping import Lane
from vllm_delta_snapshot.stage.places import Box

__all__ = ["LiveLane", "RunDigest", "digest_old", "in_checkpoint_type", "ready_lane"]

_EXACT: Final = {
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float64),
    (torch.float16, torch.float64),
    (torch.float32, torch.float64),
}
"""Conversions that lose nothing, so that the checkpoint's bits can be had back."""

_SPOTS: Final = 1024

RunDigest = tuple[str, Box, int | None]
"""A tensor, which of its elements a worker holds, and the digest of the touched ones (``None``: unknown)."""


@dataclass(frozen=True, slots=True, eq=False)
class LiveLane:
    """A lane that only has to be written.

    Attributes:
        lane: as it was staged.
        flat: the live storage, flat, as integers.
        index: positions in it, on its device.
        new: the new bits, on its device.
        old: the bits that were there when this was made, on its device.
    """

    lane: Lane
    flat: torch.Tensor
    index: torch.Tensor
    new: torch.Tensor
    old: torch.Tensor

    def write(self) -> bool:
        """Write the new bits; say whether they are there."""
        return scatter(self.flat, self.index, self.new)

    def undo(self) -> bool:
        """Write the old bits; say whether they are there."""
        return scatter(self.flat, self.index, self.old)

    def holds_new(self) -> bool:
        """Say whether the new bits are there."""
        return bool(torch.equal(gather(self.flat, self.index), self.new))

    def holds_old(self) -> bool:
        """Say whether the old bits are there."""
        return bool(torch.equal(gather(self.flat, self.index), self.old))

    def seems_old(self) -> bool:
        """Say so of positions spread over the lane: enough to notice that something else wrote this storage."""
        step = max(1, self.index.numel() // _SPOTS)
        return bool(torch.equal(gather(self.flat, self.index[::step].contiguous()), self.old[::step]))


def ready_lane(plan: LoadPlan, lane: Lane) -> LiveLane:
    """Gather what a lane will overwrite, and bring it to the device of the weights. Writes nothing.

    Raises:
        ApplyError: it does not fit the storage.
    """
    storage = plan.storages[lane.storage]
    flat = storage.flat
    if lane.size and not 0 <= int(lane.index.min()) <= int(lane.index.max()) < flat.numel():
        raise ApplyError(
            "a mapped update does not fit the live weights",
            tensor=lane.runs[0].name,
            expected=f"positions below {flat.numel()}",
            found=f"{int(lane.index.min())} to {int(lane.index.max())}",
        )
    index = to_device(lane.index, flat.device)
    new = to_device(lane.values, flat.device)
    source = torch_dtype_of(dtype_of(lane.dtype).torch_name)
    if source is not storage.dtype:
        new = new.view(source).to(storage.dtype)
    new = new.view(flat.dtype)
    return LiveLane(lane, flat, index, new, gather(flat, index))


def digest_old(plan: LoadPlan, live: LiveLane) -> Sequence[RunDigest]:
    """Return the digests of what a lane will overwrite, run by run, in the checkpoint's type.

    Raises:
        BaseMismatch: a live value is none that the checkpoint's type has.
    """
    lane = live.lane
    places = [plan.places.pieces[run.name][run.piece] for run in lane.runs]
    old = in_checkpoint_type(live.old, lane.dtype, plan.storages[lane.storage].dtype)
    if old is None:
        return [(run.name, place.box, None) for run, place in zip(lane.runs, places, strict=True)]
    digests = seeded_digests(lane.seeds, bits_of(old), lane.starts)
    return [(run.name, place.box, int(d)) for run, place, d in zip(lane.runs, places, digests, strict=True)]


def in_checkpoint_type(live: torch.Tensor, dtype: str, live_dtype: torch.dtype) -> torch.Tensor | None:
    """Return live bits as bits of the checkpoint's type; ``None`` if the engine's type has lost some.

    Args:
        live: bits, as integers.
        dtype: the safetensors code of the checkpoint's type.
        live_dtype: the type of the live weights.

    Raises:
        BaseMismatch: a live value is none that the checkpoint's type has.
    """
    source = torch_dtype_of(dtype_of(dtype).torch_name)
    if source is live_dtype:
        return live
    if (source, live_dtype) not in _EXACT:
        return None
    if (source, live_dtype) == (torch.bfloat16, torch.float32):
        # The upper half of the bits, so that even a NaN's payload comes back.
        narrow_bits = (live >> 16).to(torch.int16)
        if bool((live & 0xFFFF).any()):
            raise _not_of_the_type(source, live_dtype)
        return narrow_bits
    wide = live.contiguous().view(live_dtype)
    narrow = wide.to(source)
    is_lost = narrow.to(live_dtype).view(live.dtype) != live
    if is_lost.any():
        if wide[is_lost].isnan().all():
            return None  # which NaN it was does not survive another type
        raise _not_of_the_type(source, live_dtype)
    return narrow.view(integer_type(source))


def _not_of_the_type(source: torch.dtype, live_dtype: torch.dtype) -> BaseMismatch:
    return BaseMismatch(
        "live weights are not ones that the checkpoint's type has; they were changed by something else",
        expected=f"values of {source}",
        found=f"others, in {live_dtype}",
        hint="Restart the engine; it catches up by itself.",
    )
