# SPDX-License-Identifier: Apache-2.0
"""The load plan: where each checkpoint element lives in this worker, recorded by watching the model's own loader.

The model's `load_weights` is run over stand-ins: tensors with addresses but no memory behind them. A torch dispatch
mode sees every operation that would write into live storage and keeps it from happening; a plain copy from a view of a
stand-in into a view of a live tensor becomes a `Segment`, anything else a problem of that tensor. So name mapping,
fusing, slicing and padding are the model's own, whatever the model, and no weight changes while recording.

Invariant: a tensor has a place here only if each of its elements that this worker holds is one unconverted copy.
"""

from __future__ import annotations

import bisect
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_delta_snapshot.engine.bits import flat_storage, torch_dtype_of
from vllm_delta_snapshot.errors import ApplyError
from vllm_delta_snapshot.types import TensorSpec

__all__ = ["LoadPlan", "PlanSummary", "Segment", "record_load_plan"]

_NORESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000)


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One copy that the loader makes: a strided view of the checkpoint tensor into a strided view of live storage.

    Attributes:
        storage: the live storage, flat, as integers.
        shape: the shape of both views.
        source_offset, source_stride: the view of the checkpoint tensor, in elements.
        target_offset, target_stride: the view of the storage, in elements.
    """

    storage: torch.Tensor
    shape: tuple[int, ...]
    source_offset: int
    source_stride: tuple[int, ...]
    target_offset: int
    target_stride: tuple[int, ...]

    def map(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map checkpoint positions to storage positions.

        Args:
            positions: int64, shape ``(k,)``, any device.

        Returns:
            A mask of the positions that lie in this segment, shape ``(k,)``, and the storage positions of those.
        """
        rest = positions - self.source_offset
        inside = rest >= 0
        target = torch.full_like(rest, self.target_offset)
        dims = sorted(zip(self.source_stride, self.shape, self.target_stride, strict=True), reverse=True)
        for source_stride, size, target_stride in dims:
            if size == 1:
                continue
            index = torch.div(rest, source_stride, rounding_mode="floor")
            rest = rest - index * source_stride
            inside &= index < size
            target += index * target_stride
        inside &= rest == 0
        return inside, target[inside]


Box = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Which elements of a checkpoint tensor a segment takes: offset, shape and stride."""

Fingerprint = tuple[tuple[str, int, torch.Size, tuple[int, ...], torch.dtype], ...]
"""Where a model's tensors lie: name, address, shape, stride, type."""


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """A worker's plan without the places, to tell other workers.

    Attributes:
        boxes: by checkpoint name, which elements have an exact place there.
        problems: why a tensor has none.
    """

    boxes: Mapping[str, frozenset[Box]]
    problems: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Where every checkpoint tensor goes in this worker.

    Attributes:
        segments: by checkpoint name; a tensor without any is not on this worker.
        problems: by checkpoint name, why a tensor has no exact place.
        fingerprint: where the model's tensors lay when this was recorded.
    """

    segments: dict[str, list[Segment]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    fingerprint: Fingerprint = ()

    def is_current(self, model: torch.nn.Module) -> bool:
        """Say whether the model's tensors still lie where they lay; else the places point into dead memory."""
        return self.fingerprint == fingerprint_of(model)

    def is_exact(self, name: str) -> bool:
        """Say whether a tensor is on this worker, and every element by plain copies."""
        return bool(self.segments.get(name)) and name not in self.problems

    def summary(self) -> PlanSummary:
        """Return the plan without places, to tell other workers."""
        boxes = {
            name: frozenset((s.source_offset, s.shape, s.source_stride) for s in segments)
            for name, segments in self.segments.items()
            if self.is_exact(name)
        }
        return PlanSummary(boxes, dict(self.problems))


def fingerprint_of(model: torch.nn.Module) -> Fingerprint:
    """Return where a model's tensors lie. Cheap: no tensor is read."""
    return tuple((name, t.data_ptr(), t.shape, tuple(t.stride()), t.dtype) for name, t in _tensors(model))


def record_load_plan(model: Any, specs: Mapping[str, TensorSpec]) -> LoadPlan:
    """Run the model's loader over stand-ins for every tensor of the checkpoint. Changes no weight.

    Args:
        model: the live `torch.nn.Module`; its `load_weights` takes pairs of checkpoint name and tensor.
        specs: the tensors of the checkpoint.

    Raises:
        ApplyError: the loader fails on stand-ins, or rebinds parameters instead of writing into them.
    """
    stand_ins = _StandIns(specs.values())
    live = _LiveStorages(model)
    recorder = _Recorder(stand_ins, live, LoadPlan(fingerprint=fingerprint_of(model)))
    before = {name: tensor.data for name, tensor in _tensors(model)}
    try:
        with torch.no_grad(), recorder:
            model.load_weights(iter(stand_ins.tensors.items()))
    except Exception as error:
        raise ApplyError(
            "the model's loader fails on a dry run, so its weights cannot be patched",
            found=f"{type(error).__name__}: {error}",
        ) from error
    finally:
        rebound = _put_back(model, before)
    if rebound:
        raise ApplyError(
            "the model's loader replaces parameters instead of writing into them",
            tensor=", ".join(rebound[:5]),
            hint="This model cannot be updated in place.",
        )
    return recorder.plan


def _tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _put_back(model: torch.nn.Module, before: Mapping[str, torch.Tensor]) -> list[str]:
    rebound = []
    for name, tensor in _tensors(model):
        old = before.get(name)
        if old is not None and (old.data_ptr(), old.shape) != (tensor.data_ptr(), tensor.shape):
            tensor.data = old
            rebound.append(name)
    return rebound


class _StandIns:
    """Tensors with the shapes and addresses of a checkpoint's, in memory that is reserved but never touched."""

    def __init__(self, specs: Any) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._maps: list[mmap.mmap] = []
        ranges: list[tuple[int, int, str]] = []
        for spec in specs:
            dtype = torch_dtype_of(spec.element.torch_name)
            if spec.numel == 0:
                self.tensors[spec.name] = torch.empty(spec.shape, dtype=dtype)
                continue
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
            memory = mmap.mmap(-1, spec.num_bytes, flags=flags)
            tensor = torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(spec.shape)
            self._maps.append(memory)
            self.tensors[spec.name] = tensor
            ranges.append((tensor.data_ptr(), tensor.data_ptr() + spec.num_bytes, spec.name))
        self._ranges = sorted(ranges)
        self._starts = [start for start, _, _ in self._ranges]

    def find(self, tensor: torch.Tensor) -> tuple[str, int] | None:
        """Return the stand-in that a view looks into, and its offset there in bytes."""
        if tensor.device.type != "cpu" or tensor.numel() == 0:
            return None
        address = tensor.data_ptr()
        place = bisect.bisect_right(self._starts, address) - 1
        if place < 0 or address >= self._ranges[place][1]:
            return None
        return self._ranges[place][2], address - self._ranges[place][0]


class _LiveStorages:
    """The storages of a model's parameters and buffers."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._flat: dict[tuple[int, int], torch.Tensor] = {}
        self._pointers: set[int] = set()
        for _, tensor in _tensors(model):
            if tensor.numel():
                self._pointers.add(tensor.untyped_storage().data_ptr())

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in self._pointers

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        key = (tensor.untyped_storage().data_ptr(), tensor.element_size())
        if key not in self._flat:
            self._flat[key] = flat_storage(tensor.detach())
        return self._flat[key]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own base is untyped
    """Sees every operation; executes those that do not write into live storage."""

    def __init__(self, stand_ins: _StandIns, live: _LiveStorages, plan: LoadPlan) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.plan = plan
        self._stand_ins = stand_ins
        self._live = live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        if not any(self._live.holds(tensor) for tensor in written):
            return func(*args, **kwargs)
        if func is torch.ops.aten.copy_.default:
            self._record(args[0], args[1])
        else:
            self._blame_stand_ins((*args, *kwargs.values()), f"its loader writes by {func}, not by a copy")
        return args[0] if args else None

    def _record(self, target: torch.Tensor, source: torch.Tensor) -> None:
        found = self._stand_ins.find(source)
        if found is None:
            # Which tensor this was cannot be told; it stays without a place, which is a problem of its own.
            return
        name, byte_offset = found
        reason = _why_not_exact(target, source)
        if reason:
            self.plan.problems.setdefault(name, reason)
            return
        segment = Segment(
            self._live.flat(target),
            tuple(source.shape),
            byte_offset // source.element_size(),
            source.stride(),
            int(target.storage_offset()),
            target.stride(),
        )
        self.plan.segments.setdefault(name, []).append(segment)

    def _blame_stand_ins(self, values: Sequence[Any], reason: str) -> None:
        for value in values:
            found = self._stand_ins.find(value) if isinstance(value, torch.Tensor) else None
            if found:
                self.plan.problems.setdefault(found[0], reason)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    written = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            values = value if isinstance(value, (list, tuple)) else [value]
            written += [item for item in values if isinstance(item, torch.Tensor)]
    return written


def _why_not_exact(target: torch.Tensor, source: torch.Tensor) -> str | None:
    if target.dtype != source.dtype:
        return f"it is {source.dtype} in the checkpoint but {target.dtype} in the engine"
    if target.shape != source.shape:
        return f"its loader spreads {list(source.shape)} over {list(target.shape)}"
    if any(stride == 0 and size > 1 for stride, size in zip(source.stride(), source.shape, strict=True)):
        return "its loader repeats elements"
    return None
