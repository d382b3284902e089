# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU backend with plain weights.

After loading, the CPU backend packs linear layers and experts into the layouts of its kernels and computes from the
packed copies, which patches never reach: an update would "succeed" and change nothing, or land in permuted places. For
engines that use this plugin's backend, and for no others, the packing is left out and layers compute from the plain
weights (`cpu_linear`). That is slower than packed kernels; exact updates are worth it.

What is changed here only the CPU backend calls; other devices are not touched.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from vllm_delta_snapshot.engine.compat import experts_call_reader, take_routing
from vllm_delta_snapshot.engine.log import logger
from vllm_delta_snapshot.engine.vllm_patches.cpu_experts import described, plain_experts
from vllm_delta_snapshot.engine.vllm_patches.cpu_linear import is_plain_product, linear_for

__all__ = ["is_ours", "is_plain_linear", "keep_plain_experts", "keep_plain_linears"]

_BACKEND = "delta_snapshot"
_MARK = "_delta_snapshot_plain"
_ACTIVATION = "_delta_snapshot_activation"


def keep_plain_linears(module: ModuleType) -> None:
    """Act on ``vllm.model_executor.layers.utils``: make it ask, layer by layer, whether to pack. Does nothing twice."""
    utils: Any = module
    if not getattr(utils.dispatch_cpu_unquantized_gemm, _MARK, False):
        utils.dispatch_cpu_unquantized_gemm = _asking_dispatch(utils.dispatch_cpu_unquantized_gemm)


def keep_plain_experts(module: ModuleType) -> None:
    """Act on ``vllm.model_executor.layers.fused_moe.experts.cpu_moe``: the same for experts. Does nothing twice."""
    portable: Any = module.__dict__["CPUUnquantizedExperts"]
    for experts in _with_descendants(portable):
        if not vars(experts).get(_MARK + "_asks"):
            setattr(experts, _MARK + "_asks", True)
            _ask_before_packing(experts)


def is_plain_linear(layer: torch.nn.Module) -> bool:
    """Say whether a linear layer of the CPU backend computes from its plain weight."""
    linear = getattr(layer, "cpu_linear", None)
    return linear is None or is_plain_product(linear)


def is_ours(config: Any) -> bool:
    """Say whether an engine of this configuration uses this plugin's backend."""
    return getattr(getattr(config, "weight_transfer_config", None), "backend", None) == _BACKEND


def _is_ours() -> bool:
    from vllm.config import get_current_vllm_config_or_none

    return is_ours(get_current_vllm_config_or_none())


def _asking_dispatch(packing: Any) -> Any:
    def dispatch(layer: Any, remove_weight: bool) -> None:
        # Convolutions have other kernels and no plain path; they are packed, and found out by the check at init.
        if not _is_ours() or layer.weight.ndim != 2:
            packing(layer, remove_weight)
            return
        logger.debug("keeping plain weights of %s", type(layer).__name__)
        layer.cpu_linear = linear_for(layer.weight.dtype)

    setattr(dispatch, _MARK, True)
    return dispatch


def _with_descendants(kind: Any) -> list[Any]:
    children: list[Any] = kind.__subclasses__()
    return [kind, *(found for child in children for found in _with_descendants(child))]


def _ask_before_packing(experts: Any) -> None:
    # Those for AMX and other processors inherit from the portable ones; each is wrapped for what it defines itself.
    if "process_weights_after_loading" in vars(experts):
        pack = experts.process_weights_after_loading

        def process_weights_after_loading(self: Any, layer: torch.nn.Module) -> None:
            if _is_ours():
                setattr(self, _MARK, True)
                setattr(self, _ACTIVATION, described(self.activation_config))
                take_routing(self, layer)
                return
            pack(self, layer)

        experts.process_weights_after_loading = process_weights_after_loading
    if "apply" in vars(experts):
        packed_apply = experts.apply
        read_call = experts_call_reader(packed_apply)

        def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not getattr(self, _MARK, False):
                return packed_apply(self, *args, **kwargs)
            # A compiler traces this; the operator in `plain_experts` is where it looks no further.
            call = read_call(self, *args, **kwargs)
            output = torch.empty_like(call.hidden_states) if call.output is None else call.output
            plain_experts(
                output,
                call.hidden_states,
                call.w1,
                call.w2,
                self.w1_bias,
                self.w2_bias,
                call.topk_weights,
                call.topk_ids,
                call.expert_map,
                call.activation.value,
                getattr(self, _ACTIVATION),
                call.are_inputs_weighted,
            )
            return output if call.output is None else None

        experts.apply = apply
