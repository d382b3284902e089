"""A transformers model is published under the names that `save_pretrained` writes; wrappers change nothing.

Beside test_frozen.py the one fast test module that imports transformers (and, by way of the wrappers, the compiler of
torch): both are slow.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.core_model_loading import WeightRenaming
from transformers.utils import logging as transformers_logging

from tests.support.checkpoints import write_checkpoint
from tests.support.runs import State, assert_same_state, replay
from tests.support.tensors import bits_of
from trainer_hooks import DeltaPublisher, ModuleSource, ShardedPublisher
from trainer_hooks.source.names import CheckpointNames
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import SourceError

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
}


ONE_LAYER = {name: size for name, size in SIZES.items() if name != "head_dim"} | {"num_hidden_layers": 1}
SEEING = {"hidden_size": 16, "intermediate_size": 16, "patch_size": 14}


def gemma3_vlm() -> PreTrainedModel:
    text = ONE_LAYER | {"head_dim": 8, "sliding_window": 8, "layer_types": ["full_attention"]}
    vision = SEEING | {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, tie_word_embeddings=True)
    )


def qwen2_5_vlm() -> PreTrainedModel:
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    text = ONE_LAYER | ids | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    vision = SEEING | {"depth": 1, "num_heads": 2, "out_hidden_size": 16}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)
    return Qwen2_5_VLForConditionalGeneration(config)


def mixtral() -> PreTrainedModel:
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2, "tie_word_embeddings": False}
    return MixtralForCausalLM(MixtralConfig(**ONE_LAYER, **experts))


def gemma4() -> PreTrainedModel:
    heads = {"head_dim": 8, "global_head_dim": 16, "sliding_window": 8, "layer_types": ["full_attention"]}
    inputs = {"vocab_size_per_layer_input": 32, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
    return Gemma4ForCausalLM(Gemma4TextConfig(**ONE_LAYER, **heads, **inputs))


KINDS = {
    "prefixes and a tied head": (gemma3_vlm, "language_model.model.embed_tokens.weight"),
    "a prefix": (qwen2_5_vlm, "model.embed_tokens.weight"),
    "experts, renamed": (mixtral, "model.layers.0.block_sparse_moe.experts.2.w3.weight"),
    "experts": (lambda: moe_model(), "model.layers.1.mlp.experts.3.gate_proj.weight"),
    "buffers and a tied head": (gemma4, "model.layers.0.layer_scalar"),
}
"""By what differs between model and checkpoint: the model, and one of its checkpoint names."""


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers_logging.disable_progress_bar()


def moe_model(*, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2, tie_word_embeddings=False
    )
    return Qwen3MoeForCausalLM(config).to(dtype)


def tied_model() -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)).to(torch.bfloat16)


def saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def saved_state(model: PreTrainedModel, folder: Path) -> State:
    return {name: bits_of(t) for name, t in load_file(saved(model, folder) / "model.safetensors").items()}


def nudge(model: nn.Module, *names: str) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not names or any(part in name for part in names):
                parameter.view(-1)[::7] += 0.5


@pytest.fixture
def moe(tmp_path: Path) -> tuple[PreTrainedModel, Path]:
    model = moe_model()
    return model, saved(model, tmp_path / "base")


def test_fused_experts_come_under_the_names_of_the_checkpoint(moe: tuple[PreTrainedModel, Path]):
    model, base = moe
    specs = Checkpoint(base).specs
    names = [name for item in ModuleSource(model).items(specs) for name in item.names]
    assert sorted(names) == sorted(specs)
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in names


def test_fused_parameter_is_one_item_of_many_names(moe: tuple[PreTrainedModel, Path]):
    model, base = moe
    sizes = {len(item.names) for item in ModuleSource(model).items(Checkpoint(base).specs)}
    assert sizes == {1, 4, 8}


def test_published_model_is_what_save_pretrained_writes(moe: tuple[PreTrainedModel, Path], tmp_path: Path):
    model, base = moe
    publisher = DeltaPublisher(model, sync_dir=str(tmp_path / "run"), base=base, asynchronous=False)
    expected = [saved_state(model, tmp_path / "saved-0")]
    for version, names in enumerate([(), ("gate_up_proj",), ("down_proj", "norm")], start=1):
        nudge(model, *names)
        publisher.publish()
        expected.append(saved_state(model, tmp_path / f"saved-{version}"))
    for found, state in zip(replay(tmp_path / "run", base, tmp_path), expected, strict=True):
        assert_same_state(found, state)


def test_change_in_one_fused_expert_touches_only_its_own_tensors(moe: tuple[PreTrainedModel, Path], tmp_path: Path):
    model, base = moe
    publisher = DeltaPublisher(model, sync_dir=str(tmp_path / "run"), base=base, asynchronous=False)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.gate_up_proj[2] += 1
    report = publisher.publish().report
    state, changed = replay(tmp_path / "run", base, tmp_path), []
    for name, bits in state[0].items():
        if bits.tolist() != state[1][name].tolist():
            changed.append(name)
    prefix = "model.layers.1.mlp.experts.2"
    assert sorted(changed) == [f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"]
    assert report.changed_tensors == 2


def test_master_weights_in_fp32_are_published_as_a_bf16_save_would_be(
    moe: tuple[PreTrainedModel, Path], tmp_path: Path
):
    _, base = moe
    model = moe_model(dtype=torch.float32)
    nudge(model)
    DeltaPublisher(model, sync_dir=str(tmp_path / "run"), base=base, asynchronous=False).publish()
    expected = saved_state(model.to(torch.bfloat16), tmp_path / "saved")
    assert_same_state(replay(tmp_path / "run", base, tmp_path)[-1], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_both_publishers_write_what_save_pretrained_writes(kind: str, tmp_path: Path):
    make, name = KINDS[kind]
    torch.manual_seed(0)
    model = make().to(torch.bfloat16)
    base = saved(model, tmp_path / "base")
    publishers = [
        publisher(model, sync_dir=str(tmp_path / publisher.__name__), base=base, asynchronous=False, threads=1)
        for publisher in (DeltaPublisher, ShardedPublisher)
    ]
    with torch.no_grad():
        for number, tensor in enumerate({id(t): t for t in model.state_dict().values()}.values()):
            if tensor.is_floating_point():
                tensor.view(-1)[number % 3 % tensor.numel() :: 5] += 0.5
    expected = saved_state(model, tmp_path / "saved")
    assert name in expected
    for publisher in publishers:
        assert publisher.publish().report.changed_tensors == len(expected)
        assert_same_state(replay(tmp_path / type(publisher).__name__, base, tmp_path)[-1], expected)


def test_tied_model_is_published_once(tmp_path: Path):
    model = tied_model()
    base = saved(model, tmp_path / "base")
    publisher = DeltaPublisher(model, sync_dir=str(tmp_path / "run"), base=base, asynchronous=False)
    nudge(model, "embed_tokens")
    assert publisher.publish().report.changed_tensors == 1
    assert_same_state(replay(tmp_path / "run", base, tmp_path)[-1], saved_state(model, tmp_path / "saved"))


def test_tied_model_whose_base_has_both_names_is_published_under_both(tmp_path: Path):
    model = tied_model()
    tensors = load_file(saved(model, tmp_path / "saved") / "model.safetensors")
    both = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    base = write_checkpoint(tmp_path / "base", both)
    publisher = DeltaPublisher(model, sync_dir=str(tmp_path / "run"), base=base, asynchronous=False)
    nudge(model, "embed_tokens")
    assert publisher.publish().report.changed_tensors == 2
    state = replay(tmp_path / "run", base, tmp_path)[-1]
    assert state["lm_head.weight"].tolist() == state["model.embed_tokens.weight"].tolist()
    assert state["lm_head.weight"].tolist() == bits_of(model.lm_head.weight).tolist()


def test_frozen_fused_experts_are_skipped_and_read_after_a_change(moe: tuple[PreTrainedModel, Path], tmp_path: Path):
    model, base = moe
    for layer in model.model.layers:
        layer.mlp.experts.requires_grad_(False)
    publisher = DeltaPublisher(model, sync_dir=str(tmp_path / "run"), base=base, asynchronous=False)
    publisher.publish()
    nudge(model, "gate_up_proj")
    assert publisher.publish().report.changed_tensors == 16
    assert_same_state(replay(tmp_path / "run", base, tmp_path)[-1], saved_state(model, tmp_path / "saved"))


def test_model_that_is_not_the_bases_is_refused(moe: tuple[PreTrainedModel, Path], tmp_path: Path):
    with pytest.raises(SourceError):
        DeltaPublisher(tied_model(), sync_dir=str(tmp_path / "run"), base=moe[1], asynchronous=False)
    assert not (tmp_path / "run").exists()


def test_renamed_parameter_is_handed_out_itself(moe: tuple[PreTrainedModel, Path]):
    names, weight = CheckpointNames(moe[0]), moe[0].lm_head.weight
    [part] = names.parts(moe[0], "lm_head.weight", weight)
    [(name, tensor)] = part.load()
    assert (name, tensor.data_ptr()) == ("lm_head.weight", weight.data_ptr())


def test_conversions_that_a_model_gets_later_are_found(moe: tuple[PreTrainedModel, Path]):
    model, weight = moe[0], moe[0].lm_head.weight
    names = CheckpointNames(model)
    assert [list(part.forms) for part in names.parts(model, "lm_head.weight", weight)] == [["lm_head.weight"]]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            model, "_weight_conversions", [WeightRenaming("unembed.weight", "lm_head.weight")], raising=False
        )
        assert [list(part.forms) for part in names.parts(model, "lm_head.weight", weight)] == [["unembed.weight"]]


def test_plain_module_keeps_its_names():
    module = nn.Linear(2, 2)
    [part] = CheckpointNames(module).parts(module, "weight", module.weight)
    assert part.forms == {"weight": (module.weight.shape, module.weight.dtype)}


def test_compiled_model_has_the_names_of_the_model(moe: tuple[PreTrainedModel, Path]):
    model, base = moe
    specs = Checkpoint(base).specs
    compiled = torch.compile(model, backend="eager")
    names = [name for item in ModuleSource(compiled).items(specs) for name in item.names]
    assert sorted(names) == sorted(specs)


def test_distributed_model_has_the_names_of_the_model(moe: tuple[PreTrainedModel, Path], tmp_path: Path):
    model, base = moe
    specs = Checkpoint(base).specs
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        names = [name for item in ModuleSource(wrapped).items(specs) for name in item.names]
    finally:
        dist.destroy_process_group()
    assert sorted(names) == sorted(specs)
