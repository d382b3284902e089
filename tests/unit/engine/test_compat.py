"""One reading of the two ways in which vLLM calls the CPU's experts."""

from __future__ import annotations

from typing import Any

import torch

from vllm_delta_snapshot.engine.compat import ExpertsCall, experts_call_reader, take_routing

HIDDEN, W1, W2 = torch.ones(2, 3), torch.ones(4, 6, 3), torch.ones(4, 3, 3)
WEIGHTS, IDS = torch.tensor([[0.5], [2.0]]), torch.tensor([[1], [3]])


class _Told:
    """As in vLLM 0.30 and later."""

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        expert_map: torch.Tensor | None,
        workspace2: torch.Tensor | None,
        apply_router_weight_on_input: bool,
    ) -> None: ...


class _Choosing:
    """As in vLLM 0.29."""

    renormalize = False
    scoring_func = "softmax"

    def _select_experts(self, hidden_states, router_logits, num_expert_group, topk_group, bias, factor):
        assert (router_logits, num_expert_group, topk_group, bias, factor) == ("logits", 2, 1, None, None)
        return WEIGHTS, IDS

    def apply(
        self,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        router_logits: Any,
        activation: Any,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        num_expert_group: int | None = None,
        e_score_correction_bias: torch.Tensor | None = None,
        routed_scaling_factor: float | None = None,
        topk_group: int | None = None,
    ) -> torch.Tensor: ...


def _read(experts: Any, is_weighted: bool, **more: Any) -> ExpertsCall:
    known = {"hidden_states": HIDDEN, "w1": W1, "w2": W2, "activation": "silu", "expert_map": None}
    call = experts_call_reader(type(experts).apply)
    return call(experts, **known, apply_router_weight_on_input=is_weighted, **more)


def test_experts_that_are_told_and_experts_that_choose_are_read_alike() -> None:
    output = torch.zeros(2, 3)
    told = _read(_Told(), False, output=output, topk_weights=WEIGHTS, topk_ids=IDS, workspace2=None)
    chosen = _read(_Choosing(), False, router_logits="logits", num_expert_group=2, topk_group=1)
    assert told.output is output
    assert chosen.output is None
    for call in (told, chosen):
        assert call.hidden_states is HIDDEN
        assert (call.w1 is W1, call.w2 is W2, call.activation, call.expert_map) == (True, True, "silu", None)
        assert (call.topk_weights is WEIGHTS, call.topk_ids is IDS, call.are_inputs_weighted) == (True, True, False)


def test_inputs_are_weighted_once_and_never_in_place() -> None:
    told = _read(_Told(), True, output=HIDDEN, topk_weights=WEIGHTS, topk_ids=IDS, workspace2=None)
    chosen = _read(_Choosing(), True, router_logits="logits", num_expert_group=2, topk_group=1)
    assert told.hidden_states is HIDDEN  # weighted by vLLM before the call
    assert chosen.hidden_states.tolist() == [[0.5] * 3, [2.0] * 3]
    assert bool((HIDDEN == 1).all())


def test_only_experts_that_choose_take_the_routing() -> None:
    layer = torch.nn.Module()
    layer.renormalize, layer.scoring_func = True, "sigmoid"
    told, choosing = _Told(), _Choosing()
    take_routing(told, layer)
    take_routing(choosing, layer)
    assert vars(told) == {}
    assert vars(choosing) == {"renormalize": True, "scoring_func": "sigmoid"}
