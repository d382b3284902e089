# SPDX-License-Identifier: Apache-2.0
"""Which layers of a live model hold their weights as the checkpoint does. Decided by what the layers are.

Three kinds do not: quantized layers, which can be reloaded whole; layers that compute from a packed copy, which
updates never reach; and attention layers that keep tensors computed from weights beside them (MLA's absorbed
projections), which would stay as they are. The last two are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from vllm_delta_snapshot.engine.cpu import is_plain_linear
from vllm_delta_snapshot.errors import TensorRefused

__all__ = ["Layers", "examine_layers", "refuse_layers"]

_NOT_WEIGHTS: Final = ("kv_cache",)


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
    live = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()] if t.numel()}
    for name, module in model.named_modules():
        method: Any = getattr(module, "quant_method", None)
        if not is_plain_linear(module):
            refused[name] = "computes from a packed copy"
        elif derived := list(_derived_tensors(module, live)):
            refused[name] = f"keeps {', '.join(derived)}, computed from weights"
        elif method is not None and not isinstance(method, _plain_methods()):
            quantized[name] = f"quantization method {type(method).__name__}"
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
            hint="Serve the model with plain weights.",
        )


def _own_tensors(module: torch.nn.Module) -> Sequence[torch.Tensor]:
    # Experts keep their weights in submodules in some versions of vLLM; those have the same form.
    return [*module.parameters(), *module.buffers()]


def _derived_tensors(module: torch.nn.Module, live: set[int]) -> Iterator[str]:
    """Yield the tensors that an attention layer, or its implementation, keeps outside of parameters and buffers."""
    if not (hasattr(module, "impl") and callable(getattr(module, "process_weights_after_loading", None))):
        return
    for prefix, owner in (("", module), ("impl.", module.impl)):
        for name, value in vars(owner).items():
            if (
                isinstance(value, torch.Tensor)
                and value.is_floating_point()
                and value.numel() > 1
                and name not in _NOT_WEIGHTS
                and value.untyped_storage().data_ptr() not in live
            ):
                yield prefix + name


def _plain_methods() -> tuple[type, ...]:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    # A KV cache method holds scales of the cache, not weights.
    return (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod, BaseKVCacheMethod)
