# SPDX-License-Identifier: Apache-2.0
"""One training step across both sides: sample, learn, publish, sync. This is what an RL trainer has to write."""

from __future__ import annotations

import time
from dataclasses import dataclass

from examples.grpo.policy import Policy, Rollout
from examples.grpo.rollout import mean_reward, sample_rollouts
from examples.grpo.tasks import Task
from examples.grpo_arithmetic.settings import Settings
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.drive import ServerClient, sync_server


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step was, as measured.

    Attributes:
        step: from 1 on.
        version: the version that it published.
        reward: mean reward of its rollouts, sampled before its update.
        density: changed elements / all elements.
        delta_bytes: bytes of the delta's payload.
        checkpoint_bytes: bytes of the whole checkpoint.
        rollout_s: seconds for sampling.
        train_s: seconds for the optimizer step.
        publish_s: seconds for diff, encoding, writing and commit.
        stage_s: seconds until the server had the delta ready, still generating.
        pause_s: seconds from the call to pause to the end of the call to resume.
        apply_s: seconds of the update in it.
        grad_norm: see `StepStatistics`.
        logprob_gap: see `StepStatistics`.
        groups_used: see `StepStatistics`.
    """

    step: int
    version: int
    reward: float
    density: float
    delta_bytes: int
    checkpoint_bytes: int
    rollout_s: float
    train_s: float
    publish_s: float
    stage_s: float
    pause_s: float
    apply_s: float
    grad_norm: float
    logprob_gap: float
    groups_used: int


def run_step(
    step: int, settings: Settings, task: Task, policy: Policy, publisher: DeltaPublisher, client: ServerClient
) -> StepRecord:
    """Sample with the server, take an optimizer step, and bring the server to the new weights."""
    started = time.monotonic()
    rollouts = sample(step, settings, task, client)
    sampled = time.monotonic()
    statistics = policy.step(rollouts)
    trained = time.monotonic()

    reward = mean_reward(rollouts)
    publication = publisher.publish(step=step, metrics={"reward": reward})
    update = sync_server(client, publication.version, run_id=publisher.run_id, pause_mode="keep")

    return StepRecord(
        step=step,
        version=update.version,
        reward=reward,
        density=publication.report.density,
        delta_bytes=publication.report.payload_bytes,
        checkpoint_bytes=publication.report.checkpoint_bytes,
        rollout_s=sampled - started,
        train_s=trained - sampled,
        publish_s=publication.report.total_s,
        stage_s=update.stage_s,
        pause_s=update.pause_s,
        apply_s=update.apply_s,
        grad_norm=statistics.grad_norm,
        logprob_gap=statistics.logprob_gap,
        groups_used=statistics.groups_used,
    )


def sample(step: int, settings: Settings, task: Task, client: ServerClient) -> list[Rollout]:
    """Sample the rollouts of a step, with a seed of its own."""
    seed = settings.seed + step
    return sample_rollouts([client], task, samples=settings.samples, max_tokens=settings.max_tokens, seed=seed)
