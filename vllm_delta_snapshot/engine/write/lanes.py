# SPDX-License-Identifier: Apache-2.0
"""An update's lanes on the device of the live weights: old values gathered, new values in the type of the storage.

Made before the pause. Differences become new values here, added to the old ones. Where the engine keeps a tensor in a
wider or narrower type than the checkpoint, new values are converted as the model's loader converts them, by torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from vllm_delta_snapshot.dtypes import Bits, dtype_of
from vllm_delta_snapshot.engine.bits import bits_of, integer_type, keeps_bits, torch_dtype_of
from vllm_delta_snapshot.engine.plan.live import gather, gather_all, scatter_all, to_device
from vllm_delta_snapshot.engine.plan.load_plan import LoadPlan
from vllm_delta_snapshot.engine.threads import run_each
from vllm_delta_snapshot.errors import ApplyError, BaseMismatch
from vllm_delta_snapshot.format.digest import seeded_digests
from vllm_delta_snapshot.host.mapping import Lane
from vllm_delta_snapshot.host.places import Box

__all__ = [
    "LiveLane",
    "RunDigest",
    "digest_runs",
    "in_checkpoint_type",
    "in_live_type",
    "ready_lanes",
    "seem_old",
    "undo_lanes",
    "write_lanes",
]

_SPOTS: Final = 16

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
        spots: some positions spread over `index`, and what was there.
        served: old and new bits in the checkpoint's type, on the host; ``None`` where the storage's has lost some.
    """

    lane: Lane
    flat: torch.Tensor
    index: torch.Tensor
    new: torch.Tensor
    old: torch.Tensor
    spots: tuple[torch.Tensor, torch.Tensor]
    served: tuple[Bits, Bits] | None

    def holds_new(self) -> bool:
        """Say whether the new bits are there."""
        return bool(torch.equal(gather(self.flat, self.index), self.new))

    def holds_old(self) -> bool:
        """Say whether the old bits are there."""
        return bool(torch.equal(gather(self.flat, self.index), self.old))


def write_lanes(lanes: Sequence[LiveLane]) -> list[bool]:
    """Write the new bits of every lane; say of each whether they are there."""
    return scatter_all([(lane.flat, lane.index, lane.new) for lane in lanes])


def undo_lanes(lanes: Sequence[LiveLane]) -> bool:
    """Write the old bits of every lane; say whether they are there."""
    return all(scatter_all([(lane.flat, lane.index, lane.old) for lane in lanes]))


def seem_old(lanes: Sequence[LiveLane]) -> bool:
    """Say whether the old bits are at some positions of every lane: enough to notice that something else wrote."""
    return all(bool(torch.equal(lane.flat.index_select(0, lane.spots[0]), lane.spots[1])) for lane in lanes)


def ready_lanes(plan: LoadPlan, lanes: Sequence[Lane]) -> list[LiveLane]:
    """Gather what lanes will overwrite, and bring them to the device of the weights. Writes nothing.

    Raises:
        ApplyError: a lane does not fit its storage.
    """
    brought = run_each(lambda lane: _brought(plan, lane), lanes)
    old = gather_all(brought)
    return run_each(
        lambda item: _ready(item[0], *item[1], item[2], plan.storages[item[0].storage].dtype),
        list(zip(lanes, brought, old, strict=True)),
    )


def _ready(lane: Lane, flat: torch.Tensor, index: torch.Tensor, old: torch.Tensor, live_dtype: torch.dtype) -> LiveLane:
    """Work out the new bits, in the type of the storage."""
    before = in_checkpoint_type(old, lane.dtype, live_dtype)
    if lane.relative is not None and before is None:
        raise ApplyError(
            "differences cannot be added to weights that the engine keeps in another type",
            tensor=lane.runs[0].name,
            expected=lane.dtype,
            found=live_dtype,
            hint="Initialize the weight transfer again: such an engine asks the stager for absolute values.",
        )
    served = None if before is None else bits_of(before)
    values = lane.values if served is None else lane.resolve(served)
    new = in_live_type(values, lane.dtype, live_dtype, flat.device)
    if lane.relative is None:
        new = new.clone()  # out of the mapped file, so that its pages are not first touched in the pause
    return LiveLane(lane, flat, index, new, old, _spots(index, old), None if served is None else (served, values))


def _spots(index: torch.Tensor, old: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    step = max(1, index.numel() // _SPOTS)
    return index[::step].contiguous(), old[::step].contiguous()


def _brought(plan: LoadPlan, lane: Lane) -> tuple[torch.Tensor, torch.Tensor]:
    """Return storage and positions."""
    flat = plan.storages[lane.storage].flat
    if lane.size and not 0 <= int(lane.index.min()) <= int(lane.index.max()) < flat.numel():
        raise ApplyError(
            "a mapped update does not fit the live weights",
            tensor=lane.runs[0].name,
            expected=f"positions below {flat.numel()}",
            found=f"{int(lane.index.min())} to {int(lane.index.max())}",
        )
    return flat, to_device(lane.index, flat.device)


def digest_runs(plan: LoadPlan, live: LiveLane, *, is_new: bool = False) -> Sequence[RunDigest]:
    """Return the digests of what a lane overwrites, or of what it writes, run by run, in the checkpoint's type."""
    lane = live.lane
    places = [plan.places.pieces[run.name][run.piece] for run in lane.runs]
    if live.served is None:
        return [(run.name, place.box, None) for run, place in zip(lane.runs, places, strict=True)]
    digests = seeded_digests(lane.seeds, live.served[is_new], lane.starts)
    return [(run.name, place.box, int(d)) for run, place, d in zip(lane.runs, places, digests, strict=True)]


def in_live_type(values: Bits, dtype: str, live_dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return bits of the checkpoint's type as the engine keeps them, converted as the model's loader would.

    Args:
        values: bits, on the host; on the CPU the result may share their memory.
        dtype: the safetensors code of the checkpoint's type.
        live_dtype: the type of the live weights.
        device: where they are.

    Returns:
        The bits, as integers of the live type's width.
    """
    source = torch_dtype_of(dtype_of(dtype).torch_name)
    new = to_device(values, device)
    return new if source is live_dtype else new.view(source).to(live_dtype).view(integer_type(live_dtype))


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
    if not keeps_bits(source, live_dtype):
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
        hint="Write its weights anew: delta-snapshot repair --server URL; or restart the engine.",
    )
