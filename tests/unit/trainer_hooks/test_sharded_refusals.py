"""What sharded publishing refuses before the first publication, and what it says then; one process plays all ranks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.checkpoints import write_checkpoint
from trainer_hooks.publication.owners import assign, claims, explain
from trainer_hooks.sharded_publisher import shard_source_of
from trainer_hooks.source.names import Given
from trainer_hooks.source.places import Held, fsdp1_places, place_of
from trainer_hooks.source.shard_plan import NamePlan
from trainer_hooks.source.sharded_module import ShardedModuleSource
from trainer_hooks.source.shards import PartialSource, PartialTensor, Segment, Shard, ShardPlan
from trainer_hooks.source.shares import Runs
from trainer_hooks.source.unsourced import Unsourced
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import SourceError
from vllm_delta_snapshot.types import TensorSpec

SPECS = {"a": TensorSpec("a", (4, 3), "BF16"), "b": TensorSpec("b", (5,), "BF16")}
NOT_WHOLE = "the shards of all ranks do not make up whole tensors"
NOT_THE_BASE = "the tensors are not those of the base checkpoint"


def shard(name: str, start: int, stop: int) -> Shard:
    runs = Runs.interval(start, stop)
    return Shard(name, SPECS[name].numel, runs, (Segment(name, 0, runs),))


def plan(*shards: Shard, misfits: tuple[str, ...] = ()) -> ShardPlan:
    return ShardPlan(shards, frozenset(shard.key for shard in shards), misfits)


def lacking(known: set[str]) -> Unsourced:
    return Unsourced(refused=tuple(f"{name} is missing" for name in SPECS if name not in known))


def refused(*plans: ShardPlan) -> SourceError:
    with pytest.raises(SourceError) as caught:
        assign([claims(one, SPECS) for one in plans], SPECS, "/models/base", lacking)
    assert caught.value.file == "/models/base"
    assert "every tensor of the base, each element from one rank" in str(caught.value.hint)
    return caught.value


def test_elements_that_no_rank_has_are_counted():
    error = refused(plan(shard("a", 0, 6), shard("b", 0, 5)), plan(shard("a", 6, 10)))
    assert (error.what, error.found) == (NOT_WHOLE, "a: 10 of 12 elements")


def test_elements_that_two_ranks_have_in_unequal_shards_are_counted():
    error = refused(plan(shard("a", 0, 8), shard("b", 0, 5)), plan(shard("a", 4, 12)))
    assert (error.what, error.found) == (NOT_WHOLE, "a: 16 of 12 elements")


def test_tensor_that_no_rank_knows_and_misfits_of_any_rank_are_listed_once():
    misfit = ("x is not in the base checkpoint",)
    error = refused(plan(shard("a", 0, 6), misfits=misfit), plan(shard("a", 6, 12), misfits=misfit))
    assert (error.what, error.found) == (NOT_THE_BASE, "x is not in the base checkpoint; b is missing")


def test_long_list_is_cut():
    many = tuple(f"x{number} is not in the base checkpoint" for number in range(70))
    found = str(refused(plan(shard("a", 0, 12), shard("b", 0, 5), misfits=many)).found)
    assert found.endswith(" and 20 more")
    assert "x49 " in found
    assert "x50 " not in found


def test_ranks_with_different_base_checkpoints_are_told():
    whole = plan(shard("a", 0, 12), shard("b", 0, 5))
    other = SPECS | {"b": TensorSpec("b", (5,), "F32")}
    with pytest.raises(SourceError, match="the ranks were given different base checkpoints") as caught:
        assign([claims(whole, SPECS), claims(whole, other)], SPECS, "/models/base", lacking)
    assert caught.value.file == "/models/base"


def test_baselines_that_do_not_add_up_are_named_by_tensor(tmp_path: Path):
    tensors = {name: torch.ones(spec.shape, dtype=torch.bfloat16) for name, spec in SPECS.items()}
    base = Checkpoint(write_checkpoint(tmp_path / "base", tensors))
    error = explain([[["a", 6, 1], ["b", 5, 1]], [["a", 4, 1]]], base)
    assert error.what == "the shards of all ranks overlap or leave elements out"
    assert error.found == "a: 10 of 12 elements; b: some elements twice, others never"


def misfits_of(*partials: Any) -> tuple[str, ...]:
    return PartialSource(lambda: partials).plan(SPECS).misfits


def rows(count: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(count, 3, dtype=dtype)


@pytest.mark.parametrize(
    ("partial", "said"),
    [
        (("x", rows(1)), "x is not in the base checkpoint"),
        (("a", rows(3)), "a is BF16[4,3] in the base checkpoint, but has the shape [3, 3] at [0, 0] here"),
        (
            PartialTensor("a", rows(2), (3, 0)),
            "a is BF16[4,3] in the base checkpoint, but has the shape [2, 3] at [3, 0] here",
        ),
        (
            PartialTensor("a", rows(2), (-1, 0)),
            "a is BF16[4,3] in the base checkpoint, but has the shape [2, 3] at [-1, 0] here",
        ),
        (
            PartialTensor("a", rows(2), (0,)),
            "a is BF16[4,3] in the base checkpoint, but has the shape [2, 3] at [0] here",
        ),
        (("a", rows(4, torch.int8)), "a is BF16[4,3] in the base checkpoint, and torch.int8 cannot be rounded to that"),
    ],
    ids=["unknown", "shape", "outside", "before", "dimensions", "dtype"],
)
def test_exported_box_that_does_not_fit_is_a_misfit(partial: Any, said: str):
    assert misfits_of(partial) == (said,)


def test_box_that_comes_twice_is_a_misfit():
    assert misfits_of(("a", rows(4)), ("a", rows(4))) == ("a comes twice with the same elements",)


@pytest.mark.parametrize(
    ("later", "found"),
    [
        (PartialTensor("a", rows(1), (0, 0)), "shape [1, 3] at (0, 0)"),
        (PartialTensor("a", rows(5), (0, 0)), "shape [5, 3] at (0, 0)"),
        (("x", rows(1)), "shape [1, 3] at None"),
    ],
    ids=["another box", "outside", "another name"],
)
def test_exporter_that_changes_its_boxes_is_refused(later: Any, found: str):
    passes = iter([[("a", rows(4))], [later]])
    source = PartialSource(lambda: next(passes))
    source.plan(SPECS)
    with pytest.raises(SourceError, match="the exporter yields other boxes") as caught:
        list(source.read([0]))
    assert (caught.value.tensor, caught.value.found) == ("x" if "None" in found else "a", found)
    assert "Start a new publisher" in str(caught.value.hint)


def held(tensor: torch.Tensor, **marks: object) -> Held:
    module = nn.Module()
    module.w = nn.Parameter(tensor, requires_grad=False)
    for name, value in marks.items():
        setattr(module.w, name, value)
    return Held(module, "w", "layer.w")


def part(**marks: object) -> torch.Tensor:
    tensor = torch.zeros(2)
    for name, value in marks.items():
        setattr(tensor, name, value)
    return tensor


@pytest.mark.parametrize(
    ("partition", "found"),
    [
        (None, "no ds_tensor"),
        (part(final_location="OffloadDeviceEnum.nvme"), "offloaded to NVMe"),
        (part(ds_quant_scale=1.0), "quantized weights"),
    ],
)
def test_zero3_partition_that_is_not_understood_is_refused(partition: Any, found: str):
    with pytest.raises(SourceError, match="partitioned in a way that is not supported") as caught:
        place_of(held(torch.zeros(0), ds_shape=(4,), ds_tensor=partition), {})
    assert (caught.value.tensor, caught.value.found) == ("layer.w", found)


def test_zero3_with_a_secondary_partition_is_refused():
    hpz = held(torch.zeros(0), ds_shape=(4,), ds_tensor=part(), ds_secondary_tensor=part())
    with pytest.raises(SourceError) as caught:
        place_of(hpz, {})
    assert (caught.value.tensor, caught.value.found) == ("layer.w", "a secondary partition (hpZ)")


def test_parameter_of_another_shape_than_at_the_start_is_refused():
    module = nn.Linear(2, 4, bias=False)
    source = ShardedModuleSource(module)
    source.plan({"weight": TensorSpec("weight", (4, 2), "F32")})
    module.weight = nn.Parameter(torch.zeros(2, 4))
    with pytest.raises(SourceError, match="held in another way than when the publisher was started") as caught:
        list(source.read([0]))
    error = caught.value
    assert error.tensor == "weight"
    assert (error.expected, error.found) == ("whole on every rank, shape [4, 2]", "whole on every rank, shape [2, 4]")
    assert "start a new publisher" in str(error.hint)


class FullyShardedDataParallel(nn.Module):
    """What FSDP1 looks like from outside, with a handle of its own."""

    def __init__(self, **handle: object) -> None:
        super().__init__()
        self._handle = SimpleNamespace(**handle)


def test_fsdp1_without_original_parameters_is_refused():
    with pytest.raises(SourceError, match="which weights are whose cannot be told") as caught:
        fsdp1_places(FullyShardedDataParallel(flat_param=None, _use_orig_params=False))
    assert caught.value.hint == "Wrap with use_orig_params=True."


def test_fsdp1_of_another_torch_is_refused():
    with pytest.raises(SourceError, match="this torch's FSDP keeps its parameters in another way") as caught:
        fsdp1_places(FullyShardedDataParallel(flat_param=SimpleNamespace(), _use_orig_params=True))
    assert "_param_infos" in str(caught.value.found)


class Converted(NamePlan):
    """A plan of a model whose conversion is given."""

    def __init__(self, revert: Any) -> None:
        super().__init__(nn.Module(), Given(None))
        self._revert = lambda _, state: revert(*state.items())


@pytest.mark.parametrize(
    ("revert", "found"),
    [
        (lambda item: {"a": item[1].t().contiguous()}, "a holds its elements converted or in another order"),
        (lambda item: {"a": item[1].float()}, "a holds its elements converted or in another order"),
        (lambda item: {"a": item[1][:3]}, "of its elements, those from 9 on are in no tensor, or in two"),
        (lambda item: {"a": item[1], "b": item[1][:1]}, "of its elements, those from 3 on are in no tensor, or in two"),
    ],
    ids=["transposed", "cast", "left out", "twice"],
)
def test_conversion_that_is_not_made_of_ranges_is_refused(revert: Any, found: str):
    with pytest.raises(SourceError, match="not made of ranges of it") as caught:
        Converted(revert).of("layer.w", torch.Size([4, 3]))
    assert (caught.value.tensor, caught.value.found) == ("layer.w", found)
    assert "generic source" in str(caught.value.hint)


def test_conversion_that_raises_is_refused():
    with pytest.raises(SourceError, match="transformers cannot say what the parameter becomes") as caught:
        Converted(lambda item: item.nothing).of("layer.w", torch.Size([4]))
    assert caught.value.tensor == "layer.w"
    assert str(caught.value.found).startswith("AttributeError: ")
    assert "generic source" in str(caught.value.hint)


def test_module_that_does_not_fit_lists_every_misfit():
    module = nn.ParameterDict({"a": nn.Parameter(torch.zeros(3, 4)), "b": nn.Parameter(torch.zeros(5)), "c": None})
    module["more"] = nn.Parameter(torch.zeros(1))
    module.b = nn.Parameter(torch.zeros(5, dtype=torch.int8), requires_grad=False)
    assert ShardedModuleSource(module).plan(SPECS).misfits == (
        "a is BF16[4,3] in the base checkpoint, but has the shape [3, 4] here",
        "b is BF16[5] in the base checkpoint, and torch.int8 cannot be rounded to that",
        "more is not in the base checkpoint",
    )


def test_what_cannot_be_a_source_is_refused():
    with pytest.raises(SourceError, match="cannot publish this") as caught:
        shard_source_of(np.zeros(1))
    assert caught.value.expected == "a module, or a function that returns an iterable of PartialTensor"
    assert caught.value.found == "ndarray"
