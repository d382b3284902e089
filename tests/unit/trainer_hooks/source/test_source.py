"""Sources: the trainer's tensors by their checkpoint names, and what is refused instead of published wrong."""

import warnings
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import nn

from trainer_hooks.source.items import IterableSource, ModuleSource, ParameterSource, SourceItem, source_of
from vllm_delta_snapshot.errors import SourceError
from vllm_delta_snapshot.types import TensorSpec


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.norm = nn.LayerNorm(2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight


def specs_of(*names: str) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, (1,), "F32") for name in names}


def names_of(source: ParameterSource, specs: Mapping[str, TensorSpec]) -> list[str]:
    return [name for item in source.items(specs) for name in item.names]


def loaded(source: ParameterSource, specs: Mapping[str, TensorSpec]) -> dict[str, torch.Tensor]:
    return {name: tensor for item in source.items(specs) for name, tensor in item.load()}


NORM = ("norm.weight", "norm.bias")


def test_module_yields_its_state_dict_by_name():
    module = nn.LayerNorm(2)
    found = loaded(ModuleSource(module), specs_of("weight", "bias"))
    assert {n: t.data_ptr() for n, t in found.items()} == {n: p.data_ptr() for n, p in module.named_parameters()}


def test_module_items_load_the_names_they_announce():
    for item in ModuleSource(Tied()).items(specs_of("embed.weight", "head.weight", *NORM)):
        assert item.names == tuple(name for name, _ in item.load())


def test_module_can_be_read_again_and_again():
    source, specs = ModuleSource(nn.LayerNorm(2)), specs_of("weight", "bias")
    assert names_of(source, specs) == names_of(source, specs) == ["weight", "bias"]


@pytest.mark.parametrize("kept", ["embed.weight", "head.weight"])
def test_tied_weights_come_once_where_the_base_has_one_name(kept: str):
    assert names_of(ModuleSource(Tied()), specs_of(kept, *NORM)) == (
        [kept, *NORM] if kept == "embed.weight" else [*NORM, kept]
    )


def test_tied_weights_come_under_both_names_where_the_base_has_both():
    found = loaded(ModuleSource(Tied()), specs_of("embed.weight", "head.weight", *NORM))
    assert found["embed.weight"].data_ptr() == found["head.weight"].data_ptr()


def test_untied_tensor_that_the_base_has_not_is_refused_and_named():
    with pytest.raises(SourceError, match=r"the base checkpoint has not") as caught:
        names_of(ModuleSource(Tied()), specs_of("embed.weight", "head.weight", "norm.weight"))
    assert caught.value.tensor == "norm.bias"


def test_module_with_many_strangers_names_a_few():
    with pytest.raises(SourceError, match="20 such tensors") as caught:
        names_of(ModuleSource(nn.Sequential(*(nn.Linear(1, 1) for _ in range(10)))), {})
    assert len(str(caught.value)) < 400


def test_persistent_buffer_is_yielded_and_another_is_not():
    module = nn.Module()
    module.register_buffer("kept", torch.zeros(2))
    module.register_buffer("dropped", torch.zeros(2), persistent=False)
    assert names_of(ModuleSource(module), specs_of("kept")) == ["kept"]


@pytest.mark.parametrize("mark", ["placements", "ds_shape"])
def test_sharded_parameter_is_refused_and_named(mark: str):
    module = nn.LayerNorm(2)
    setattr(module.weight, mark, (4,))
    with pytest.raises(SourceError, match="sharded") as caught:
        names_of(ModuleSource(module), specs_of("weight", "bias"))
    assert caught.value.tensor == "weight"


def test_sharded_tensor_in_an_iterable_is_refused():
    tensor = torch.zeros(2)
    tensor.placements = ()
    with pytest.raises(SourceError, match="sharded"):
        names_of(IterableSource({"w": tensor}), specs_of("w"))


def test_parameter_without_data_is_refused():
    with pytest.raises(SourceError, match="meta device"):
        names_of(ModuleSource(nn.LayerNorm(2, device="meta")), specs_of("weight", "bias"))


def test_sparse_tensor_is_refused():
    with pytest.raises(SourceError, match="not a dense tensor"):
        names_of(IterableSource({"w": torch.eye(2).to_sparse()}), specs_of("w"))


def test_value_that_is_no_tensor_is_refused():
    with pytest.raises(SourceError, match="not a tensor") as caught:
        names_of(IterableSource({"w": [1.0]}), specs_of("w"))
    assert caught.value.found == "list"


def fingerprint(module: nn.Module) -> object:
    source = ModuleSource(module, skip_frozen=True)
    [item] = [item for item in source.items(specs_of("weight", "bias")) if item.names == ("weight",)]
    return item.fingerprint


def frozen() -> nn.LayerNorm:
    return nn.LayerNorm(64).requires_grad_(False)


def test_no_parameter_makes_a_promise_unless_told_to():
    assert [item.fingerprint for item in ModuleSource(frozen()).items(specs_of("weight", "bias"))] == [None, None]


def test_trainable_parameter_makes_no_promise():
    assert fingerprint(nn.LayerNorm(2)) is None


def test_buffer_makes_no_promise():
    module = nn.Module()
    module.register_buffer("weight", torch.zeros(2))
    assert fingerprint(module) is None


def test_frozen_parameter_untouched_keeps_its_fingerprint():
    module = frozen()
    assert fingerprint(module) is not None
    assert fingerprint(module) == fingerprint(module)


def test_frozen_parameter_written_in_place_has_another_fingerprint():
    module = frozen()
    before = fingerprint(module)
    module.weight.add_(1)
    assert fingerprint(module) != before


def test_frozen_parameter_loaded_again_has_another_fingerprint():
    module = frozen()
    before = fingerprint(module)
    module.load_state_dict({k: v + 1 for k, v in module.state_dict().items()})
    assert fingerprint(module) != before


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("size", [64, 4096])
def test_frozen_parameter_replaced_has_another_fingerprint(size: int, times: int):
    # The allocator hands the address of the first one out again: the address alone proves nothing.
    module = nn.LayerNorm(size).requires_grad_(False)
    for number in range(20):
        before = fingerprint(module)
        for _ in range(times):
            module.weight = nn.Parameter(torch.full((size,), float(number)), requires_grad=False)
        assert fingerprint(module) != before


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("size", [64, 4096])
def test_frozen_parameter_whose_data_is_replaced_has_another_fingerprint(size: int, times: int):
    module = nn.LayerNorm(size).requires_grad_(False)
    for number in range(20):
        before = fingerprint(module)
        for _ in range(times):
            module.weight.data = torch.full((size,), float(number))
        assert fingerprint(module) != before


def test_fingerprint_does_not_keep_replaced_weights_alive():
    module = frozen()
    before = fingerprint(module)
    storage = module.weight.untyped_storage()._weak_ref()
    module.weight = nn.Parameter(torch.zeros(64), requires_grad=False)
    assert before is not None
    assert torch.UntypedStorage._expired(storage)
    torch.UntypedStorage._free_weak_ref(storage)


def pairs() -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", torch.zeros(1)
    yield "b", torch.ones(1)


class Again:
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return pairs()


@pytest.mark.parametrize(
    "given",
    [dict(pairs()), list(pairs()), pairs, Again(), lambda: list(pairs())],
    ids=["dict", "list", "function", "re-iterable", "lambda"],
)
def test_iterable_source_can_be_read_again_and_again(given: object):
    source = source_of(given)
    assert isinstance(source, IterableSource)
    assert names_of(source, {}) == names_of(source, {}) == ["a", "b"]


@pytest.mark.parametrize(
    "given", [pairs(), iter(list(pairs())), iter({}), map(str, [])], ids=["generator", "list", "dict", "map"]
)
def test_iterator_that_is_empty_the_second_time_is_refused(given: object):
    with pytest.raises(SourceError, match="only once") as caught:
        source_of(given)
    assert caught.value.hint


def test_source_of_a_module_is_a_module_source():
    assert isinstance(source_of(nn.LayerNorm(2)), ModuleSource)


def test_source_of_a_source_is_itself():
    class Own:
        def items(self, specs: Mapping[str, TensorSpec]) -> Iterator[SourceItem]:
            yield from ()

    own = Own()
    assert source_of(own) is own


@pytest.mark.parametrize("given", [None, 3, object()], ids=["nothing", "a number", "an object"])
def test_source_of_anything_else_is_refused(given: object):
    with pytest.raises(SourceError, match="cannot publish this"):
        source_of(given)


def test_module_in_fsdp_is_refused(tmp_path):
    from torch import distributed
    from torch.distributed.fsdp import FullyShardedDataParallel

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrapped = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=True)
        with pytest.raises(SourceError, match="wrapped in FSDP"):
            ModuleSource(wrapped)
    finally:
        distributed.destroy_process_group()
