# SPDX-License-Identifier: Apache-2.0
"""What an example's task has to offer: questions, and what an answer is worth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Task(Protocol):
    """Questions as token ids, and a reward between 0 and 1 for a completion of one of them.

    Attributes:
        prompts: token ids of the questions.
        stop: texts that end a completion.
    """

    prompts: Sequence[Sequence[int]]
    stop: Sequence[str]

    def reward(self, question: int, completion: Sequence[int]) -> float:
        """Return the reward of a completion; its tokens include the ones that ended it."""
        ...

    def show(self, question: int, completion: Sequence[int]) -> str:
        """Return question and completion for people."""
        ...
