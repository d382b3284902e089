# SPDX-License-Identifier: Apache-2.0
"""Sources: where the publisher gets its tensors from, under their checkpoint names.

A source yields items. An item is what is compared, or skipped, as one: usually one tensor, several where a module
keeps them fused. An item with a fingerprint equal to the one at the last publication is unchanged and is not read.

Sharded parameters are refused here: a shard published as if it were the whole would be silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from trainer_hooks.names import CheckpointNames, Form, Names
from vllm_delta_snapshot.errors import SourceError
from vllm_delta_snapshot.types import TensorSpec

__all__ = ["IterableSource", "ModuleSource", "ParameterSource", "SourceItem", "source_of"]

Pairs = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class SourceItem:
    """Tensors that are read together.

    Attributes:
        names: the checkpoint names that `load` yields.
        load: returns the pairs of checkpoint name and full tensor; called at most once a publication.
        fingerprint: equal fingerprints promise equal values; ``None`` makes no promise.
        forms: shape and dtype of each, where they are known before `load`; else empty. Checked before the first
            publication.
    """

    names: tuple[str, ...]
    load: Callable[[], Pairs]
    fingerprint: Hashable | None = None
    forms: tuple[Form, ...] = ()


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

    For a transformers model the names are those that `save_pretrained` writes (`trainer_hooks.names`). Tied weights
    are yielded once for every name that the base checkpoint has. A parameter that does not require a gradient is
    read at the first publication and then only when it was replaced or written in place (as torch's version counter
    tells; a write through ``.data`` escapes it, so unfreeze what you write that way).

    Args:
        module: the model; wrappers of `torch.compile` and DDP are looked through. With DDP, publish from one rank.
        names: checkpoint names of parameters, where they are not those that transformers would give: a mapping, or a
            function (`trainer_hooks.names.Names`).

    Raises:
        SourceError: the module is wrapped in FSDP, or names are given for parameters that it has not.
    """

    def __init__(self, module: nn.Module, names: Names | None = None) -> None:
        self._module = unwrap(module)
        _refuse_fsdp1(self._module)
        self._names = CheckpointNames(self._module, names)

    def items(self, specs: Mapping[str, TensorSpec]) -> Iterator[SourceItem]:
        """See `ParameterSource.items`.

        Raises:
            SourceError: a parameter is sharded or has no data, or is none of the base checkpoint's.
        """
        published: dict[tuple[int, torch.Size], str] = {}
        yielded: set[str] = set()
        strangers: list[tuple[str, tuple[int, torch.Size]]] = []
        for name, tensor in self._module.state_dict(keep_vars=True).items():
            refuse_unreadable(name, tensor)
            names = self._names.of(name, tensor)
            identity = (tensor.data_ptr(), tensor.shape)
            if not names:  # not in the checkpoint, says the user
                published[identity] = name
            elif all(key in specs for key in names):
                published[identity] = name
                yielded.update(names)
                forms = self._names.forms(name, tensor)
                yield SourceItem(names, self._loader(name, tensor), _fingerprint(tensor), forms)
            else:
                strangers += [(key, identity) for key in names if key not in specs]
        unknown = [key for key, identity in strangers if identity not in published]
        if unknown:
            raise SourceError(
                "the model has tensors that the base checkpoint has not",
                tensor=", ".join(unknown[:5]),
                found=f"{len(unknown)} such tensors{_missing(specs, yielded)}",
                hint="Give the checkpoint that the model was made from as base, or names that lead to it.",
            )

    def _loader(self, name: str, tensor: torch.Tensor) -> Callable[[], Pairs]:
        return lambda: self._names.convert(name, tensor)


class IterableSource:
    """Pairs of checkpoint name and full tensor, from anything that can be iterated again and again.

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
        """See `ParameterSource.items`. Names are taken as they are."""
        del specs
        pairs = self._pairs
        if isinstance(pairs, Mapping):
            pairs = pairs.items()
        elif callable(pairs):
            pairs = pairs()
        for name, tensor in pairs:
            refuse_unreadable(name, tensor)
            yield SourceItem((name,), _constant(name, tensor))


def source_of(model_or_source: object, names: Names | None = None) -> ParameterSource:
    """Turn what the user gave into a source.

    Args:
        model_or_source: see `trainer_hooks.DeltaPublisher`.
        names: see `ModuleSource`.

    Raises:
        SourceError: it is none of the kinds that are understood, or names were given for something else than a module.
    """
    if isinstance(model_or_source, nn.Module):
        return ModuleSource(model_or_source, names)
    refuse_names(model_or_source, names)
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


def refuse_names(model_or_source: object, names: Names | None) -> None:
    """Refuse names that nobody would use.

    Raises:
        SourceError: there are some.
    """
    if names is not None:
        raise SourceError(
            "names can be given for a module only",
            found=type(model_or_source).__name__,
            hint="Have the source yield checkpoint names.",
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


def _missing(specs: Mapping[str, TensorSpec], yielded: set[str]) -> str:
    missing = [name for name in specs if name not in yielded]
    return f"; and {len(missing)} of the base's are missing: {', '.join(missing[:5])}" if missing else ""


def _constant(name: str, tensor: torch.Tensor) -> Callable[[], Pairs]:
    return lambda: ((name, tensor),)


def _fingerprint(tensor: torch.Tensor) -> Hashable | None:
    if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
        return frozen_fingerprint(tensor)
    return None


def frozen_fingerprint(tensor: torch.Tensor) -> Hashable:
    """Return what stays equal as long as a tensor is neither replaced nor written in place."""
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
