# SPDX-License-Identifier: Apache-2.0
"""Rollouts over the servers' OpenAI-compatible route, with token ids in and out.

The trainer sees exactly the tokens that were sampled; text is never tokenized again.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from examples.grpo.policy import Rollout
from examples.grpo.server import MODEL_NAME
from examples.grpo.tasks import Task
from vllm_delta_snapshot.drive import ServerClient

_AS_IT_IS: Final = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
"""Sample from the model's own distribution, whatever its generation_config.json says: its gradient is taken."""
_MOST_AT_ONCE: Final = 64


def sample_rollouts(
    clients: Sequence[ServerClient],
    task: Task,
    *,
    samples: int,
    max_tokens: int,
    seed: int,
    questions: Sequence[int] | None = None,
    model: str = MODEL_NAME,
) -> list[Rollout]:
    """Sample a group of completions for every question, all questions at once, ordered by question. Blocks.

    Args:
        clients: the servers, which take the questions in turn.
        task: questions and rewards.
        samples: completions of a question.
        max_tokens: longest completion.
        seed: of this call; the same seed samples the same from the same weights.
        questions: indices of the questions, each once; by default all.
        model: the name under which the servers serve the model.

    Raises:
        ServerError: a server does not answer, or refuses.
    """
    asked = range(len(task.prompts)) if questions is None else sorted(questions)
    body = {"model": model, "n": samples, "max_tokens": max_tokens, "logprobs": 0, "stop": list(task.stop), **_AS_IT_IS}

    def group(place: int, question: int) -> list[Rollout]:
        prompt = task.prompts[question]
        request = {**body, "prompt": list(prompt), "seed": seed * 1000 + question * samples}
        return [
            Rollout(
                question=question,
                prompt=tuple(prompt),
                completion=tuple(choice["token_ids"]),
                logprobs=tuple(choice["logprobs"]["token_logprobs"]),
                reward=task.reward(question, choice["token_ids"]),
            )
            for choice in _complete(clients[place % len(clients)], request)
        ]

    with ThreadPoolExecutor(min(_MOST_AT_ONCE, len(asked))) as pool:
        return [item for rollouts in pool.map(group, range(len(asked)), asked) for item in rollouts]


def greedy_tokens(client: ServerClient, task: Task, *, max_tokens: int) -> list[list[int]]:
    """Return the greedy completion of each prompt.

    The prefix cache is emptied first, and prompts go one after the other: bf16 results depend on which sequences are
    computed together, and two servers are to be compared.
    """
    client.reset_caches(running_requests=False)
    body = {"model": MODEL_NAME, "max_tokens": max_tokens, "temperature": 0.0, "stop": list(task.stop)}
    return [_complete(client, {**body, "prompt": list(prompt)})[0]["token_ids"] for prompt in task.prompts]


def served_name(client: ServerClient) -> str:
    """Return the name under which a server serves its model. Raises: ServerError."""
    return str(client.request("GET", "/v1/models")["data"][0]["id"])


def mean_reward(rollouts: Sequence[Rollout]) -> float:
    """Return the mean reward."""
    return sum(item.reward for item in rollouts) / len(rollouts)


def _complete(client: ServerClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = client.request("POST", "/v1/completions", {"return_token_ids": True, **body})
    choices: list[dict[str, Any]] = sorted(answer["choices"], key=lambda choice: choice["index"])
    return choices
