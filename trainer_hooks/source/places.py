# SPDX-License-Identifier: Apache-2.0
"""Places: which elements of a parameter this rank holds, in each of the frameworks that shard them.

A place knows the full shape, the positions held, and how to read them now. Nothing here communicates or moves a
weight: DTensor's offsets follow from mesh and placements, FSDP1 and DeepSpeed keep theirs beside the parameter. Both of
these are imported by nobody here; their parameters are known by what they carry.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from trainer_hooks.source.items import frozen_fingerprint, refuse_freed, refuse_unreadable
from trainer_hooks.source.shares import Indices, Runs
from vllm_delta_snapshot.errors import SourceError

__all__ = ["Held", "Place", "fsdp1_places", "moved", "place_of", "reshard"]


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter or buffer in its module, to be looked up anew each time: wrappers replace it.

    Attributes:
        module: the module.
        attribute: its name there.
        name: its clean name in the model.
    """

    module: nn.Module
    attribute: str
    name: str

    def now(self) -> torch.Tensor:
        """Return it as it is now."""
        tensor = getattr(self.module, self.attribute)
        assert isinstance(tensor, torch.Tensor)  # noqa: S101 - torch registers nothing else
        return tensor


class Place(Protocol):
    """Where one parameter lies on this rank."""

    @property
    def shape(self) -> torch.Size:
        """Its full shape."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The type of its elements."""
        ...

    @property
    def identity(self) -> Hashable:
        """Equal for tied parameters."""
        ...

    @property
    def layout(self) -> tuple[object, ...]:
        """What `runs` follows from: equal while the same positions are held in the same way."""
        ...

    def runs(self) -> Runs:
        """Return the flat positions that this rank holds."""
        ...

    def load(self) -> torch.Tensor:
        """Return the elements there, flat: a view where it can be.

        Raises:
            SourceError: they are not there now.
        """
        ...

    def fingerprint(self) -> Hashable | None:
        """Return what stays equal while a frozen parameter is not written, or ``None``."""
        ...


def place_of(held: Held, flat: Mapping[tuple[int, str], Place]) -> Place:
    """Return the place of a parameter or buffer.

    Args:
        held: the parameter.
        flat: those that `fsdp1_places` found.

    Raises:
        SourceError: it is sharded in a way that is not understood.
    """
    known = flat.get((id(held.module), held.attribute))
    if known is not None:
        return known
    tensor = held.now()
    if _is_dtensor(tensor):
        return _DTensorPlace(held)
    if hasattr(tensor, "ds_shape"):
        return _Zero3Place(held)
    refuse_unreadable(held.name, tensor)
    return _WholePlace(held)


def reshard(module: nn.Module) -> None:
    """Let FSDP2 free what it gathered for a forward pass, so that parameters are shards again. No communication."""
    for inner in module.modules():
        if any(kind.__name__ == "FSDPModule" for kind in type(inner).__mro__):
            inner.reshard()  # type: ignore[operator]


class _WholePlace:
    """A parameter that every rank has whole."""

    def __init__(self, held: Held) -> None:
        self._held = held
        tensor = held.now()
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.identity: Hashable = id(tensor)
        self.layout = ("whole on every rank", f"shape {list(tensor.shape)}")

    def runs(self) -> Runs:
        return Runs.interval(0, math.prod(self.shape))

    def load(self) -> torch.Tensor:
        tensor = self._held.now()
        refuse_unreadable(self._held.name, tensor)
        return tensor.detach().reshape(-1)

    def fingerprint(self) -> Hashable | None:
        tensor = self._held.now()
        is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        return frozen_fingerprint(tensor) if is_frozen else None


class _DTensorPlace:
    """FSDP2, tensor parallel, HSDP: any DTensor whose placements replicate or shard."""

    def __init__(self, held: Held) -> None:
        self._held = held
        tensor: Any = held.now()
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.identity: Hashable = id(tensor)
        self._mesh, self._placements = tensor.device_mesh, tensor.placements
        self.layout = ("a DTensor", f"shape {list(tensor.shape)}", self._placements, self._mesh)

    def runs(self) -> Runs:
        if self._mesh.get_coordinate() is None:
            return Runs.interval(0, 0)
        return Runs.box(self.shape, [self._indices(dim) for dim in range(len(self.shape))])

    def _indices(self, dim: int) -> Indices:
        """Shard the numbers of one dimension as it is sharded: exact also for strided shards that are no box."""
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
        from torch.distributed.tensor.placement_types import _StridedShard

        placements: list[Any] = []
        for placement in self._placements:
            if not isinstance(placement, Replicate | Shard | _StridedShard):
                raise SourceError(
                    "the parameter is sharded in a way that is not supported",
                    tensor=self._held.name,
                    expected="placements that replicate or shard",
                    found=placement,
                )
            if getattr(placement, "dim", None) != dim:
                placements.append(Replicate())
            elif isinstance(placement, _StridedShard):
                placements.append(_StridedShard(0, split_factor=placement.split_factor))
            else:
                placements.append(Shard(0))
        numbers = torch.arange(self.shape[dim], device=self._mesh.device_type)
        # Nobody's data is taken, so nothing is sent: each rank cuts its own.
        local: Any = distribute_tensor(numbers, self._mesh, placements, src_data_rank=None)
        found: Indices = local.to_local().cpu().numpy()
        if found.size > 1 and bool(np.any(np.diff(found) <= 0)):
            raise SourceError("the parameter's shard is not in order", tensor=self._held.name, found=self._placements)
        return found

    def load(self) -> torch.Tensor:
        tensor: Any = self._held.now()
        with torch.no_grad():
            local: torch.Tensor = tensor.to_local()
        refuse_freed(self._held.name, local)
        return local.detach().reshape(-1)

    def fingerprint(self) -> Hashable | None:
        tensor: Any = self._held.now()
        return None if tensor.requires_grad else frozen_fingerprint(tensor._local_tensor)


class _Zero3Place:
    """DeepSpeed ZeRO-3: equal parts of the flat parameter, the last one padded."""

    def __init__(self, held: Held) -> None:
        self._held = held
        tensor: Any = held.now()
        self.shape, self.identity = torch.Size(tensor.ds_shape), id(tensor)
        part = self._part()
        self.dtype = part.dtype
        self.layout = ("partitioned by ZeRO-3", f"shape {list(self.shape)}", self._interval())

    def _part(self) -> torch.Tensor:
        tensor: Any = self._held.now()
        part = getattr(tensor, "ds_tensor", None)
        found = None
        if part is None:
            found = "no ds_tensor"
        elif str(getattr(part, "final_location", "none")).lower().endswith("nvme"):
            found = "offloaded to NVMe"
        elif getattr(tensor, "ds_secondary_tensor", None) is not None:
            found = "a secondary partition (hpZ)"
        elif hasattr(part, "ds_quant_scale"):
            found = "quantized weights"
        if found:
            raise SourceError(
                "the parameter is partitioned in a way that is not supported", tensor=self._held.name, found=found
            )
        assert isinstance(part, torch.Tensor)  # noqa: S101 - as DeepSpeed has it
        return part

    def _interval(self) -> tuple[int, int]:
        tensor: Any = self._held.now()
        size = int(getattr(tensor.ds_tensor, "ds_numel", tensor.ds_tensor.numel()))
        start = dist.get_rank(group=tensor.ds_process_group) * size
        return start, max(start, min(start + size, int(tensor.ds_numel)))

    def runs(self) -> Runs:
        return Runs.interval(*self._interval())

    def load(self) -> torch.Tensor:
        start, stop = self._interval()
        part = self._part()
        refuse_freed(self._held.name, part)
        # What is behind is padding, with whatever was in memory.
        held = part.detach().reshape(-1)[: stop - start]
        self._refuse_written_copy(held, start, stop)
        return held

    def _refuse_written_copy(self, held: torch.Tensor, start: int, stop: int) -> None:
        """Small parameters stay gathered: what is written into such a copy is computed with, but not in the part."""
        gathered = self._held.now().detach()
        if gathered.numel() != math.prod(self.shape) or gathered.dtype != held.dtype:
            return
        copy = gathered.reshape(-1)[start:stop]
        if copy.device == held.device and not torch.equal(copy.view(torch.uint8), held.view(torch.uint8)):
            raise SourceError(
                "the gathered copy of the parameter has other values than its partition, which is what is trained",
                tensor=self._held.name,
                found="it was written outside of deepspeed.zero.GatheredParameters",
                hint="Write it inside, with modifier_rank; or into the partitions.",
            )

    def fingerprint(self) -> Hashable | None:
        return None


class _FlatPlace:
    """FSDP1: a slice of the flat parameter that its unit made of several."""

    def __init__(self, handle: Any, number: int, name: str) -> None:
        self._handle, self._number, self._name = handle, number, name
        self.shape = torch.Size(handle.flat_param._shapes[number])
        self.dtype: torch.dtype = handle.flat_param.dtype
        self.identity: Hashable = (id(handle), number)
        bounds = (self._info.intra_param_start_idx, self._info.intra_param_end_idx, self._info.in_shard)
        self.layout = ("flattened by FSDP", f"shape {list(self.shape)}", handle.uses_sharded_strategy, bounds)

    @property
    def _info(self) -> Any:
        return self._handle.flat_param._shard_param_infos[self._number]

    def runs(self) -> Runs:
        info = self._info
        if not self._handle.uses_sharded_strategy:
            return Runs.interval(0, math.prod(self.shape))
        if not info.in_shard:
            return Runs.interval(0, 0)
        return Runs.interval(info.intra_param_start_idx, info.intra_param_end_idx + 1)

    def load(self) -> torch.Tensor:
        flat, count = self._handle.flat_param, self.runs().size
        if self._handle.uses_sharded_strategy and not self._handle.is_sharded(flat):
            # Gathered just now, perhaps in a lower precision, as the root is after a forward pass; its shard is kept.
            shard: torch.Tensor = flat._local_shard
            start = self._info.offset_in_shard if count else 0
            return shard.detach()[start : start + count]
        parameter: torch.Tensor = flat._params[self._number]
        if parameter.numel() != count:
            raise moved(self._name, f"{count} elements", parameter.numel())
        return parameter.detach().reshape(-1)

    def fingerprint(self) -> Hashable | None:
        return None


def fsdp1_places(root: nn.Module) -> dict[tuple[int, str], Place]:
    """Return the places of all parameters that FSDP1 has flattened, by module and attribute.

    Raises:
        SourceError: without ``use_orig_params=True``, or a torch whose FSDP1 is another.
    """
    places: dict[tuple[int, str], Place] = {}
    for handle in _handles(root):
        flat = handle.flat_param
        if not getattr(handle, "_use_orig_params", False):
            raise SourceError(
                "FSDP keeps its parameters flattened, so which weights are whose cannot be told",
                hint="Wrap with use_orig_params=True.",
            )
        try:
            by_holder: dict[tuple[int, str], Place] = {}
            for number, info in enumerate(flat._param_infos):
                name = f"{info.module_name}.{info.param_name}"
                by_holder[id(info.module), info.param_name] = _FlatPlace(handle, number, name)
            for info in flat._shared_param_infos:
                by_holder[id(info.module), info.param_name] = by_holder[id(info.prim_module), info.prim_param_name]
        except AttributeError as error:
            raise SourceError("this torch's FSDP keeps its parameters in another way", found=error) from error
        places |= by_holder
    return places


def _handles(root: nn.Module) -> Iterator[Any]:
    for inner in root.modules():
        if type(inner).__name__ == "FullyShardedDataParallel" and getattr(inner, "_handle", None) is not None:
            yield inner._handle


def _is_dtensor(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def moved(name: str, expected: object, found: object) -> SourceError:
    """Return the error for a parameter that is held in another way than in the plan."""
    return SourceError(
        "the parameter is held in another way than when the publisher was started",
        tensor=name,
        expected=expected,
        found=found,
        hint="Publish between steps, and start a new publisher after a change of the parallel layout.",
    )
