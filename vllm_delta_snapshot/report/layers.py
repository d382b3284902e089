# SPDX-License-Identifier: Apache-2.0
"""Layers: which tensors are shown together, found by their names and by nothing else. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from vllm_delta_snapshot.types import TensorSpec

__all__ = ["Layer", "layer_of", "layers_of"]

_NUMBERED: Final = re.compile(r"(?:.*?\.)??[0-9]+(?=\.)")
_DIGITS: Final = re.compile(r"([0-9]+)")


@dataclass(frozen=True, slots=True)
class Layer:
    """Tensors that are shown together.

    Attributes:
        name: what their names begin with.
        elements: how many elements they have.
    """

    name: str
    elements: int


def layer_of(name: str) -> str:
    """Return the layer of a tensor: its name up to the first number, or without its last part if there is none."""
    match = _NUMBERED.match(name)
    if match is not None:
        return match[0]
    return name.rpartition(".")[0] or name


def layers_of(specs: Mapping[str, TensorSpec]) -> tuple[Layer, ...]:
    """Return the layers of a checkpoint, numbers in their order."""
    elements: dict[str, int] = {}
    for name, spec in specs.items():
        layer = layer_of(name)
        elements[layer] = elements.get(layer, 0) + spec.numel
    return tuple(Layer(name, elements[name]) for name in _in_order(elements))


def _in_order(names: Iterable[str]) -> list[str]:
    # Digits and other text take turns, so that parts at one place are always of one kind.
    return sorted(names, key=lambda name: [int(p) if p.isdecimal() else p for p in _DIGITS.split(name)])
