"""What a layer has at hand is found wherever it keeps it, put back as objects, and settled with new content."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from vllm_delta_snapshot.engine.plan.belongings import Belongings, identities_of
from vllm_delta_snapshot.engine.write.reload import LayerBackup
from vllm_delta_snapshot.errors import ApplyError


@dataclass(frozen=True)
class Config:
    """As quantization configurations are: frozen, with tensors inside."""

    scale: torch.Tensor
    factor: float = 1.0


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: torch.Tensor) -> None:
        self.scale = scale


def _closure(scale: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: scale


def _plain(scale: torch.Tensor) -> Any:
    return scale


class Layer(torch.nn.Module):
    """Has a weight and, in one place or another, what is computed from it."""

    def __init__(self, keep: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(1.0, 5.0), requires_grad=False)
        self.kv_cache = torch.zeros(3)
        self.keep = keep
        self.process()

    def process(self, factor: float = 2.0) -> None:
        """Compute it, into new objects."""
        self.kept = self.keep(self.weight.detach() * factor)
        self.number = float(self.weight.sum()) * factor


def _kept(path: str, layer: Layer) -> torch.Tensor:
    return Belongings.of({"l": layer}, frozenset()).tensors[path]


PLACES: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "attribute": (_plain, "l.kept"),
    "list": (lambda t: [0, [t]], "l.kept.1.0"),
    "tuple": (lambda t: (t, 1), "l.kept.0"),
    "dict": (lambda t: {"a": {"b": t}}, "l.kept.a.b"),
    "configuration": (Config, "l.kept.scale"),
    "slots": (Slotted, "l.kept.scale"),
    "closure": (_closure, "l.kept.closure"),
    "partial": (lambda t: functools.partial(_plain, t), "l.kept.1.0"),
    "parameter": (lambda t: torch.nn.Parameter(t, requires_grad=False), "l.kept"),
}


@pytest.mark.parametrize("place", PLACES)
def test_what_a_layer_computes_is_found_settled_and_undone_wherever_it_keeps_it(place: str) -> None:
    keep, path = PLACES[place]
    layer = Layer(keep)
    tensor, holder, old = _kept(path, layer), layer.kept, _kept(path, layer).clone()
    address = tensor.data_ptr()
    backup = LayerBackup.of({"l": layer}, identities_of(layer))
    assert backup.holds()

    layer.process(3.0)
    assert _kept(path, layer) is not tensor
    assert not backup.holds()
    backup.held.settle()
    assert layer.kept is holder
    assert _kept(path, layer) is tensor
    assert tensor.data_ptr() == address
    assert tensor.tolist() == [3.0, 6.0, 9.0, 12.0]
    assert layer.number == 30.0
    assert not backup.holds()

    assert backup.restore()
    assert layer.kept is holder
    assert torch.equal(_kept(path, layer), old)
    assert layer.number == 20.0


def test_one_flipped_bit_of_what_is_computed_is_no_equal_state() -> None:
    layer = Layer(Config)
    backup = LayerBackup.of({"l": layer}, frozenset())
    layer.kept.scale.view(torch.int32)[2] ^= 1
    assert not backup.holds()
    layer.number += 1
    assert backup.restore()


def test_what_takes_another_form_is_refused_and_the_old_objects_stay() -> None:
    layer = Layer(_plain)
    kept = layer.kept
    held = Belongings.of({"l": layer}, frozenset())
    layer.kept = kept.half()
    with pytest.raises(ApplyError, match="another form") as caught:
        held.settle()
    assert caught.value.tensor == "l.kept"
    assert layer.kept is kept
    del layer.kept
    with pytest.raises(ApplyError, match="found nothing"):
        held.settle()
    assert layer.kept is kept


def test_expanded_tensors_are_settled() -> None:
    layer = Layer(lambda t: t[:1].expand(7))
    held = Belongings.of({"l": layer}, frozenset())
    kept = layer.kept
    layer.process(5.0)
    held.settle()
    assert layer.kept is kept
    assert kept.tolist() == [5.0] * 7


def test_other_layers_and_the_cache_are_not_entered() -> None:
    model = torch.nn.ModuleList([Layer(_plain), Layer(_plain)])
    model[0].neighbour = [model[1]]
    found = Belongings.of({"0": model[0]}, identities_of(model)).tensors
    assert sorted(found) == ["0.kept", "0.weight"]
    whole = Belongings.of({"": model}, identities_of(model)).tensors
    assert sorted(whole) == [".0.kept", ".0.weight", ".1.kept", ".1.weight"]
    assert Belongings.of({"": model}, identities_of(model), alone=True).tensors == {}
