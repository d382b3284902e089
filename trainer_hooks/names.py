# SPDX-License-Identifier: Apache-2.0
"""From the names of a module's state dict to the names in its checkpoint.

transformers 5 keeps some models in another form than their checkpoint's: experts are fused into one parameter, modules
are renamed, prefixes differ. `save_pretrained` turns them back with ``revert_weight_conversion``; this module calls the
same function, one parameter at a time, so that what is published is what `save_pretrained` would write. Models of
other origin, and transformers 4, have no such conversion: their names are taken as they are. What the user says of a
parameter goes before both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from vllm_delta_snapshot.errors import SourceError

__all__ = ["CheckpointNames", "Form", "Given", "Names", "Revert", "revert_of"]

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
nothing was given.
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

    def of(self, name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor] | None:
        """Return the tensors of the checkpoint that a parameter becomes, or ``None`` if nothing was said of it.

        Raises:
            SourceError: the user's function raised, wrote into the tensor, or returned something else than pairs of
                names and tensors.
        """
        if self._names is None:
            return None
        if isinstance(self._names, Mapping):
            if name not in self._names:
                return None
            new = self._names[name]
            return {} if new is None else {new: tensor}
        written = tensor._version
        try:
            with torch.no_grad():
                said = self._names(name, tensor)
                pairs = None if said is None else list(said.items() if isinstance(said, Mapping) else said)
        except Exception as error:
            raise _bad_names(name, f"it raised {type(error).__name__}: {error}") from error
        if tensor._version != written:
            raise _bad_names(name, "it wrote into the tensor")
        return None if pairs is None else _checked(name, pairs)

    def unknown(self, names: Iterable[str]) -> list[str]:
        """Return what is said of parameters that the model has not.

        Args:
            names: those of all its parameters and buffers.
        """
        return sorted(set(self._names).difference(names)) if isinstance(self._names, Mapping) else []


class CheckpointNames:
    """The checkpoint names of one model.

    Args:
        module: the model, unwrapped.
        names: what the user says of them.

    Raises:
        SourceError: `names` has parameters that the model has not.
    """

    def __init__(self, module: nn.Module, names: Names | None = None) -> None:
        self._module = module
        self._given = Given(names)
        self._revert = revert_of(module)
        self._plan: dict[str, dict[str, Form]] = {}
        self._renamed: dict[str, bool] = {}
        if names is not None and (unknown := self._given.unknown(module.state_dict(keep_vars=True))):
            raise SourceError(
                "names were given for parameters that the model has not",
                tensor=", ".join(unknown[:5]),
                found=f"{len(unknown)} such names",
                hint="Give names by those of model.state_dict().",
            )

    def of(self, name: str, tensor: torch.Tensor) -> tuple[str, ...]:
        """Return the checkpoint names that a state dict entry becomes; found out once, on its actual tensor.

        Raises:
            SourceError: see `Given.of`.
        """
        return tuple(self._planned(name, tensor))

    def forms(self, name: str, tensor: torch.Tensor) -> tuple[Form, ...]:
        """Return shape and dtype of what a state dict entry becomes, in the order of `of`.

        Raises:
            SourceError: see `Given.of`.
        """
        return tuple(self._planned(name, tensor).values())

    def convert(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the pairs of checkpoint name and tensor that a state dict entry becomes.

        Raises:
            SourceError: see `Given.of`.
        """
        names = self.of(name, tensor)
        if self._renamed[name]:
            return ((names[0], tensor),)
        return tuple(self._converted(name, tensor).items())

    def _planned(self, name: str, tensor: torch.Tensor) -> Mapping[str, Form]:
        if name not in self._plan:
            converted = self._converted(name, tensor)
            self._plan[name] = {key: (to.shape, to.dtype) for key, to in converted.items()}
            # A mere renaming hands back the same memory; from then on the parameter itself is used.
            only = next(iter(converted.values())) if len(converted) == 1 else None
            self._renamed[name] = only is not None and _is_same(only, tensor)
        return self._plan[name]

    def _converted(self, name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        if (given := self._given.of(name, tensor.detach())) is not None:
            return given
        if self._revert is None:
            return {name: tensor}
        with torch.no_grad():
            return self._revert(self._module, {name: tensor.detach()})


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


def _checked(name: str, pairs: list[Any]) -> Mapping[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for pair in pairs:
        is_pair = isinstance(pair, tuple) and len(pair) == 2
        if not is_pair or not isinstance(pair[0], str) or not isinstance(pair[1], torch.Tensor):
            kinds = [type(item).__name__ for item in pair] if isinstance(pair, tuple) else type(pair).__name__
            raise _bad_names(name, f"it returned {kinds}")
        if pair[0] in found:
            raise _bad_names(name, f"it returned {pair[0]} twice")
        found[pair[0]] = pair[1]
    return found


def _bad_names(name: str, found: str) -> SourceError:
    return SourceError(
        "the names function does not say what the parameter becomes in the checkpoint",
        tensor=name,
        expected="pairs of checkpoint name and tensor, each name once; or None, for what it has nothing to say of",
        found=found,
        hint="Correct the function given as names.",
    )
