"""Tiny random checkpoints of real architectures, written by transformers, and a trainer for them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_COMMON = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def _qwen3(transformers: Any) -> Any:
    return transformers.Qwen3Config(**_COMMON, head_dim=32, tie_word_embeddings=False)


def _llama_tied(transformers: Any) -> Any:
    return transformers.LlamaConfig(**_COMMON, head_dim=32, tie_word_embeddings=True)


def _qwen2_bias(transformers: Any) -> Any:
    return transformers.Qwen2Config(**_COMMON, tie_word_embeddings=False)


def _qwen3_moe(transformers: Any) -> Any:
    return transformers.Qwen3MoeConfig(
        **_COMMON,
        head_dim=32,
        tie_word_embeddings=False,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )


def _gemma3(transformers: Any) -> Any:
    return transformers.Gemma3TextConfig(
        **_COMMON,
        head_dim=32,
        sliding_window=64,
        query_pre_attn_scalar=32,
        layer_types=["sliding_attention", "full_attention"],
    )


def _gemma4(transformers: Any) -> Any:
    return transformers.Gemma4TextConfig(
        **_COMMON,
        head_dim=32,
        global_head_dim=64,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
        vocab_size_per_layer_input=512,
        hidden_size_per_layer_input=32,
        num_kv_shared_layers=0,
    )


def _mixtral(transformers: Any) -> Any:
    return transformers.MixtralConfig(**_COMMON, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False)


def _phi3(transformers: Any) -> Any:
    return transformers.Phi3Config(**_COMMON, pad_token_id=0, eos_token_id=1, bos_token_id=1, tie_word_embeddings=False)


def _gpt2(transformers: Any) -> Any:
    return transformers.GPT2Config(vocab_size=512, n_positions=512, n_embd=128, n_layer=2, n_head=4)


def _gptoss(transformers: Any) -> Any:
    return transformers.GptOssConfig(
        **_COMMON,
        head_dim=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
        tie_word_embeddings=False,
    )


def _deepseek(transformers: Any, *, dense: int = 1) -> Any:
    """MLA of the sizes that vLLM's kernels know; experts from layer `dense` on."""
    sizes = _COMMON | {"num_key_value_heads": 4}
    return transformers.DeepseekV3Config(
        **sizes,
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        moe_intermediate_size=64,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        topk_method="noaux_tc",
        first_k_dense_replace=dense,
        num_nextn_predict_layers=0,
        tie_word_embeddings=False,
    )


ARCHITECTURES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "qwen3": (_qwen3, "Qwen3ForCausalLM"),
    "llama_tied": (_llama_tied, "LlamaForCausalLM"),
    "qwen2_bias": (_qwen2_bias, "Qwen2ForCausalLM"),
    "qwen3_moe": (_qwen3_moe, "Qwen3MoeForCausalLM"),
    "gemma3": (_gemma3, "Gemma3ForCausalLM"),
    "gemma4": (_gemma4, "Gemma4ForCausalLM"),
    "mixtral": (_mixtral, "MixtralForCausalLM"),
    "phi3": (_phi3, "Phi3ForCausalLM"),
    "gpt2": (_gpt2, "GPT2LMHeadModel"),
    "gptoss": (_gptoss, "GptOssForCausalLM"),
    "deepseek": (_deepseek, "DeepseekV3ForCausalLM"),
}
"""By name: what makes the configuration, and the class that vLLM serves."""

_VARIANTS = {"deepseek_dense": (functools.partial(_deepseek, dense=2), "DeepseekV3ForCausalLM")}

OPTIONS: dict[str, dict[str, Any]] = {"deepseek": {"attention_backend": "CPU_MLA"}}
"""Options of the engine, by architecture: with AMX, vLLM's own choice for MLA keeps packed copies only."""

WEIGHTS_ONLY = frozenset({"gptoss"})
"""Architectures that vLLM loads on a CPU but cannot run there: an operator is missing from its CPU build."""


def make_model(architecture: str, folder: Path, *, seed: int = 0) -> torch.nn.Module:
    """Write a random bf16 checkpoint to `folder`, and return the model with fp32 master weights."""
    import transformers

    make_config, class_name = (ARCHITECTURES | _VARIANTS)[architecture]
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(make_config(transformers)).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "bias" in name:  # norms and biases start as ones and zeros, which hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [class_name]
    (folder / "config.json").write_text(json.dumps(config))
    return model.float()


def train_step(model: torch.nn.Module, number: int, *, density: float = 0.02) -> None:
    """Change about `density` of every master weight and at least one, by enough to change what the model says."""
    generator = torch.Generator().manual_seed(number)
    weights = {tensor.data_ptr(): tensor for tensor in model.state_dict().values() if tensor.is_floating_point()}
    with torch.no_grad():
        for weight in weights.values():  # tied ones once; loaded buffers, as Gemma 4 has them, too
            chosen = torch.rand(weight.shape, generator=generator) < density
            chosen.view(-1)[number % chosen.numel()] = True
            noise = torch.randn(weight.shape, generator=generator) * 0.2
            weight.copy_(torch.where(chosen, weight * 1.25 + noise, weight))


def quantize_int8(folder: Path) -> None:
    """Make a checkpoint one of int8 weights, with a scale for each row and activations quantized on the way."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name].float()
        scale = weight.abs().amax(1, keepdim=True) / 127
        tensors[name] = (weight / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale.to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    numbers = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": numbers | {"strategy": "channel", "dynamic": False},
        "input_activations": numbers | {"strategy": "token", "dynamic": True},
    }
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    (folder / "config.json").write_text(json.dumps(config))
