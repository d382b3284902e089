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
    cpu_moe: Any = module
    for experts in (cpu_moe.CPUUnquantizedExperts, cpu_moe.X86CPUUnquantizedExperts):
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


def _ask_before_packing(experts: Any) -> None:
    # The AMX class inherits from the portable one; each is wrapped only for what it defines itself.
    if "process_weights_after_loading" in vars(experts):
        pack = experts.process_weights_after_loading

        def process_weights_after_loading(self: Any, layer: torch.nn.Module) -> None:
            if _is_ours():
                setattr(self, _MARK, True)
                return
            pack(self, layer)

        experts.process_weights_after_loading = process_weights_after_loading
    if "apply" in vars(experts):
        packed_apply = experts.apply

        def apply(self: Any, output: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if getattr(self, _MARK, False):
                _plain_experts(self, output, *args, **kwargs)
            else:
                packed_apply(self, output, *args, **kwargs)

        experts.apply = apply


def _plain_experts(
    experts: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    global_num_experts: int,
    expert_map: torch.Tensor | None,
    a1q_scale: torch.Tensor | None,
    a2_scale: torch.Tensor | None,
    workspace13: torch.Tensor | None,
    workspace2: torch.Tensor | None,
    expert_tokens_meta: Any,
    apply_router_weight_on_input: bool,
) -> None:
    """Compute a mixture of experts from plain ``[E, 2I, H]`` and ``[E, H, I]`` weights, one expert after the other.

    The signature is that of the method it stands for (vLLM 0.32), which is called by keywords.
    """
    del global_num_experts, a1q_scale, a2_scale, workspace13, workspace2, expert_tokens_meta
    ids = topk_ids.long()
    if expert_map is not None:
        ids = expert_map[ids].long()
    total = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for expert in range(w1.shape[0]):
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        if tokens.numel() == 0:
            continue
        bias_1 = None if experts.w1_bias is None else experts.w1_bias[expert].to(hidden_states.dtype)
        bias_2 = None if experts.w2_bias is None else experts.w2_bias[expert].to(hidden_states.dtype)
        gate_up = plain_linear(hidden_states[tokens], w1[expert], bias_1)
        inner = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype)
        experts.activation(activation, inner, gate_up)
        out = plain_linear(inner, w2[expert], bias_2).float()
        if not apply_router_weight_on_input:  # else the inputs were scaled before
            out *= topk_weights[tokens, slots, None].float()
        total.index_add_(0, tokens, out)
    output.copy_(total)
