# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts on CPUs, computed from plain weights, one expert after the other.

One opaque operator for a compiler: which experts have tokens is known only when it runs. It holds nothing; all that
it reads are its arguments.
"""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from typing import Any, Final

import torch

from vllm_delta_snapshot.engine.vllm_patches.cpu_linear import plain_linear

__all__ = ["described", "plain_experts"]


def described(activation_config: Any) -> str:
    """Return vLLM's settings of an activation as text, which an operator can take."""
    return json.dumps(dataclasses.asdict(activation_config))


def plain_experts(
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w1_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    activation: str,
    activation_config: str,
    are_inputs_weighted: bool,
) -> None:
    """Compute what the chosen experts say, and write it into `output`.

    Args:
        output: shape ``(tokens, hidden)``.
        hidden_states: shape ``(tokens, hidden)``.
        w1: shape ``(experts, 2 * inner, hidden)``.
        w2: shape ``(experts, hidden, inner)``.
        w1_bias: shape ``(experts, 2 * inner)``.
        w2_bias: shape ``(experts, hidden)``.
        topk_weights: shape ``(tokens, k)``.
        topk_ids: the experts chosen, of the same shape.
        expert_map: from global to local experts.
        activation: the name of the function that lies between the two.
        activation_config: its settings, see `described`.
        are_inputs_weighted: whether `hidden_states` carry the routing weights already.
    """
    torch.ops.delta_snapshot.plain_experts(
        output,
        hidden_states,
        w1,
        w2,
        w1_bias,
        w2_bias,
        topk_weights,
        topk_ids,
        expert_map,
        activation,
        activation_config,
        are_inputs_weighted,
    )


def _compute(
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w1_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    activation: str,
    activation_config: str,
    are_inputs_weighted: bool,
) -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation, apply_moe_activation

    ids = topk_ids.long()
    if expert_map is not None:
        ids = expert_map[ids].long()
    total = torch.zeros(hidden_states.shape, dtype=torch.float32)
    function, config = MoEActivation.from_str(activation), _config_of(activation_config)
    for expert in range(w1.shape[0]):
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        if tokens.numel() == 0:
            continue
        biases = [None if bias is None else bias[expert].to(hidden_states.dtype) for bias in (w1_bias, w2_bias)]
        gate_up = plain_linear(hidden_states[tokens], w1[expert], biases[0])
        inner = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype)
        apply_moe_activation(function, inner, gate_up, activation_config=config)
        out = plain_linear(inner, w2[expert], biases[1]).float()
        if not are_inputs_weighted:
            out *= topk_weights[tokens, slots, None].float()
        total.index_add_(0, tokens, out)
    output.copy_(total)


@cache
def _config_of(text: str) -> Any:
    from vllm.model_executor.layers.fused_moe.activation import ApplyMoEActivationConfig

    return ApplyMoEActivationConfig(**json.loads(text))


_LIBRARY: Final = torch.library.Library("delta_snapshot", "FRAGMENT")  # type: ignore[no-untyped-call]
_SCHEMA: Final = (
    "plain_experts(Tensor(a!) output, Tensor hidden_states, Tensor w1, Tensor w2, Tensor? w1_bias, Tensor? w2_bias, "
    "Tensor topk_weights, Tensor topk_ids, Tensor? expert_map, str activation, str activation_config, "
    "bool are_inputs_weighted) -> ()"
)
_LIBRARY.define(_SCHEMA)  # type: ignore[no-untyped-call]
_LIBRARY.impl("plain_experts", _compute, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("delta_snapshot::plain_experts", lambda *_: None, lib=_LIBRARY)
