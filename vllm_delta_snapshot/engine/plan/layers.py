# SPDX-License-Identifier: Apache-2.0
"""Which layers of a live model hold their weights as the checkpoint does. Decided by what the layers are.

Three kinds do not: quantized layers, which can be reloaded whole; layers that compute from a packed copy, and layers
whose weights vLLM freed after it had packed them, which updates never reach. The last two are refused. Tensors that
layers compute from weights beside them are found by running what computes them (`engine.plan.derived`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from vllm_delta_snapshot.engine.vllm_patches.cpu import is_plain_linear
from vllm_delta_snapshot.errors import TensorRefused

__all__ = ["Layers", "examine_layers", "is_plain_method", "loaded_names", "post_processing", "refuse_layers"]


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of one worker's model that are not plain.

    Attributes:
        quantized: by module name, the method; their weights are another form of the checkpoint's.
        refused: by module name, why no update can reach them.
        modules: all of these, by name.
    """

    quantized: Mapping[str, str]
    refused: Mapping[str, str]
    modules: Mapping[str, torch.nn.Module]

    def reason_of_storages(self) -> dict[int, str]:
        """Return, by address of a storage, why its content is not the checkpoint's."""
        reasons: dict[int, str] = {}
        for name, module in self.modules.items():
            reason = f"{name} ({self.quantized.get(name) or self.refused[name]})"
            for tensor in _own_tensors(module):
                if tensor.numel():
                    reasons.setdefault(tensor.untyped_storage().data_ptr(), reason)
        return reasons


def examine_layers(model: torch.nn.Module) -> Layers:
    """Look at every layer. Reads no weight."""
    quantized: dict[str, str] = {}
    refused: dict[str, str] = {}
    modules: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules():
        method: Any = getattr(module, "quant_method", None)
        if not is_plain_linear(module):
            refused[name] = "computes from a packed copy"
        elif method is not None and not isinstance(method, _plain_methods()):
            quantized[name] = f"quantization method {type(method).__name__}"
        elif freed := _freed(module):
            refused[name] = (
                f"{freed} was freed after a copy of it was packed; for MLA on a CPU with AMX, start the engine with "
                "--attention-backend CPU_MLA"
            )
        else:
            continue
        modules[name] = module
    return Layers(quantized, refused, modules)


def refuse_layers(refused: Mapping[str, str]) -> None:
    """Refuse to serve these layers.

    Raises:
        TensorRefused: names them; not raised if there are none.
    """
    if refused:
        listed = [f"{name} ({reason})" for name, reason in refused.items()]
        more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
        raise TensorRefused(
            "layers whose loaded form is not the checkpoint's cannot be patched in place",
            tensor=", ".join(listed[:5]) + more,
            hint="Serve the model with plain weights, or with another backend for these layers.",
        )


def post_processing(module: torch.nn.Module, config: Any) -> Callable[[], Any] | None:
    """Return what vLLM runs on a layer once all weights are loaded, if it may be run again.

    That is so for attention of all kinds, whose processing comes after that of all other layers, and for plain linear
    layers and embeddings. Quantized layers are processed by a reload; plain experts re-lay out what they find.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    method: Any = getattr(module, "quant_method", None)
    own = getattr(module, "process_weights_after_loading", None)
    if callable(own) and (hasattr(module, "impl") or hasattr(module, "get_attn_backend") or _is_deferred(module)):
        return partial(own, config.model_config.dtype)
    process = getattr(method, "process_weights_after_loading", None)
    if callable(process) and is_plain_method(module) and not isinstance(method, UnquantizedFusedMoEMethod):
        return partial(process, module)
    return None


def is_plain_method(module: torch.nn.Module) -> bool:
    """Say whether a layer has a method that keeps weights as they are."""
    return isinstance(getattr(module, "quant_method", None), _plain_methods()[:-1])


def loaded_names(module: torch.nn.Module) -> frozenset[str]:
    """Return the parameters and buffers that a layer had before any weight was loaded."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    parameters, buffers = get_layerwise_info(module).restore_metadata
    return frozenset(parameters) | frozenset(buffers)


def _freed(module: torch.nn.Module) -> str | None:
    """Return a parameter that had elements before weights were loaded, and has none now."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    before, _ = get_layerwise_info(module).restore_metadata
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.numel() == 0 and name in before and before[name].numel():
            return name
    return None


def _is_deferred(module: torch.nn.Module) -> bool:
    try:
        from vllm.model_executor.layers.attention import is_deferred_attention_layer
    except ImportError:  # vLLM before 0.32
        return False
    return bool(is_deferred_attention_layer(module))


def _own_tensors(module: torch.nn.Module) -> Sequence[torch.Tensor]:
    # Experts keep their weights in submodules in some versions of vLLM; those have the same form.
    return [*module.parameters(), *module.buffers()]


def _plain_methods() -> tuple[type, ...]:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    # A KV cache method holds scales of the cache, not weights.
    return (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod, BaseKVCacheMethod)
