"""A model that is another one by the next publication: published as it is then, or refused; never as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.checkpoints import write_checkpoint
from tests.support.runs import assert_same_state, replay
from tests.support.tensors import bits_of
from trainer_hooks import DeltaPublisher, ShardedPublisher
from vllm_delta_snapshot.errors import SourceError

Publisher = DeltaPublisher | ShardedPublisher
BOTH = pytest.mark.parametrize("make", [DeltaPublisher, ShardedPublisher], ids=["one process", "several"])


class Model(nn.Module):
    """Two layers, and a head that is tied to the embedding and is not in the checkpoint."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(3))

    def checkpoint(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.state_dict().items() if name != "head.weight"}


def opened(make: type[Publisher], source: nn.Module, model: Model, folder: Path, **options: Any) -> Publisher:
    write_checkpoint(folder / "base", model.checkpoint())
    where = {"sync_dir": str(folder / "run"), "base": folder / "base"}
    return make(source, asynchronous=False, **where, **options)


def last(folder: Path) -> dict[str, Any]:
    return replay(folder / "run", folder / "base", folder)[-1]


def _layer(model: Model) -> None:
    model.layers[1] = nn.Linear(4, 4, bias=False)


def _all_layers(model: Model) -> None:
    model.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))


def _embed(model: Model) -> None:
    model.embed = nn.Embedding(5, 4)
    model.head.weight = model.embed.weight


def _parameter(model: Model) -> None:
    del model.layers[0].weight
    model.layers[0].weight = nn.Parameter(torch.randn(4, 4))


def _swapped(model: Model) -> None:
    model.layers[0], model.layers[1] = model.layers[1], model.layers[0]


def _half(model: Model) -> None:
    model.bfloat16()


def _to_buffer(model: Model) -> None:
    weight = model.layers[0].weight.detach() + 1
    del model.layers[0].weight
    model.layers[0].register_buffer("weight", weight)


def _buffer(model: Model) -> None:
    model.scale = torch.full((3,), 7.0)


CHANGES = [_layer, _all_layers, _embed, _parameter, _swapped, _half, _to_buffer, _buffer]


@BOTH
@pytest.mark.parametrize("change", CHANGES)
def test_what_was_replaced_is_published_as_it_is(
    make: type[Publisher], change: Callable[[Model], None], tmp_path: Path
):
    model = Model()
    with opened(make, model, model, tmp_path) as publisher:
        publisher.publish()
        change(model)
        assert publisher.publish().report.changed_elements > 0
    expected = {name: bits_of(tensor.float()) for name, tensor in model.checkpoint().items()}
    assert_same_state(last(tmp_path), expected)


class Wrapper(nn.Module):
    """A wrapper as `torch.compile` makes one."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._orig_mod = model


@BOTH
def test_what_a_wrapper_holds_is_looked_up_anew(make: type[Publisher], tmp_path: Path):
    model, other = Model(), Model(2)
    wrapper = Wrapper(model)
    with opened(make, wrapper, model, tmp_path) as publisher:
        wrapper._orig_mod = other
        publisher.publish()
    assert_same_state(last(tmp_path), {name: bits_of(tensor) for name, tensor in other.checkpoint().items()})


def _untied(model: Model) -> None:
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())


def _added(model: Model) -> None:
    model.value = nn.Linear(4, 1)


def _removed(model: Model) -> None:
    del model.layers[1]


def _reshaped(model: Model) -> None:
    model.layers[0].weight = nn.Parameter(torch.zeros(2, 8))


def _registered(model: Model) -> None:
    model.register_buffer("more", torch.zeros(1))


@BOTH
@pytest.mark.parametrize(
    ("change", "tensor"),
    [
        (_untied, "head.weight"),
        (_added, "value.bias"),
        (_removed, "layers.1.weight"),
        (_reshaped, "layers.0.weight"),
        (_registered, "more"),
    ],
)
def test_what_cannot_be_published_is_refused_and_named(
    make: type[Publisher], change: Callable[[Model], None], tensor: str, tmp_path: Path
):
    model = Model()
    with opened(make, model, model, tmp_path) as publisher:
        publisher.publish()
        change(model)
        with pytest.raises(SourceError) as caught:
            publisher.publish()
        assert tensor in str(caught.value)
        assert caught.value.hint
        assert publisher.version == 1
        publisher._last_call = None  # nothing more to publish at the end


class Naming:
    """A names function that answers by its state."""

    def __init__(self) -> None:
        self.order = (0, 1)
        self.how: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor

    def __call__(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]] | None:
        if not name.startswith("layers"):
            return None
        number = self.order[int(name.split(".")[1])]
        return iter([(f"layers.{number}.weight", self.how(tensor))])


def _other_order(naming: Naming) -> None:
    naming.order = (1, 0)


def _other_values(naming: Naming) -> None:
    naming.how = lambda tensor: tensor.flip(0).clone()


@pytest.mark.parametrize("change", [_other_order, _other_values])
def test_names_function_is_asked_anew(change: Callable[[Naming], None], tmp_path: Path):
    model, naming = Model(), Naming()
    with opened(DeltaPublisher, model, model, tmp_path, names=naming) as publisher:
        publisher.publish()
        change(naming)
        publisher.publish()
    weights = [naming.how(layer.weight.detach()) for layer in model.layers]
    found = last(tmp_path)
    for place, weight in zip(naming.order, weights, strict=True):
        assert found[f"layers.{place}.weight"].tolist() == bits_of(weight).tolist()


@pytest.mark.parametrize("change", [_other_order, _other_values])
def test_names_function_that_says_something_else_is_refused_of_sharded_models(
    change: Callable[[Naming], None], tmp_path: Path
):
    model, naming = Model(), Naming()
    with opened(ShardedPublisher, model, model, tmp_path, names=naming) as publisher:
        publisher.publish()
        change(naming)
        with pytest.raises(SourceError, match=r"names says something else|not made of ranges") as caught:
            publisher.publish()
        assert caught.value.tensor == "layers.0.weight"
        naming.__init__()  # type: ignore[misc]
        assert publisher.publish().version == 2


def test_a_mapping_of_names_is_read_anew(tmp_path: Path):
    model = Model()
    names = {"layers.0.weight": "layers.0.weight", "layers.1.weight": "layers.1.weight"}
    with opened(DeltaPublisher, model, model, tmp_path, names=names) as publisher:
        publisher.publish()
        names |= {"layers.0.weight": "layers.1.weight", "layers.1.weight": "layers.0.weight"}
        publisher.publish()
    assert last(tmp_path)["layers.1.weight"].tolist() == bits_of(model.layers[0].weight).tolist()
