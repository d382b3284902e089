# SPDX-License-Identifier: Apache-2.0
"""Rollouts over the server's OpenAI-compatible route, with token ids in and out.

The trainer sees exactly the tokens that were sampled; text is never tokenized again.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from examples.grpo_arithmetic.policy import Rollout
from examples.grpo_arithmetic.server import MODEL_NAME
from examples.grpo_arithmetic.tasks import Task
from vllm_delta_snapshot.drive import ServerClient


def sample_rollouts(client: ServerClient, task: Task, *, samples: int, max_tokens: int, seed: int) -> list[Rollout]:
    """Sample a group of completions for every question, all questions at once, ordered by question."""
    body = {"n": samples, "max_tokens": max_tokens, "temperature": 1.0, "logprobs": 0, "stop": list(task.stop)}

    def group(question: int) -> list[Rollout]:
        prompt = task.prompts[question]
        choices = _complete(client, {**body, "prompt": list(prompt), "seed": seed * 1000 + question * samples})
        return [
            Rollout(
                question=question,
                prompt=tuple(prompt),
                completion=tuple(choice["token_ids"]),
                logprobs=tuple(choice["logprobs"]["token_logprobs"]),
                reward=task.reward(question, choice["token_ids"]),
            )
            for choice in choices
        ]

    with ThreadPoolExecutor(len(task.prompts)) as pool:
        return [item for rollouts in pool.map(group, range(len(task.prompts))) for item in rollouts]


def greedy_tokens(client: ServerClient, task: Task, *, max_tokens: int) -> list[list[int]]:
    """Return the greedy completion of each prompt.

    The prefix cache is emptied first, and prompts go one after the other: bf16 results depend on which sequences are
    computed together, and two servers are to be compared.
    """
    client.reset_caches(running_requests=False)
    body = {"max_tokens": max_tokens, "temperature": 0.0, "stop": list(task.stop)}
    return [_complete(client, {**body, "prompt": list(prompt)})[0]["token_ids"] for prompt in task.prompts]


def _complete(client: ServerClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = client.request("POST", "/v1/completions", {"model": MODEL_NAME, "return_token_ids": True, **body})
    choices: list[dict[str, Any]] = sorted(answer["choices"], key=lambda choice: choice["index"])
    return choices
