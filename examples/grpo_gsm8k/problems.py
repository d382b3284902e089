# SPDX-License-Identifier: Apache-2.0
"""Word problems in GSM8K's form, the prompts made of them, and what an answer is worth. No engine in here.

A problem is a question and a worked answer whose last line is ``#### 12``.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from transformers import PreTrainedTokenizerFast

from examples.grpo import ExampleError

MARK: Final = "####"
SHOTS: Final = 2
"""How many worked problems a plain prompt begins with; they are not asked themselves."""
REQUEST: Final = f"Work it out step by step. Then write one last line: {MARK} and the number alone."

_BUNDLED: Final = Path(__file__).with_name("problems.jsonl")
_NUMBER: Final = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?")
"""Not the digits within a word, such as x2."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem.

    Attributes:
        question: its text.
        working: the worked answer, without its last line.
        answer: the number, as `number` writes it.
    """

    question: str
    working: str
    answer: str


class WordProblems:
    """A `Task` of word problems.

    Args:
        problems: the problems.
        tokenizer: the checkpoint's.
        prompt: ``chat`` for its chat template, ``plain`` for text that worked problems come before.
        reward: ``exact`` or ``ladder``, see `worth`.

    Raises:
        ExampleError: there are too few problems, or there is no chat template.
    """

    def __init__(
        self, problems: Sequence[Problem], tokenizer: PreTrainedTokenizerFast, *, prompt: str, reward: str
    ) -> None:
        if prompt == "chat" and not tokenizer.chat_template:
            raise ExampleError("the checkpoint has no chat template: take --prompt plain")
        shown = list(problems[:SHOTS]) if prompt == "plain" else []
        self.problems = list(problems[len(shown) :])
        if not self.problems:
            raise ExampleError(f"{len(problems)} problems are too few")
        self._tokenizer, self._is_plain, self._is_exact = tokenizer, prompt == "plain", reward == "exact"
        self.stop = ["\n"] if self._is_plain else []
        self.prompts = [self._encode(problem, shown) for problem in self.problems]

    def reward(self, question: int, completion: Sequence[int]) -> float:
        """See `Task.reward`."""
        return worth(self.problems[question].answer, self._text(completion), is_exact=self._is_exact)

    def show(self, question: int, completion: Sequence[int]) -> str:
        """See `Task.show`."""
        return f"{self.problems[question].question}\n{self._text(completion).strip()}"

    def _encode(self, problem: Problem, shown: Sequence[Problem]) -> list[int]:
        if self._is_plain:
            worked = [f"Question: {of.question}\nAnswer: {of.working} {MARK} {of.answer}\n\n" for of in shown]
            return list(self._tokenizer.encode("".join([*worked, f"Question: {problem.question}\nAnswer:"])))
        said = [{"role": "user", "content": f"{problem.question}\n{REQUEST}"}]
        text = self._tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _text(self, completion: Sequence[int]) -> str:
        text = str(self._tokenizer.decode(list(completion), skip_special_tokens=True))
        return text.partition("\n")[0] if self._is_plain else text


def worth(answer: str, text: str, *, is_exact: bool) -> float:
    """Return what a completion is worth, from 0 to 1.

    1 for the right number after the last mark. The ladder has steps below it, so that a model that gets nothing right
    yet learns the form first: 0.5 if the last number is right but not marked, 0.2 for a wrong number with the mark, 0.1
    for any number.
    """
    numbers = [number(found) for found in _NUMBER.findall(text)]
    marked = _NUMBER.search(text.rpartition(MARK)[2]) if MARK in text else None
    if marked and number(marked[0]) == answer:
        return 1.0
    if is_exact or not numbers:
        return 0.0
    if numbers[-1] == answer:
        return 0.5
    return 0.2 if marked else 0.1


def number(text: str) -> str:
    """Return a number without commas and without a fraction of zeros: ``1,200.0`` is ``1200``."""
    plain = text.replace(",", "")
    return re.sub(r"\.0*$", "", plain)


def load_problems(data: str) -> list[Problem]:
    """Load problems.

    Args:
        data: ``bundled``, a .jsonl or .parquet file with the columns `question` and `answer`, or the name of a data set
            on the Hugging Face Hub that has them, whose configuration ``main`` and split ``train`` are taken.

    Raises:
        ExampleError: there is no such file, `datasets` is needed and not installed, or a row is no problem.
    """
    problems = [_problem(row, f"{data}, row {place}") for place, row in enumerate(_rows(data))]
    if not problems:
        raise ExampleError(f"{data} has no problems")
    return problems


def _rows(data: str) -> Iterator[Mapping[str, object]]:
    path = _BUNDLED if data == "bundled" else Path(data)
    if path.suffix == ".jsonl":
        if not path.is_file():
            raise ExampleError(f"--data: no file {path}")
        yield from (json.loads(line) for line in path.read_text().splitlines() if line.strip())
        return
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ExampleError(f"--data {data} needs the package datasets; a .jsonl file does not") from error
    try:
        if path.suffix == ".parquet":
            yield from load_dataset("parquet", data_files=str(path), split="train")
        else:
            yield from load_dataset(data, "main", split="train")
    except (OSError, ValueError) as error:
        raise ExampleError(f"--data {data} cannot be loaded: {error}") from error


def _problem(row: Mapping[str, object], where: str) -> Problem:
    working, mark, answer = str(row.get("answer", "")).rpartition(MARK)
    if not mark or not row.get("question") or not _NUMBER.fullmatch(answer.strip().lstrip("$")):
        raise ExampleError(f"{where}: expected a question, and an answer that ends in a line '{MARK} number'")
    return Problem(str(row["question"]), " ".join(working.split()), number(answer.strip().lstrip("$")))


def draw(count: int, total: int, *, step: int, seed: int) -> list[int]:
    """Return the questions of a step: all come once, in a random order, before any comes again.

    Args:
        count: how many; at most `total` of them are different.
        total: how many there are.
        step: from 1 on.
        seed: of the orders.
    """
    places = range((step - 1) * count, step * count)
    order = {
        turn: random.Random(f"{seed} {turn}").sample(range(total), total) for turn in {at // total for at in places}
    }
    return sorted({order[at // total][at % total] for at in places})
