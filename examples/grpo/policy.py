# SPDX-License-Identifier: Apache-2.0
"""The trainer's half of GRPO: group-normalised advantages and one policy-gradient step. No engine in here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.func import functional_call


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled completion.

    Attributes:
        question: index of its question; the completions of one question are a group.
        prompt: token ids that were sent.
        completion: token ids that the engine sampled, end-of-text included.
        logprobs: the engine's log-probability of each of them.
        reward: between 0 and 1.
    """

    question: int
    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    logprobs: tuple[float, ...]
    reward: float


Group = Sequence[Rollout]
"""The completions of one question at one step."""


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """What one optimizer step saw.

    Attributes:
        grad_norm: gradient norm before clipping.
        logprob_gap: mean absolute difference between the trainer's and the engine's log-probability of a sampled
            token. It is as small as their arithmetic lets it be only if both compute with the same weights.
        groups_used: groups whose rewards differ; the others have no gradient and are left out.
    """

    grad_norm: float
    logprob_gap: float
    groups_used: int


class Policy:
    """A causal language model of transformers with its optimizer.

    Mixed precision as trainers do it: the optimizer moves fp32 master weights, the forward pass computes with their
    bf16 values, which are the ones that the engine serves. (On a CPU the arithmetic is fp32, as many are slow at bf16.)

    Args:
        model: fp32 master weights, on any device.
        learning_rate: AdamW's; no weight decay, so that only rewards move the weights.
        clip: how far from 1 the ratio of the policy's probability of a token to the engine's may be and still move the
            weights, for engines that may be some versions behind. ``None`` takes rollouts for those of the present
            policy, and uses no ratio.
    """

    def __init__(self, model: nn.Module, *, learning_rate: float, clip: float | None = None) -> None:
        self.model = model
        self._clip = clip
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, rollouts: Iterable[Rollout]) -> StepStatistics:
        """Take one optimizer step on rollouts ordered by question, in groups of one size. Blocks."""
        groups = [list(group) for _, group in groupby(rollouts, key=lambda item: item.question)]
        groups = [group for group in groups if len({item.reward for item in group}) > 1]
        tokens = sum(len(item.completion) for group in groups for item in group)
        gap = 0.0
        self._optimizer.zero_grad(set_to_none=True)
        for batch in _batches(groups):
            logprobs, mask = completion_logprobs(self.model, batch)
            weights = torch.cat([advantages(group) for group in batch]).to(mask.device)
            sampled = engine_logprobs(batch, mask)
            (-(objective(logprobs, sampled, weights[:, None], self._clip) * mask).sum() / tokens).backward()
            gap += float(((logprobs.detach() - sampled).abs() * mask).sum())
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if groups:
            self._optimizer.step()
        return StepStatistics(float(norm), gap / max(1, tokens), len(groups))


def advantages(group: Group) -> torch.Tensor:
    """Return the group's rewards, shifted and scaled to mean 0 and standard deviation 1."""
    rewards = torch.tensor([item.reward for item in group], dtype=torch.float64)
    return ((rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-4)).float()


def objective(logprobs: torch.Tensor, sampled: torch.Tensor, weights: torch.Tensor, clip: float | None) -> torch.Tensor:
    """Return what is to grow, for each token: its log-probability, or its clipped ratio, times its group's advantage.

    Args:
        logprobs: the policy's, of shape (completions, tokens).
        sampled: the engine's.
        weights: advantages, of shape (completions, 1).
        clip: see `Policy`.
    """
    if clip is None:
        return logprobs * weights
    ratio = (logprobs - sampled).exp()
    return torch.minimum(ratio * weights, ratio.clamp(1 - clip, 1 + clip) * weights)


def engine_logprobs(batch: Sequence[Group], mask: torch.Tensor) -> torch.Tensor:
    """Return the engine's log-probabilities of the sampled tokens, 0 where `mask` is, in its shape."""
    out = torch.zeros(mask.shape)
    for row, item in zip(out, (item for group in batch for item in group), strict=True):
        row[: len(item.logprobs)] = torch.tensor(item.logprobs)
    return out.to(mask.device)


def completion_logprobs(model: nn.Module, batch: Sequence[Group]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the served model's log-probabilities of the completions' tokens, and the mask of the real ones.

    Both have the shape (completions, longest completion). A group's one prompt goes through the model once, and its
    completions go on from its keys and values.
    """
    device = next(model.parameters()).device
    prompts = torch.tensor([group[0].prompt for group in batch], device=device)
    items = [item for group in batch for item in group]
    length = max(len(item.completion) for item in items)
    targets = torch.zeros(len(items), length, dtype=torch.long)
    mask = torch.zeros(len(items), length)
    for row, item in enumerate(items):
        targets[row, : len(item.completion)] = torch.tensor(item.completion)
        mask[row, : len(item.completion)] = 1
    targets, mask = targets.to(device), mask.to(device)
    arithmetic = torch.float32 if device.type == "cpu" else torch.bfloat16
    served = {name: master.bfloat16().to(arithmetic) for name, master in model.named_parameters()}

    def forward(**inputs: Any) -> Any:
        return functional_call(model, served, kwargs={**inputs, "use_cache": True})

    head = forward(input_ids=prompts, logits_to_keep=1)
    logits = head.logits.repeat_interleave(len(batch[0]), dim=0)
    if length > 1:
        cache = head.past_key_values
        cache.batch_repeat_interleave(len(batch[0]))
        seen = torch.ones(len(items), prompts.shape[1], device=device)
        present = torch.cat([seen, mask[:, :-1]], dim=1).long()
        rest = forward(input_ids=targets[:, :-1], attention_mask=present, past_key_values=cache)
        logits = torch.cat([logits, rest.logits], dim=1)
    return logits.float().log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1), mask


def _batches(groups: Iterable[Group]) -> list[list[Group]]:
    """Put groups whose prompts have one length together: nothing needs padding then."""
    batches: dict[int, list[Group]] = {}
    for group in groups:
        batches.setdefault(len(group[0].prompt), []).append(group)
    return list(batches.values())
