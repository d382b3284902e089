# SPDX-License-Identifier: Apache-2.0
"""What the policy is asked, and how an answer is rewarded. No model and no engine in here.

The questions are drawn once and asked again at every step, so that the mean rewards of two steps can be compared.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

from examples.grpo.tasks import Task
from examples.grpo_arithmetic.settings import Settings

EXAMPLES = ("2 + 3 = 5", "4 + 6 = 10")
"""Shown before every question, so that a plain language model knows what is asked of it."""


class Arithmetic:
    """Sums of two small numbers that carry: ``8 + 9 =``. The answer is the rest of the line.

    Args:
        tokenizer: the checkpoint's.
        questions: how many.
        seed: draws the questions.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, questions: int, seed: int) -> None:
        self._tokenizer = tokenizer
        self._questions = draw_questions(questions, seed)
        self.prompts = [tokenizer.encode("\n".join([*EXAMPLES, f"{a} + {b} ="])) for a, b in self._questions]
        self.stop = ["\n"]

    def reward(self, question: int, completion: Sequence[int]) -> float:
        """See `Task.reward`."""
        return reward_text(sum(self._questions[question]), self._line(completion))

    def show(self, question: int, completion: Sequence[int]) -> str:
        """See `Task.show`."""
        a, b = self._questions[question]
        return f"{a} + {b} ={self._line(completion)}"

    def _line(self, completion: Sequence[int]) -> str:
        text = str(self._tokenizer.decode(list(completion), skip_special_tokens=True))
        return text.partition("\n")[0]


class TokenParity:
    """For a random model that knows no words: the share of even token ids in the completion."""

    def __init__(self, *, questions: int, vocabulary: int, seed: int) -> None:
        draw = random.Random(seed)
        self.stop: list[str] = []
        self.prompts = [[1, *(draw.randrange(3, vocabulary) for _ in range(6))] for _ in range(questions)]

    def reward(self, question: int, completion: Sequence[int]) -> float:
        """See `Task.reward`."""
        del question
        return sum(token % 2 == 0 for token in completion) / max(1, len(completion))

    def show(self, question: int, completion: Sequence[int]) -> str:
        """See `Task.show`."""
        return f"{list(self.prompts[question])} {list(completion)}"


def make_task(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> Task:
    """Return the task that fits the model."""
    if settings.tiny:
        return TokenParity(questions=settings.questions, vocabulary=len(tokenizer), seed=settings.seed)
    return Arithmetic(tokenizer, questions=settings.questions, seed=settings.seed)


def draw_questions(count: int, seed: int) -> list[tuple[int, int]]:
    """Draw different sums of two digits, all above 10."""
    pairs = [(a, b) for a in range(3, 10) for b in range(3, 10) if a + b > 10]
    return random.Random(seed).sample(pairs, count)


def reward_text(answer: int, text: str) -> float:
    """Return 1 for the bare right number, less the further off it is, and half as much with other text around it.

    With several numbers the last one counts. Text without a number earns nothing.
    """
    numbers = re.findall(r"\d+", text)
    if not numbers:
        return 0.0
    closeness = 1 / (1 + abs(int(numbers[-1]) - answer))
    return closeness if text.strip() == numbers[-1] else closeness / 2
