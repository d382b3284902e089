"""Experts computed from plain weights say what the model says, whoever chooses the experts (docs/compatibility.md).

In fp32 the whole engine is compared with transformers: there all processors compute alike. In bf16 they do not, so each
call of the experts is compared with the exact result, within what rounding may do on any of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines import PROMPTS, engine
from tests.support.rounding import Bounded
from tests.support.tiny_models import make_model, train_step
from vllm_delta_snapshot.engine import cpu
from vllm_delta_snapshot.engine.compat import ExpertsCall


def _trained(folder: Path) -> Any:
    model = make_model("qwen3_moe", folder)
    train_step(model, 1, density=1.0)  # large weights: the experts decide what is said
    model.to(torch.bfloat16).save_pretrained(folder)
    return model.float()


def test_plain_experts_say_what_transformers_says(tmp_path: Path) -> None:
    from vllm import SamplingParams

    model = _trained(tmp_path / "base")
    with engine(tmp_path / "base", dtype="float32") as live:
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
        answers = live.llm.generate(
            prompts, SamplingParams(max_tokens=1, logprobs=20, detokenize=False), use_tqdm=False
        )
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        given = {token: item.logprob for token, item in answer.outputs[0].logprobs[0].items()}
        assert expected.argmax().item() in given
        torch.testing.assert_close(torch.tensor(list(given.values())), expected[list(given)], atol=0.01, rtol=0.0)


def test_plain_experts_compute_in_bf16_what_rounding_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _trained(tmp_path / "base")
    seen: list[tuple[ExpertsCall, torch.Tensor]] = []
    plain = cpu._plain_experts

    def watched(experts: Any, call: ExpertsCall) -> torch.Tensor:
        result = plain(experts, call)
        seen.append((call, result.clone()))
        return result

    monkeypatch.setattr(cpu, "_plain_experts", watched)
    with engine(tmp_path / "base") as live:
        live.tokens(4)
        layer = live.model.get_submodule("model.layers.0.mlp.experts.routed_experts")
        isa = layer.quant_method.moe_kernel.fused_experts.isa
    assert isa == ("amx" if torch.cpu._is_amx_tile_supported() else "vec")
    assert {call.hidden_states.shape[0] for call, _ in seen} >= {3, 15}  # one token of each prompt, and all of them
    for call, result in seen:
        assert _exact(call).holds(result)


def _exact(call: ExpertsCall) -> Bounded:
    """Compute every token's experts one after the other, in fp64, knowing what may be lost."""
    dtype = call.hidden_states.dtype
    assert (call.expert_map, call.are_inputs_weighted, dtype) == (None, False, torch.bfloat16)
    half = call.w1.shape[1] // 2
    rows = []
    for token, (ids, weights) in enumerate(zip(call.topk_ids.tolist(), call.topk_weights, strict=True)):
        hidden = Bounded.of(call.hidden_states[token : token + 1])
        total = Bounded.of(torch.zeros(1, call.w2.shape[1]))
        for expert, weight in zip(ids, weights, strict=True):
            gate, up = (hidden.linear(part, dtype) for part in (call.w1[expert][:half], call.w1[expert][half:]))
            total = total.plus(gate.silu_times(up, dtype).linear(call.w2[expert], dtype).times(weight))
        rows.append(total.rounded(dtype))
    return Bounded(torch.cat([row.exact for row in rows]), torch.cat([row.error for row in rows]))
