"""Names that the user gives: what both publishers make of them, and what is refused at the start."""

from collections.abc import Iterable
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

Publisher = type[DeltaPublisher] | type[ShardedPublisher]
BOTH = pytest.mark.parametrize("publisher", [DeltaPublisher, ShardedPublisher])
PADDED, VOCABULARY = 7, 5


class Model(nn.Module):
    """A fused projection, a padded embedding, a value head that no checkpoint has, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(PADDED, 4)
        self.qkv = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(4)
        self.value = nn.Linear(4, 1)

    def checkpoint(self) -> dict[str, torch.Tensor]:
        """Return what its checkpoint is, cut apart by hand."""
        q, k, v = self.qkv.weight.detach().split([4, 2, 2])
        tensors = {"q.weight": q, "k.weight": k, "v.weight": v, "qkv.bias": self.qkv.bias}
        tensors |= {"tok": self.embed.weight[:VOCABULARY], "head": self.embed.weight[:VOCABULARY]}
        tensors |= {"norm.weight": self.norm.weight, "norm.bias": self.norm.bias}
        return {name: tensor.detach().to(torch.bfloat16).clone() for name, tensor in tensors.items()}


def names(name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]] | None:
    if name == "qkv.weight":
        return zip(("q.weight", "k.weight", "v.weight"), tensor.split([4, 2, 2]), strict=True)
    if name == "embed.weight":  # two tensors of the same elements, and some that are not in the checkpoint
        return {"tok": tensor[:VOCABULARY], "head": tensor[:VOCABULARY].contiguous()}
    return () if name.startswith("value") else None


def opened(publisher: Publisher, model: nn.Module, folder: Path, base: dict[str, torch.Tensor], given: Any) -> Any:
    write_checkpoint(folder / "base", base)
    options: dict[str, Any] = {"asynchronous": False, "threads": 1, "names": given}
    return publisher(model, sync_dir=str(folder / "run"), base=folder / "base", **options)


def refusal(publisher: Publisher, given: Any, folder: Path, *, without: str = "", **other: torch.Tensor) -> SourceError:
    model = Model()
    base = {name: tensor for name, tensor in (model.checkpoint() | other).items() if name != without}
    with pytest.raises(SourceError) as caught:
        opened(publisher, model, folder, base, given)
    assert not (folder / "run" / "run.json").exists()
    return caught.value


@BOTH
def test_function_says_what_parameters_become(publisher: Publisher, tmp_path: Path):
    model = Model()
    opened_publisher = opened(publisher, model, tmp_path, model.checkpoint(), names)
    expected = [model.checkpoint()]
    for step in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.view(-1)[step::3] += 0.5
        opened_publisher.publish()
        expected.append(model.checkpoint())
    found = replay(tmp_path / "run", tmp_path / "base", tmp_path)
    for state, tensors in zip(found, expected, strict=True):
        assert_same_state(state, {name: bits_of(tensor) for name, tensor in tensors.items()})


@BOTH
def test_mapping_renames_and_leaves_out(publisher: Publisher, tmp_path: Path):
    model = nn.ModuleDict({"inner": nn.Linear(3, 2), "value": nn.Linear(3, 1)})
    given = {"inner.weight": "outer", "value.weight": None, "value.bias": None}
    base = {"outer": model["inner"].weight.detach().clone(), "inner.bias": model["inner"].bias.detach().clone()}
    opened_publisher = opened(publisher, model, tmp_path, base, given)
    with torch.no_grad():
        model["inner"].weight += 1
    assert opened_publisher.publish().report.changed_tensors == 1
    found = replay(tmp_path / "run", tmp_path / "base", tmp_path)[-1]
    assert found["outer"].tolist() == bits_of(model["inner"].weight).tolist()


@BOTH
def test_everything_that_does_not_fit_is_named(publisher: Publisher, tmp_path: Path):
    other = {
        "q.weight": torch.zeros(4, 3, dtype=torch.bfloat16),
        "norm.bias": torch.zeros(4, dtype=torch.int8),
        "more": torch.zeros(1),
    }
    found = str(refusal(publisher, names, tmp_path, **other).found)
    assert "q.weight is BF16[4,3] in the base checkpoint, but has the shape [4, 4] here" in found
    assert "norm.bias is I8[4] in the base checkpoint, and torch.float32 cannot be rounded to that" in found
    assert "more is missing" in found


@BOTH
def test_what_is_named_wrong_is_told_with_what_is_missing(publisher: Publisher, tmp_path: Path):
    def wrong(name: str, tensor: torch.Tensor) -> Any:
        return {"norm.wieght": tensor} if name == "norm.weight" else names(name, tensor)

    error = refusal(publisher, wrong, tmp_path)
    assert "norm.wieght" in str(error)
    assert "norm.weight" in str(error.found)


@BOTH
def test_name_for_a_parameter_that_is_not_there_is_refused(publisher: Publisher, tmp_path: Path):
    error = refusal(publisher, {"norm.wieght": "norm.weight"}, tmp_path)
    assert "norm.wieght" in str(error)
    assert "which the model has not" in str(error) or "that the model has not" in str(error)


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (lambda tensor: 1 / 0, "it raised ZeroDivisionError: division by zero"),
        (lambda tensor: 3, "it raised TypeError"),
        (lambda tensor: [("a", tensor), ("a", tensor)], "it returned a twice"),
        (lambda tensor: [("a", tensor.add_(1))], "it wrote into the tensor"),
        (lambda tensor: [("a", 1)], "it returned ['str', 'int']"),
        (lambda tensor: [(1, tensor)], "it returned ['int', 'Tensor']"),
        (lambda tensor: ["a"], "it returned str"),
    ],
)
@BOTH
def test_function_that_says_no_pairs_is_refused(publisher: Publisher, said: Any, found: str, tmp_path: Path):
    error = refusal(publisher, lambda name, tensor: said(tensor) if name == "qkv.weight" else (), tmp_path)
    assert (error.what, error.tensor) == (
        "the names function does not say what the parameter becomes in the checkpoint",
        "qkv.weight",
    )
    assert str(error.found).startswith(found)
    assert error.hint


@pytest.mark.parametrize(
    "change",
    [lambda t: t.t().contiguous().view(t.shape), lambda t: t + 1, lambda t: t.flip(0), lambda t: t.float()],
    ids=["transposed", "rescaled", "in another order", "cast"],
)
def test_sharded_takes_ranges_only(change: Any, tmp_path: Path):
    def given(name: str, tensor: torch.Tensor) -> Any:
        return [("qkv.weight", change(tensor))] if name == "qkv.weight" else names(name, tensor)

    error = refusal(ShardedPublisher, given, tmp_path)
    assert error.what.startswith("the parameter's form in the checkpoint is not made of ranges of it")
    assert (error.tensor, error.found) == (
        "qkv.weight",
        "qkv.weight holds its elements converted or in another order",
    )
    assert "generic source" in str(error.hint)


def test_whole_tensors_may_be_transposed(tmp_path: Path):
    model = nn.Linear(3, 3, bias=False)
    base = {"weight": model.weight.detach().t().contiguous()}
    publisher = opened(DeltaPublisher, model, tmp_path, base, lambda name, tensor: [(name, tensor.t())])
    assert publisher.publish().report.changed_elements == 0
    with torch.no_grad():
        model.weight[0, 2] += 1
    publisher.publish()
    found = replay(tmp_path / "run", tmp_path / "base", tmp_path)[-1]
    assert found["weight"].tolist() == bits_of(model.weight.t().contiguous()).tolist()


def test_two_layers_that_look_alike_may_be_named_unlike(tmp_path: Path):
    layers = nn.ModuleList(nn.Linear(2, 4, bias=False) for _ in range(2))
    order = {"0.weight": ("0.a", "0.b"), "1.weight": ("1.b", "1.a")}

    def given(name: str, tensor: torch.Tensor) -> Any:
        return [(key, part.clone()) for key, part in zip(order[name], tensor.chunk(2), strict=True)]

    base = {key: part for name, layer in layers.state_dict().items() for key, part in given(name, layer)}
    publisher = opened(ShardedPublisher, layers, tmp_path, base, given)
    assert publisher.publish().report.changed_elements == 0


@pytest.mark.parametrize(
    ("publisher", "source"), [(DeltaPublisher, {"a": torch.zeros(1)}), (ShardedPublisher, lambda: ())]
)
def test_names_for_what_is_no_module_are_refused(publisher: Publisher, source: Any, tmp_path: Path):
    with pytest.raises(SourceError, match="names can be given for a module only"):
        opened(publisher, source, tmp_path, {"a": torch.zeros(1)}, {"a": "b"})
