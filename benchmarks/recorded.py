# SPDX-License-Identifier: Apache-2.0
"""Deltas of real training: GRPO on the demo's model, its bf16 weights before and after every optimizer step.

The model samples its own answers (transformers' `generate`, no engine), is rewarded as in the demo, and AdamW moves fp32
master weights. The first steps after the optimizer's start are taken but not recorded, as its moments are still empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report import progress
from examples.grpo.base import load_tokenizer, load_trainer_model
from examples.grpo.policy import Policy, Rollout
from examples.grpo_arithmetic.tasks import Arithmetic
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.dtypes import Bits

__all__ = ["Weights", "moved_to_density", "record"]

Weights = dict[str, Bits]
"""By checkpoint name, a tensor's bf16 bits, flat."""

QUESTIONS, SAMPLES, NEW_TOKENS, WARM_UP = 6, 6, 6, 3


class Trainer:
    """The demo's policy, sampling for itself."""

    def __init__(self, base: Path, learning_rate: float) -> None:
        torch.manual_seed(0)
        self.model: Any = load_trainer_model(base)
        self.tokenizer: Any = load_tokenizer(base)
        self.task = Arithmetic(self.tokenizer, questions=QUESTIONS, seed=0)
        self.policy = Policy(self.model, learning_rate=learning_rate)
        self.specs = Checkpoint(base).specs

    def step(self) -> float:
        """Sample, take an optimizer step, and return the mean reward."""
        rollouts = [rollout for question in range(QUESTIONS) for rollout in self._sample(question)]
        self.policy.step(rollouts)
        return float(np.mean([rollout.reward for rollout in rollouts]))

    def weights(self) -> Weights:
        """Return the weights as they are served."""
        state = self.model.state_dict()
        return {name: state[name].bfloat16().view(torch.int16).numpy().view(np.uint16).ravel() for name in self.specs}

    def masters(self) -> Mapping[str, torch.Tensor]:
        """Return copies of the fp32 master weights."""
        state = self.model.state_dict()
        return {name: state[name].detach().clone() for name in self.specs}

    def _sample(self, question: int) -> list[Rollout]:
        prompt = list(self.task.prompts[question])
        with torch.no_grad():
            out = self.model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=True,
                max_new_tokens=NEW_TOKENS,
                num_return_sequences=SAMPLES,
                pad_token_id=0,
            )
        rollouts = []
        for row in out[:, len(prompt) :].tolist():
            ends = [place for place, token in enumerate(row) if "\n" in self.tokenizer.decode([token])]
            completion = tuple(row[: ends[0] + 1] if ends else row)
            reward = self.task.reward(question, completion)
            rollouts.append(Rollout(question, tuple(prompt), completion, (0.0,) * len(completion), reward))
        return rollouts


def record(base: Path, learning_rate: float, steps: int) -> Iterator[tuple[Weights, Weights]]:
    """Train, and yield the weights before and after each recorded step. Takes seconds a step.

    Args:
        base: the demo's checkpoint.
        learning_rate: AdamW's.
        steps: how many to record.
    """
    trainer = Trainer(base, learning_rate)
    for number in range(WARM_UP):
        trainer.step()
        progress(f"learning rate {learning_rate:g}: warm-up step {number + 1}/{WARM_UP}")
    before = trainer.weights()
    number = 0
    while number < steps:
        reward = trainer.step()
        after = trainer.weights()
        if all(np.array_equal(before[name], after[name]) for name in before):
            continue  # all answers had the same reward: nothing to learn from
        number += 1
        progress(f"learning rate {learning_rate:g}: step {number}/{steps}, reward {reward:.2f}")
        yield before, after
        before = after


def moved_to_density(base: Path, densities: list[float]) -> Iterator[tuple[float, Weights, Weights]]:
    """Yield weights moved along one real update direction, so far that a given share of the bf16 values changes.

    Args:
        base: the demo's checkpoint.
        densities: shares of all elements.
    """
    trainer = Trainer(base, 1e-6)
    for number in range(WARM_UP):
        trainer.step()
        progress(f"update direction: step {number + 1}/{WARM_UP}")
    masters = trainer.masters()
    while all(torch.equal(tensor, masters[name]) for name, tensor in trainer.masters().items()):
        trainer.step()
    directions = {name: tensor - masters[name] for name, tensor in trainer.masters().items()}
    before = _served(masters)
    for density in densities:
        low, high = 0.0, 1e6
        for _ in range(40):
            scale = (low * high) ** 0.5 if low else high / 2
            after = _served({name: tensor + scale * directions[name] for name, tensor in masters.items()})
            found = _density(before, after)
            low, high = (scale, high) if found < density else (low, scale)
            if abs(found / density - 1) < 0.03:
                break
        yield density, before, after


def _served(masters: Mapping[str, torch.Tensor]) -> Weights:
    return {
        name: tensor.bfloat16().view(torch.int16).numpy().view(np.uint16).ravel() for name, tensor in masters.items()
    }


def _density(before: Weights, after: Weights) -> float:
    changed = sum(int(np.count_nonzero(before[name] != after[name])) for name in before)
    return changed / sum(bits.size for bits in before.values())
