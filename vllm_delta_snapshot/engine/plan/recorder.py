# SPDX-License-Identifier: Apache-2.0
"""Watch a model's loader: what it would write into live storage, and from where.

The loader runs over stand-ins: tensors with addresses but no memory behind them. A torch dispatch mode sees every
operation that would write into live storage and keeps it from happening. A plain copy from a view of a stand-in into a
view of a live tensor becomes a piece of the plan; anything else is a problem of the tensors it would touch.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import gc
import mmap
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm_delta_snapshot.engine.bits import flat_storage, torch_dtype_of
from vllm_delta_snapshot.host.places import Piece, Segment
from vllm_delta_snapshot.types import TensorSpec

__all__ = ["LiveStorage", "LiveStorages", "Recorder", "StandIns", "tensors_of"]

_NORESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000)
_CONVERTIBLE: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def tensors_of(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return every parameter and buffer with its name."""
    return [*model.named_parameters(), *model.named_buffers()]


@dataclass(frozen=True, slots=True, eq=False)
class LiveStorage:
    """A storage of the live model, seen as elements of one type.

    Attributes:
        flat: all of it, as integers of the element's width.
        dtype: the type of its elements.
    """

    flat: torch.Tensor
    dtype: torch.dtype


class LiveStorages:
    """The storages of a model's parameters and buffers, numbered as they are first written.

    Args:
        model: the live model.
        reasons: by address of a storage, why its content is not the checkpoint's.

    Attributes:
        storages: those that have a number.
    """

    def __init__(self, model: torch.nn.Module, reasons: Mapping[int, str]) -> None:
        self.storages: list[LiveStorage] = []
        self._reasons = reasons
        self._numbers: dict[tuple[int, torch.dtype], int] = {}
        self._addresses = {t.untyped_storage().data_ptr() for _, t in tensors_of(model) if t.numel()}

    def holds(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor is a view of one of them."""
        return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in self._addresses

    def number(self, tensor: torch.Tensor) -> int:
        """Return the number of a view's storage."""
        key = (tensor.untyped_storage().data_ptr(), tensor.dtype)
        if key not in self._numbers:
            self._numbers[key] = len(self.storages)
            self.storages.append(LiveStorage(flat_storage(tensor.detach()), tensor.dtype))
        return self._numbers[key]

    def adopt(self, storages: Sequence[LiveStorage]) -> None:
        """Take over storages that have numbers already, with these."""
        for storage in storages:
            self._numbers[storage.flat.untyped_storage().data_ptr(), storage.dtype] = len(self.storages)
            self.storages.append(storage)

    def reason(self, tensor: torch.Tensor) -> str | None:
        """Return why a view's content is not the checkpoint's; ``None`` if it is."""
        return self._reasons.get(tensor.untyped_storage().data_ptr())


class StandIns:
    """Tensors with the shapes and addresses of a checkpoint's, in memory that is reserved but never touched.

    Args:
        specs: the tensors of the checkpoint.

    Attributes:
        tensors: by name.
    """

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._maps: dict[str, mmap.mmap] = {}
        ranges: list[tuple[int, int, str]] = []
        for spec in specs:
            dtype = torch_dtype_of(spec.element.torch_name)
            if spec.numel == 0:
                self.tensors[spec.name] = torch.empty(spec.shape, dtype=dtype)
                continue
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
            memory = mmap.mmap(-1, spec.num_bytes, flags=flags)
            with contextlib.suppress(AttributeError, OSError):  # or one read page would count for its neighbours
                memory.madvise(mmap.MADV_NOHUGEPAGE)
            tensor = torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(spec.shape)
            self._maps[spec.name] = memory
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

    def unread(self, names: Iterable[str]) -> frozenset[str]:
        """Return which of some tensors a loader that has ended never read, in whatever way, and did not put aside.

        The memory tells: no page of it is there. Where the system does not say so, nothing is returned. Gives these
        stand-ins up.
        """
        left: dict[str, weakref.ref[mmap.mmap]] = {}
        for name in names:
            if name in self._maps and not _is_touched(self.tensors[name]):
                left[name] = weakref.ref(self._maps[name])
                del self.tensors[name], self._maps[name]
        if any(memory() is not None for memory in left.values()):
            gc.collect()
        return frozenset(name for name, memory in left.items() if memory() is None)


def _is_touched(tensor: torch.Tensor) -> bool:
    """Say whether any page of a mapped tensor's memory was ever read or written, or that cannot be told."""
    size = tensor.nbytes
    pages = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
    try:
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(size), pages)
    except (AttributeError, OSError):
        return True
    return bool(failed) or any(bytes(pages))


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own base is untyped
    """Sees every operation; executes those that do not write into live storage.

    Args:
        stand_ins: where copies come from.
        live: where they go.

    Attributes:
        pieces: by checkpoint name, what is copied where.
        problems: by checkpoint name, why it has no exact place.
    """

    def __init__(self, stand_ins: StandIns, live: LiveStorages) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pieces: dict[str, list[Piece]] = {}
        self.problems: dict[str, str] = {}
        self._stand_ins = stand_ins
        self._live = live
        self._blank: set[str] = set()
        self._used: set[str] = set()

    def concerns(self, name: str) -> bool:
        """Say whether the loader did anything with a tensor but look at it from another side.

        What is kept from happening, and what comes to a tensor without memory, reads nothing; it counts all the same.
        """
        return name in self._used or name in self.problems

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_view(func):
            given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
            self._used.update(found[0] for found in map(self._stand_ins.find, given) if found)
        all_written = written_by(func, args, kwargs)
        written = [tensor for tensor in all_written if self._live.holds(tensor)]
        if not written:
            sources = [tensor for tensor in all_written if self._stand_ins.find(tensor)]
            for tensor in sources:
                self._replace_source(func, tensor)
            if sources:
                return args[0]
            return func(*args, **kwargs)
        if func is torch.ops.aten.copy_.default:
            self._record(args[0], args[1])
        else:
            reason = f"its loader writes by {func}, not by a copy"
            self._blame_sources((*args, *kwargs.values()), reason)
            for tensor in written:
                self._blame_places(tensor, reason)
        return args[0] if args else None

    def _replace_source(self, func: Any, tensor: torch.Tensor) -> None:
        """Note that the loader writes into a tensor that it was given."""
        found = self._stand_ins.find(tensor)
        assert found is not None  # noqa: S101 - the caller looked
        name, offset = found
        is_whole = offset == 0 and tensor.numel() == self._stand_ins.tensors[name].numel()
        if func is torch.ops.aten.zero_.default and is_whole:
            # Some ranks load zeros where one rank alone must add a bias: it is not on this rank.
            self._blank.add(name)
        else:
            self.problems.setdefault(name, f"its loader changes it by {func} before copying it")

    def _record(self, target: torch.Tensor, source: torch.Tensor) -> None:
        found = self._stand_ins.find(source)
        if found is None:
            # Which tensor this was cannot be told; it stays without a place, which is a problem of its own. But what
            # it overwrites is not a plain copy any more: some loaders compute on the weight after they have copied.
            self._blame_places(target, "its loader computes on the weight after copying it")
            return
        name, byte_offset = found
        if name in self._blank:
            self._blame_places(target, "its loader copies twice to the same place")
            return
        reason = self._live.reason(target) or why_not_exact(target, source)
        if reason:
            self.problems.setdefault(name, reason)
            return
        segment = Segment(
            self._live.number(target),
            tuple(source.shape),
            byte_offset // source.element_size(),
            tuple(source.stride()),
            int(target.storage_offset()),
            tuple(target.stride()),
        )
        if not segment.is_nested:
            self.problems.setdefault(name, "its loader repeats elements")
            return
        self.pieces.setdefault(name, []).append(segment)

    def _blame_sources(self, values: Sequence[Any], reason: str) -> None:
        for value in values:
            found = self._stand_ins.find(value) if isinstance(value, torch.Tensor) else None
            if found:
                self.problems.setdefault(found[0], reason)

    def _blame_places(self, target: torch.Tensor, reason: str) -> None:
        """Blame every tensor that was copied to where `target` lies."""
        number = self._live.number(target)
        first = int(target.storage_offset())
        last = first + sum((size - 1) * step for size, step in zip(target.shape, target.stride(), strict=True))
        for name, pieces in self.pieces.items():
            for piece in pieces:
                if piece.storage == number and piece.extent[0] <= last and piece.extent[1] >= first:
                    self.problems.setdefault(name, reason)


def _is_view(func: Any) -> bool:
    """Say whether an operation only returns other views of what it is given."""
    returns = func._schema.returns
    return bool(returns) and all(of.alias_info is not None and not of.alias_info.is_write for of in returns)


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a torch operation writes, by its schema."""
    written = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            values = value if isinstance(value, (list, tuple)) else [value]
            written += [item for item in values if isinstance(item, torch.Tensor)]
    return written


def why_not_exact(target: torch.Tensor, source: torch.Tensor) -> str | None:
    """Say why a copy does not put each element in one place, unchanged or converted by its type alone."""
    if target.dtype != source.dtype and not (target.dtype in _CONVERTIBLE and source.dtype in _CONVERTIBLE):
        return f"it is {source.dtype} in the checkpoint but {target.dtype} in the engine"
    if target.shape != source.shape:
        return f"its loader spreads {list(source.shape)} over {list(target.shape)}"
    return None
