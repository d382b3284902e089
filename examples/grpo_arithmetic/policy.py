# SPDX-License-Identifier: Apache-2.0
"""The trainer's half of GRPO: group-normalised advantages and one policy-gradient step. No engine in here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

MICRO_BATCH = 16


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled completion.

    Attributes:
        question: index of its question; completions of one question are a group.
        prompt: token ids that were sent.
        completion: token ids that the engine sampled, end-of-text included.
        logprobs: the engine's log-probability of each sampled token.
        reward: set once it is known.
    """

    question: int
    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    logprobs: tuple[float, ...]
    reward: float


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """What one optimizer step saw.

    Attributes:
        grad_norm: gradient norm before clipping.
        logprob_gap: mean absolute difference between the trainer's and the engine's log-probability of the sampled
            tokens: small only if both have the same weights.
        used: completions in groups whose rewards differ; the others carry no gradient.
    """

    grad_norm: float
    logprob_gap: float
    used: int


class Policy:
    """A causal language model with its optimizer.

    Args:
        model: fp32 master weights.
        learning_rate: AdamW's; no weight decay, so that only the reward moves the weights.
    """

    def __init__(self, model: nn.Module, *, learning_rate: float) -> None:
        self.model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, rollouts: Sequence[Rollout]) -> StepStatistics:
        """Take one optimizer step on fresh rollouts of the present policy."""
        advantages = group_advantages(rollouts)
        tokens = sum(len(item.completion) for item in rollouts)
        gap, used = 0.0, 0
        self._optimizer.zero_grad(set_to_none=True)
        order = sorted(range(len(rollouts)), key=lambda i: len(rollouts[i].prompt) + len(rollouts[i].completion))
        for start in range(0, len(order), MICRO_BATCH):
            chosen = order[start : start + MICRO_BATCH]
            batch = [rollouts[i] for i in chosen]
            weights = torch.tensor([advantages[i] for i in chosen])
            logprobs, mask = completion_logprobs(self.model, batch)
            loss = -(logprobs * weights[:, None] * mask).sum() / tokens
            loss.backward()
            gap += _summed_gap(logprobs, batch)
            used += int((weights != 0).sum())
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        return StepStatistics(grad_norm=float(norm), logprob_gap=gap / max(1, tokens), used=used)


def group_advantages(rollouts: Sequence[Rollout]) -> list[float]:
    """Normalise rewards within each question's group; a group with equal rewards gets zeros."""
    groups: dict[int, list[float]] = {}
    for item in rollouts:
        groups.setdefault(item.question, []).append(item.reward)
    moments = {key: torch.tensor(rewards, dtype=torch.float64) for key, rewards in groups.items()}
    result = []
    for item in rollouts:
        rewards = moments[item.question]
        spread = float(rewards.std(correction=0))
        result.append((item.reward - float(rewards.mean())) / (spread + 1e-4) if spread > 0 else 0.0)
    return result


def completion_logprobs(model: nn.Module, batch: Sequence[Rollout]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the model's log-probabilities of the completions' tokens, and the mask of the real ones.

    Both have the shape (batch, longest completion). Prompts are padded on the left and completions on the right, so
    that all completions start in one column and only their logits are computed.
    """
    prompt_length = max(len(item.prompt) for item in batch)
    length = max(len(item.completion) for item in batch)
    ids = torch.zeros(len(batch), prompt_length + length, dtype=torch.long)
    present = torch.zeros_like(ids)
    for row, item in enumerate(batch):
        first, last = prompt_length - len(item.prompt), prompt_length + len(item.completion)
        ids[row, first:last] = torch.tensor([*item.prompt, *item.completion])
        present[row, first:last] = 1
    positions = (present.cumsum(1) - 1).clamp(min=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(
            input_ids=ids[:, :-1],
            attention_mask=present[:, :-1],
            position_ids=positions[:, :-1],
            logits_to_keep=length,
            use_cache=False,
        )
    logits = output.logits.float()
    targets = ids[:, prompt_length:]
    logprobs = logits.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    return logprobs, present[:, prompt_length:].float()


def _summed_gap(logprobs: torch.Tensor, batch: Sequence[Rollout]) -> float:
    rows = logprobs.detach()
    return sum(
        float((rows[row, : len(item.logprobs)] - torch.tensor(item.logprobs)).abs().sum())
        for row, item in enumerate(batch)
    )
