# SPDX-License-Identifier: Apache-2.0
"""From the names of a module's state dict to the names in its checkpoint.

transformers 5 keeps some models in another form than their checkpoint's: experts are fused into one parameter, modules
are renamed, prefixes differ. `save_pretrained` turns them back with ``revert_weight_conversion``; this module calls the
same function, one parameter at a time, so that what is published is what `save_pretrained` would write. Models of
other origin, and transformers 4, have no such conversion: their names are taken as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

__all__ = ["CheckpointNames", "Revert", "revert_of"]

Revert = Callable[[nn.Module, dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""Turns a model's state dict into its checkpoint's."""


class CheckpointNames:
    """The checkpoint names of one model.

    Args:
        module: the model, unwrapped.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._revert = revert_of(module)
        self._plan: dict[str, tuple[str, ...]] = {}
        self._renamed: dict[str, bool] = {}

    def of(self, name: str, tensor: torch.Tensor) -> tuple[str, ...]:
        """Return the checkpoint names that a state dict entry becomes; found out once, on its actual tensor."""
        if name not in self._plan:
            reverted = self._converted(name, tensor)
            self._plan[name] = tuple(reverted)
            # A mere renaming hands back the same memory; from then on the parameter itself is used.
            only = next(iter(reverted.values())) if len(reverted) == 1 else None
            self._renamed[name] = (
                only is not None and only.data_ptr() == tensor.data_ptr() and only.shape == tensor.shape
            )
        return self._plan[name]

    def convert(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the pairs of checkpoint name and tensor that a state dict entry becomes."""
        names = self.of(name, tensor)
        if self._renamed[name]:
            return ((names[0], tensor),)
        return tuple(self._converted(name, tensor).items())

    def _converted(self, name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
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
