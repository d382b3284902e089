"""Experts computed from plain weights say what the model says, whoever chooses the experts (docs/compatibility.md)."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.engines import PROMPTS, engine
from tests.support.tiny_models import make_model, train_step


def test_plain_experts_say_what_transformers_says(tmp_path: Path) -> None:
    from vllm import SamplingParams

    model = make_model("qwen3_moe", tmp_path / "base")
    train_step(model, 1, density=1.0)  # large weights: the experts decide what is said
    model.to(torch.bfloat16).save_pretrained(tmp_path / "base")
    model.float()
    with engine(tmp_path / "base") as live:
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
        answers = live.llm.generate(
            prompts, SamplingParams(max_tokens=1, logprobs=20, detokenize=False), use_tqdm=False
        )
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        given = {token: item.logprob for token, item in answer.outputs[0].logprobs[0].items()}
        assert expected.argmax().item() in given
        torch.testing.assert_close(torch.tensor(list(given.values())), expected[list(given)], atol=0.25, rtol=0.0)
