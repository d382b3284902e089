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


class Arithmetic:
    """Sums and differences of small numbers. A right answer earns more the shorter it is.

    Reward 1 for the bare number; 0.5 to 1, by length, for a completion that ends with it and stops; 0.3 for one that
    runs into the token limit right after it; otherwise 0.

    Args:
        tokenizer: the checkpoint's; its chat template is used if it has one.
        questions: how many.
        max_tokens: the longest completion, the scale for "short".
        seed: draws the questions.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, questions: int, max_tokens: int, seed: int) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._questions = draw_questions(questions, seed)
        self.prompts = [self._encode(question.text) for question in self._questions]

    def reward(self, question: int, completion: Sequence[int]) -> float:
        """See `Task.reward`."""
        text = self._tokenizer.decode(completion, skip_special_tokens=True)
        stopped = bool(completion) and completion[-1] == self._tokenizer.eos_token_id
        length = (len(completion) - 1) / self._max_tokens
        return reward_text(self._questions[question].answer, text, stopped=stopped, length=length)

    def show(self, question: int, completion: Sequence[int]) -> str:
        """See `Task.show`."""
        text = self._tokenizer.decode(completion, skip_special_tokens=True)
        return f"{self._questions[question].text} {text.strip()!r}"

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer.chat_template is None:
            return list(self._tokenizer.encode(f"Question: {text}\nAnswer:"))
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
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
    return Arithmetic(tokenizer, questions=settings.questions, max_tokens=settings.max_tokens, seed=settings.seed)


def draw_questions(count: int, seed: int) -> list[Question]:
    """Draw different questions."""
    pairs = [(a, b) for a in range(2, 10) for b in range(2, 10)]
    chosen = random.Random(seed).sample(pairs, count)
    return [Question(f"What is {a} + {b}?", a + b) for a, b in chosen]


def reward_text(answer: int, text: str, *, stopped: bool, length: float) -> float:
    """Return the reward of an answer in words.

    Args:
        answer: the right number.
        text: the completion.
        stopped: the completion ended by itself.
        length: its length as a fraction of the limit.
    """
    numbers = re.findall(r"\d+", text)
    if not numbers or int(numbers[-1]) != answer:
        return 0.0
    if not stopped:
        return 0.3
    if re.fullmatch(r"\s*\d+\s*\.?\s*", text):
        return 1.0
    return 1.0 - 0.5 * min(1.0, length)
