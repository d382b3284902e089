# SPDX-License-Identifier: Apache-2.0
"""What the policy is asked, and how an answer is rewarded. No model and no engine in here.

The questions are drawn once and asked again at every step, so that the mean rewards of two steps can be compared.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedTokenizerFast

from examples.grpo_arithmetic.settings import Settings

SYSTEM = "Answer with a number."


class Task(Protocol):
    """Questions as token ids, and a reward between 0 and 1 for a completion of one of them."""

    prompts: Sequence[Sequence[int]]

    def reward(self, question: int, completion: Sequence[int]) -> float:
        """Return the reward of a completion, its end-of-text token included if it came to one."""
        ...

    def show(self, question: int, completion: Sequence[int]) -> str:
        """Return question and completion for people."""
        ...


@dataclass(frozen=True, slots=True)
class Question:
    """A question in words, with its answer."""

    text: str
    answer: int


EXAMPLE = Question("What is 2 + 3?", 5)
"""Shown before every question."""


class Arithmetic:
    """Sums of two small numbers, asked after one worked example.

    Args:
        tokenizer: the checkpoint's; its chat template is used if it has one.
        questions: how many.
        seed: draws the questions.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, questions: int, seed: int) -> None:
        self._tokenizer = tokenizer
        self._questions = draw_questions(questions, seed)
        self.prompts = [self._encode(question) for question in self._questions]

    def reward(self, question: int, completion: Sequence[int]) -> float:
        """See `Task.reward`."""
        return reward_text(self._questions[question].answer, self._decode(completion))

    def show(self, question: int, completion: Sequence[int]) -> str:
        """See `Task.show`."""
        return f"{self._questions[question].text} {self._decode(completion).strip()}"

    def _decode(self, completion: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(completion), skip_special_tokens=True))

    def _encode(self, question: Question) -> list[int]:
        if self._tokenizer.chat_template is None:
            text = f"Question: {EXAMPLE.text}\nAnswer: {EXAMPLE.answer}\n\nQuestion: {question.text}\nAnswer:"
            return list(self._tokenizer.encode(text))
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": EXAMPLE.text},
            {"role": "assistant", "content": str(EXAMPLE.answer)},
            {"role": "user", "content": question.text},
        ]
        return list(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


class TokenParity:
    """For a random model that knows no words: the share of even token ids in the completion."""

    def __init__(self, *, questions: int, vocabulary: int, seed: int) -> None:
        draw = random.Random(seed)
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


def draw_questions(count: int, seed: int) -> list[Question]:
    """Draw different questions."""
    pairs = [(a, b) for a in range(2, 10) for b in range(2, 10) if f"{a} + {b}" not in EXAMPLE.text]
    return [Question(f"What is {a} + {b}?", a + b) for a, b in random.Random(seed).sample(pairs, count)]


def reward_text(answer: int, text: str) -> float:
    """Return 1 for the bare right number, less the further off it is, and half as much for a sentence.

    The number of a sentence is its last one. A completion without a number earns nothing.
    """
    numbers = re.findall(r"\d+", text)
    if not numbers:
        return 0.0
    closeness = 1 / (1 + abs(int(numbers[-1]) - answer))
    is_bare = re.fullmatch(r"\s*\d+\s*\.?\s*", text) is not None
    return closeness if is_bare else closeness / 2
