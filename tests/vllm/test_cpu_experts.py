"""Experts computed from plain weights say what the model says, whoever chooses the experts (docs/compatibility.md).

In fp32 the whole engine is compared with transformers: there all processors compute alike. In bf16 they do not, so each
call of the experts is compared with the exact result, within what rounding may do on any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines import PROMPTS, engine
from tests.support.rounding import Bounded
from tests.support.tiny_models import make_model, train_step
from vllm_delta_snapshot.engine.vllm_patches import cpu


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
    seen: list[tuple[Sequence[Any], torch.Tensor]] = []
    plain = cpu.plain_experts

    def watched(output: torch.Tensor, *arguments: Any) -> None:
        plain(output, *arguments)
        seen.append((arguments, output.clone()))

    monkeypatch.setattr(cpu, "plain_experts", watched)
    with engine(tmp_path / "base") as live:
        live.tokens(4)
        layer = live.model.get_submodule("model.layers.0.mlp.experts.routed_experts")
        isa = layer.quant_method.moe_kernel.fused_experts.isa
    assert isa == ("amx" if torch.cpu._is_amx_tile_supported() else "vec")
    assert {arguments[0].shape[0] for arguments, _ in seen} >= {3, 15}  # a token of each prompt, and all of them
    for arguments, result in seen:
        assert _exact(*arguments).holds(result)


def _exact(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w1_bias: None,
    w2_bias: None,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *others: Any,
) -> Bounded:
    """Compute every token's experts one after the other, in fp64, knowing what may be lost."""
    dtype = hidden_states.dtype
    assert (w1_bias, w2_bias, dtype, others[:2]) == (None, None, torch.bfloat16, (None, "silu"))
    half = w1.shape[1] // 2
    rows = []
    for token, (ids, weights) in enumerate(zip(topk_ids.tolist(), topk_weights, strict=True)):
        hidden = Bounded.of(hidden_states[token : token + 1])
        total = Bounded.of(torch.zeros(1, w2.shape[1]))
        for expert, weight in zip(ids, weights, strict=True):
            gate, up = (hidden.linear(part, dtype) for part in (w1[expert][:half], w1[expert][half:]))
            total = total.plus(gate.silu_times(up, dtype).linear(w2[expert], dtype).times(weight))
        rows.append(total.rounded(dtype))
    return Bounded(torch.cat([row.exact for row in rows]), torch.cat([row.error for row in rows]))
