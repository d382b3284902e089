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

from vllm_delta_snapshot.engine.compat import ExpertsCall, experts_call_reader, take_routing
from vllm_delta_snapshot.engine.cpu_linear import plain_linear
from vllm_delta_snapshot.engine.log import logger

__all__ = ["is_plain_linear", "keep_plain_experts", "keep_plain_linears"]

_BACKEND = "delta_snapshot"
_MARK = "_delta_snapshot_plain"


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
    return linear is None or linear is plain_linear or linear is torch.nn.functional.linear


def _is_ours() -> bool:
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    transfer = getattr(config, "weight_transfer_config", None)
    return getattr(transfer, "backend", None) == _BACKEND


def _asking_dispatch(packing: Any) -> Any:
    def dispatch(layer: Any, remove_weight: bool) -> None:
        # Convolutions have other kernels and no plain path; they are packed, and found out by the check at init.
        if not _is_ours() or layer.weight.ndim != 2:
            packing(layer, remove_weight)
            return
        logger.debug("keeping plain weights of %s", type(layer).__name__)
        layer.cpu_linear = plain_linear

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
            call = read_call(self, *args, **kwargs)
            result = _plain_experts(self, call)
            if call.output is None:
                return result
            call.output.copy_(result)
            return None

        experts.apply = apply


def _plain_experts(experts: Any, call: ExpertsCall) -> torch.Tensor:
    """Compute a mixture of experts from plain weights, one expert after the other."""
    from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation

    hidden_states = call.hidden_states
    ids = call.topk_ids.long()
    if call.expert_map is not None:
        ids = call.expert_map[ids].long()
    total = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for expert in range(call.w1.shape[0]):
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        if tokens.numel() == 0:
            continue
        bias_1 = None if experts.w1_bias is None else experts.w1_bias[expert].to(hidden_states.dtype)
        bias_2 = None if experts.w2_bias is None else experts.w2_bias[expert].to(hidden_states.dtype)
        gate_up = plain_linear(hidden_states[tokens], call.w1[expert], bias_1)
        inner = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype)
        apply_moe_activation(call.activation, inner, gate_up, activation_config=experts.activation_config)
        out = plain_linear(inner, call.w2[expert], bias_2).float()
        if not call.are_inputs_weighted:
            out *= call.topk_weights[tokens, slots, None].float()
        total.index_add_(0, tokens, out)
    return total.to(hidden_states.dtype)
