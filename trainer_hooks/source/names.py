# SPDX-License-Identifier: Apache-2.0
"""From the names of a module's state dict to the names in its checkpoint.

transformers 5 keeps some models in another form than their checkpoint's: experts are fused into one parameter, modules
are renamed, prefixes differ. `save_pretrained` turns them back with ``revert_weight_conversion``; this module calls the
same function, one parameter at a time, so that what is published is what `save_pretrained` would write. Models of
other origin, and transformers 4, have no such conversion: their names are taken as they are. What the user says of a
parameter goes before both.

Nothing that may answer otherwise later is remembered: a user's names are asked for in every pass, and what a conversion
makes of a parameter is found out again where its form, its strides, or the model's conversions are others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
from torch import nn

from vllm_delta_snapshot.errors import SourceError

__all__ = ["CheckpointNames", "Form", "Given", "Names", "Part", "Revert", "revert_of"]

T = TypeVar("T")

Revert = Callable[[nn.Module, dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""Turns a model's state dict into its checkpoint's."""

Names = (
    Mapping[str, str | None]
    | Callable[[str, torch.Tensor], Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | None]
)
"""What the user says of checkpoint names.

Either a mapping from a parameter's name to its checkpoint name, or to ``None`` if the checkpoint has not got it; or a
function of a parameter's name and tensor that returns the (checkpoint name, tensor) pairs that it becomes, no pair if
the checkpoint has not got it. What the mapping does not have, or the function returns ``None`` for, is named as if
nothing was given. A tensor that a function returns is read before the function is called again; one that it yields,
before it is asked for the next.
"""

Form = tuple[torch.Size, torch.dtype]
"""What is known of a tensor before it is read: shape and dtype."""


class Given:
    """What the user says of a model's names.

    Args:
        names: see `Names`; ``None`` says nothing.
    """

    def __init__(self, names: Names | None) -> None:
        self._names = names

    def of(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]] | None:
        """Ask what a parameter becomes: pairs of checkpoint name and tensor, or ``None`` if nothing was said of it.

        What the user's function yields is asked for one by one, as the pairs are taken.

        Raises:
            SourceError: the user's function raised, wrote into the tensor, or returned something else than pairs of
                names and tensors; here, or when a pair is taken.
        """
        if self._names is None:
            return None
        if isinstance(self._names, Mapping):
            if name not in self._names:
                return None
            new = self._names[name]
            return iter(()) if new is None else iter([(new, tensor)])
        ask, written = self._names, tensor._version
        said = _asked(name, lambda: ask(name, tensor))
        if tensor._version != written:
            raise _bad_names(name, "it wrote into the tensor")
        return None if said is None else _checked(name, tensor, said)

    def unknown(self, names: Iterable[str]) -> list[str]:
        """Return what is said of parameters that the model has not.

        Args:
            names: those of all its parameters and buffers.
        """
        return sorted(set(self._names).difference(names)) if isinstance(self._names, Mapping) else []


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors of the checkpoint that a state dict entry becomes, read together.

    Attributes:
        forms: shape and dtype of each, by checkpoint name.
        load: returns the pairs.
        stays: whether what `load` returns stays as it is while others are read.
    """

    forms: Mapping[str, Form]
    load: Callable[[], Iterable[tuple[str, torch.Tensor]]]
    stays: bool


class CheckpointNames:
    """The checkpoint names of one model.

    Args:
        module: the model, unwrapped.
        names: what the user says of them.

    Raises:
        SourceError: `names` has parameters that the model has not.
    """

    def __init__(self, module: nn.Module, names: Names | None = None) -> None:
        self._given = Given(names)
        self._plans: dict[str, _Plan] = {}
        if names is not None and (unknown := self._given.unknown(module.state_dict(keep_vars=True))):
            raise SourceError(
                "names were given for parameters that the model has not",
                tensor=", ".join(unknown[:5]),
                found=f"{len(unknown)} such names",
                hint="Give names by those of model.state_dict().",
            )

    def parts(self, module: nn.Module, name: str, tensor: torch.Tensor) -> Iterator[Part]:
        """Yield what a state dict entry becomes in the checkpoint, now; nothing if the user says that it is not there.

        Args:
            module: the model, unwrapped.
            name: the entry's name.
            tensor: the entry.

        Raises:
            SourceError: see `Given.of`.
        """
        given = self._given.of(name, tensor.detach())
        if given is None:
            yield self._converted(module, name, tensor)
            return
        for key, to in given:
            # A view of the parameter is as lasting as that; what else a function returns, it may use again.
            yield Part({key: (to.shape, to.dtype)}, _constant(key, to), stays=_is_view(to, tensor))

    def _converted(self, module: nn.Module, name: str, tensor: torch.Tensor) -> Part:
        revert = revert_of(module)
        if revert is None:
            return Part({name: (tensor.shape, tensor.dtype)}, _constant(name, tensor), stays=True)
        cause = _cause(module, tensor)
        plan = self._plans.get(name)
        if plan is None or plan.cause != cause:
            self._plans[name] = plan = _plan(cause, _reverted(revert, module, name, tensor), tensor)
        if plan.renamed is not None:
            return Part(plan.forms, _constant(plan.renamed, tensor), stays=True)
        return Part(plan.forms, lambda: tuple(_reverted(revert, module, name, tensor).items()), stays=True)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What transformers makes of a parameter, and what that followed from.

    Attributes:
        cause: see `_cause`.
        forms: shape and dtype of what it becomes, by checkpoint name.
        renamed: its new name, if a new name is all that it gets.
    """

    cause: tuple[object, ...]
    forms: Mapping[str, Form]
    renamed: str | None


def _cause(module: nn.Module, tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what a conversion follows from: never from values."""
    conversions = getattr(module, "_weight_conversions", None)
    how = tuple(conversions) if isinstance(conversions, list | tuple) else conversions
    return (type(module), how, tensor.shape, tensor.dtype, tensor.stride(), tensor.device)


def _plan(cause: tuple[object, ...], outputs: Mapping[str, torch.Tensor], tensor: torch.Tensor) -> _Plan:
    # A mere renaming hands back the same memory; then the parameter itself is used.
    same = [key for key, to in outputs.items() if _is_same(to, tensor)]
    forms = {key: (to.shape, to.dtype) for key, to in outputs.items()}
    return _Plan(cause, forms, same[0] if len(outputs) == len(same) == 1 else None)


def _reverted(revert: Revert, module: nn.Module, name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
    with torch.no_grad():
        return revert(module, {name: tensor.detach()})


def _constant(name: str, tensor: torch.Tensor) -> Callable[[], Iterable[tuple[str, torch.Tensor]]]:
    return lambda: ((name, tensor),)


def revert_of(module: nn.Module) -> Revert | None:
    """Return transformers' own conversion if this is one of its models; imports nothing that is not loaded."""
    if not hasattr(module, "save_pretrained") or not hasattr(module, "config"):
        return None
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return None
    revert: Revert = revert_weight_conversion
    return revert


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two tensors are the same elements in the same order: a transposed square is not."""
    return (one.data_ptr(), one.shape, one.stride(), one.dtype) == (
        other.data_ptr(),
        other.shape,
        other.stride(),
        other.dtype,
    )


def _is_view(part: torch.Tensor, whole: torch.Tensor) -> bool:
    """Say whether one tensor's elements are some of another's memory."""
    return part is whole or part.untyped_storage()._cdata == whole.untyped_storage()._cdata


_END: Final = object()


def _checked(name: str, tensor: torch.Tensor, said: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield pairs as a user's function does, each once it is known to be one."""
    pairs: Any = said.items() if isinstance(said, Mapping) else said
    pairs = _asked(name, lambda: iter(pairs))
    written, seen = tensor._version, set()
    while True:
        pair: Any = _asked(name, lambda: next(pairs, _END))
        if tensor._version != written:
            raise _bad_names(name, "it wrote into the tensor")
        if pair is _END:
            return
        is_pair = isinstance(pair, tuple) and len(pair) == 2
        if not is_pair or not isinstance(pair[0], str) or not isinstance(pair[1], torch.Tensor):
            kinds = [type(item).__name__ for item in pair] if isinstance(pair, tuple) else type(pair).__name__
            raise _bad_names(name, f"it returned {kinds}")
        if pair[0] in seen:
            raise _bad_names(name, f"it returned {pair[0]} twice")
        seen.add(pair[0])
        yield pair


def _asked(name: str, ask: Callable[[], T]) -> T:
    try:
        with torch.no_grad():
            return ask()
    except Exception as error:
        raise _bad_names(name, f"it raised {type(error).__name__}: {error}") from error


def _bad_names(name: str, found: str) -> SourceError:
    return SourceError(
        "the names function does not say what the parameter becomes in the checkpoint",
        tensor=name,
        expected="pairs of checkpoint name and tensor, each name once; or None, for what it has nothing to say of",
        found=found,
        hint="Correct the function given as names.",
    )
