# SPDX-License-Identifier: Apache-2.0
"""Sources: where the publisher gets its tensors from, under their checkpoint names.

A source yields items. An item is what is read as one: usually one tensor, several where a module keeps them fused. All
are read in every pass, unless whoever made the source promises by a fingerprint that nothing has changed; no source of
ours does so without being told to. An item is read before the source is asked for the next, unless it is said to stay.

Nothing is remembered from one pass to the next that the trainer could change meanwhile: modules are walked anew.
Sharded parameters are refused here: a shard published as if it were the whole would be silently wrong.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trainer_hooks.source.names import CheckpointNames, Form, Names, Part
from vllm_delta_snapshot.errors import SourceError
from vllm_delta_snapshot.types import TensorSpec

__all__ = ["IterableSource", "ModuleSource", "ParameterSource", "SourceItem", "source_of"]

Pairs = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class SourceItem:
    """Tensors that are read together.

    Attributes:
        names: the checkpoint names that `load` yields.
        load: returns the pairs of checkpoint name and full tensor; called at most once a publication. The tensors of a
            list or a tuple are read together; of anything else each is read before the next one is asked for.
        fingerprint: equal fingerprints promise equal values, and what is unchanged by it is not read; ``None`` makes no
            promise.
        forms: shape and dtype of each, where they are known before `load`; else empty. Checked before the first
            publication.
        stays: whether the tensors stay as they are while later items are asked for, so that these may be read at the
            same time. If not, they are read before the source is asked for the next item.
        is_apart: whether a tensor may lie in the memory of another item's only where the two are published as equal.
    """

    names: tuple[str, ...]
    load: Callable[[], Pairs]
    fingerprint: Hashable | None = None
    forms: tuple[Form, ...] = ()
    stays: bool = False
    is_apart: bool = False


@runtime_checkable
class ParameterSource(Protocol):
    """Anything that yields the trainer's weights, again and again."""

    def items(self, specs: Mapping[str, TensorSpec]) -> Iterator[SourceItem]:
        """Yield a fresh pass over the weights.

        Args:
            specs: the tensors of the base checkpoint. Every one of them is yielded exactly once.

        Raises:
            SourceError: the weights cannot be named or read.
        """
        ...


class ModuleSource:
    """A plain `nn.Module`: its parameters and persistent buffers, by their checkpoint names.

    For a transformers model the names are those that `save_pretrained` writes (`source.names`). Tied weights are
    yielded once for every name that the base checkpoint has.

    Args:
        module: the model; wrappers of `torch.compile` and DDP are looked through. With DDP, publish from one rank.
        names: checkpoint names of parameters, where they are not those that transformers would give: a mapping, or a
            function (`trainer_hooks.source.names.Names`).
        skip_frozen: do not read parameters that require no gradient while torch's version counters say that nobody
            wrote them. They miss writes through ``.data`` and through numpy: what is written so is never published.

    Raises:
        SourceError: the module is wrapped in FSDP, or names are given for parameters that it has not.
    """

    def __init__(self, module: nn.Module, names: Names | None = None, *, skip_frozen: bool = False) -> None:
        self._wrapped = module
        self._skip_frozen = skip_frozen
        _refuse_fsdp1(unwrap(module))
        self._names = CheckpointNames(unwrap(module), names)

    def items(self, specs: Mapping[str, TensorSpec]) -> Iterator[SourceItem]:
        """See `ParameterSource.items`.

        Raises:
            SourceError: a parameter is sharded or has no data, or is none of the base checkpoint's.
        """
        module = unwrap(self._wrapped)
        _refuse_fsdp1(module)
        published: set[Hashable] = set()
        yielded: set[str] = set()
        strangers: list[tuple[str, Hashable]] = []
        for name, tensor in module.state_dict(keep_vars=True).items():
            refuse_unreadable(name, tensor)
            identity = _identity(tensor)
            unknown: list[str] = []
            for part in self._names.parts(module, name, tensor):
                new = [key for key in part.forms if key not in specs]
                unknown += new
                if not new:
                    yielded.update(part.forms)
                    yield self._item(part, tensor)
            strangers += [(key, identity) for key in unknown]
            if not unknown:  # all in the checkpoint; or nothing is, says the user
                published.add(identity)
        unknown = [key for key, identity in strangers if identity not in published]
        if unknown:
            raise SourceError(
                "the model has tensors that the base checkpoint has not",
                tensor=", ".join(unknown[:5]),
                found=f"{len(unknown)} such tensors{_missing(specs, yielded)}",
                hint="Give the checkpoint that the model was made from as base, or names that lead to it.",
            )

    def _item(self, part: Part, tensor: torch.Tensor) -> SourceItem:
        is_trusted = self._skip_frozen and isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        fingerprint = frozen_fingerprint(tensor) if is_trusted else None
        return SourceItem(tuple(part.forms), part.load, fingerprint, tuple(part.forms.values()), part.stays)


class IterableSource:
    """Pairs of checkpoint name and full tensor, from anything that can be iterated again and again.

    The tensors of a dict, a list or a tuple stay as they are; of anything else each is read before the next is asked
    for, since it may lie in the same memory.

    Args:
        pairs: a mapping, a re-iterable, or a function that returns a fresh iterable each time.

    Raises:
        SourceError: `pairs` is an iterator, which would be empty at the second publication.
    """

    def __init__(self, pairs: Mapping[str, torch.Tensor] | Pairs | Callable[[], Pairs]) -> None:
        if isinstance(pairs, Iterator):
            raise SourceError(
                "an iterator can be read only once",
                found=type(pairs).__name__,
                hint="Give a function that returns a new one each time.",
            )
        self._pairs = pairs

    def items(self, specs: Mapping[str, TensorSpec]) -> Iterator[SourceItem]:
        """See `ParameterSource.items`. Names are taken as they are.

        Of a dict, a list or a tuple, a tensor that the base has under another name only, as tied weights are in
        ``model.state_dict()``, is left out.
        """
        given = self._pairs() if callable(self._pairs) and not isinstance(self._pairs, Mapping) else self._pairs
        stays = all_exist(given)
        pairs = given.items() if isinstance(given, Mapping) else given
        known = {_identity(tensor) for name, tensor in pairs if name in specs} if stays else set()
        for name, tensor in pairs:
            refuse_unreadable(name, tensor)
            if name not in specs and tensor.numel() and _identity(tensor) in known:
                continue
            yield SourceItem((name,), _constant(name, tensor), stays=stays, is_apart=stays)


def all_exist(given: object) -> bool:
    """Say whether what is iterated holds all its items already, so that taking one changes no other."""
    # Not of a subclass: its `items` may make tensors one by one, in one buffer.
    return type(given) in (dict, OrderedDict, list, tuple)


def source_of(model_or_source: object, names: Names | None = None, *, skip_frozen: bool = False) -> ParameterSource:
    """Turn what the user gave into a source.

    Args:
        model_or_source: see `trainer_hooks.DeltaPublisher`.
        names: see `ModuleSource`.
        skip_frozen: see `ModuleSource`.

    Raises:
        SourceError: it is none of the kinds that are understood, or what is for modules was given for something else.
    """
    if isinstance(model_or_source, nn.Module):
        return ModuleSource(model_or_source, names, skip_frozen=skip_frozen)
    refuse_of_no_module(model_or_source, names, skip_frozen=skip_frozen)
    if isinstance(model_or_source, Mapping) or callable(model_or_source):
        return IterableSource(model_or_source)
    if isinstance(model_or_source, ParameterSource):
        return model_or_source
    if isinstance(model_or_source, Iterable):
        return IterableSource(model_or_source)
    raise SourceError(
        "cannot publish this",
        expected="a module, a mapping, or an iterable of (checkpoint name, tensor)",
        found=type(model_or_source).__name__,
    )


def refuse_of_no_module(model_or_source: object, names: Names | None, *, skip_frozen: bool) -> None:
    """Refuse what is said of modules and nobody would use.

    Raises:
        SourceError: something is.
    """
    kind = type(model_or_source).__name__
    if names is not None:
        raise SourceError(
            "names can be given for a module only", found=kind, hint="Have the source yield checkpoint names."
        )
    if skip_frozen:
        raise SourceError(
            "skip_frozen can be given for a module only",
            found=kind,
            hint="Leave it out; a source of your own may promise by fingerprints that items are unchanged.",
        )


def unwrap(module: nn.Module) -> nn.Module:
    """Return the model inside the wrappers that only prefix its names."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, nn.parallel.DistributedDataParallel):
            inner = module.module
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def _identity(tensor: object) -> Hashable:
    """Return what is equal for tensors that are the same elements of one memory; ``None`` where that is not known."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return None
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _missing(specs: Mapping[str, TensorSpec], yielded: set[str]) -> str:
    missing = [name for name in specs if name not in yielded]
    return f"; and {len(missing)} of the base's are missing: {', '.join(missing[:5])}" if missing else ""


def _constant(name: str, tensor: torch.Tensor) -> Callable[[], Pairs]:
    return lambda: ((name, tensor),)


def frozen_fingerprint(tensor: torch.Tensor) -> Hashable:
    """Return what stays equal as long as a tensor is neither replaced nor written in place, as far as torch counts.

    It proves nothing: not counted are writes through ``.data`` and numpy, nor any to the local part of a `DTensor`.
    """
    ref = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    # An address alone would be given again to the replacement of a replacement; the weak reference, which holds no
    # weights, tells the two apart.
    return (ref, tensor.data_ptr(), tensor._version)


def _refuse_fsdp1(module: nn.Module) -> None:
    # Its parameters look plain but are slices, and its state dict gathers, in a collective that only some ranks join.
    for name, inner in module.named_modules():
        if type(inner).__name__ == "FullyShardedDataParallel":
            raise SourceError(
                "the module is wrapped in FSDP, so this rank has only a part of it",
                found=name or "the module itself",
                hint="Give it to ShardedPublisher, on every rank (docs/trainers.md).",
            )


def refuse_unreadable(name: str, tensor: torch.Tensor) -> None:
    """Check that a tensor is whole and plain.

    Raises:
        SourceError: it is not.
    """
    if not isinstance(tensor, torch.Tensor):
        raise SourceError("not a tensor", tensor=name, found=type(tensor).__name__)
    kind = type(tensor).__name__
    if hasattr(tensor, "placements") or hasattr(tensor, "ds_shape"):
        raise SourceError(
            "the parameter is sharded; publishing this rank's part as the whole would be wrong",
            tensor=name,
            found=kind,
            hint="Give it to ShardedPublisher, on every rank (docs/trainers.md).",
        )
    if tensor.is_meta:
        raise SourceError("the parameter has no data (meta device)", tensor=name)
    if tensor.layout is not torch.strided:
        raise SourceError("the parameter is not a dense tensor", tensor=name, found=str(tensor.layout))
    refuse_freed(name, tensor)


def refuse_freed(name: str, tensor: torch.Tensor) -> None:
    """Check that a tensor's memory is there: one whose storage was given back still has its shape.

    Raises:
        SourceError: it is not.
    """
    if not tensor.numel() or _has_no_storage(tensor):
        return
    last = tensor.storage_offset() + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    needed, found = (last + 1) * tensor.element_size(), tensor.untyped_storage().nbytes()
    if found < needed:
        raise SourceError(
            "the tensor's memory has been given back",
            tensor=name,
            expected=f"at least {needed} bytes",
            found=f"{found} bytes",
            hint="Publish while the weights are in memory; what a source yields must stay until the next is asked for.",
        )


def _has_no_storage(tensor: object) -> bool:
    """Say whether a tensor is a wrapper around others, which have the storage."""
    return is_traceable_wrapper_subclass(tensor)
