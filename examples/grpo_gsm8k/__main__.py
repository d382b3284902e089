# SPDX-License-Identifier: Apache-2.0
"""GRPO on GSM8K, or on word problems of our own: ``python -m examples.grpo_gsm8k``.

The same code on a laptop and on GPUs; see README.md here for the commands. At every step the servers answer some
questions several times, the trainer takes one policy-gradient step, and the servers come to the new weights.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from examples.grpo import ExampleError, end_on_sigterm
from examples.grpo.base import checkpoint_base, hub_base, load_tokenizer, load_trainer_model, smollm2_base, tiny_base
from examples.grpo.policy import Policy
from examples.grpo.rollout import mean_reward, sample_rollouts, served_name
from examples.grpo.server import VllmServer
from examples.grpo_gsm8k.delivery import Delivered, Delivery, Followed, Pushed
from examples.grpo_gsm8k.problems import WordProblems, draw, load_problems
from examples.grpo_gsm8k.settings import Settings, read_settings
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot import DeltaSnapshotError
from vllm_delta_snapshot.drive import ServerClient


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step.

    Attributes:
        step: from 1 on.
        reward: mean reward of its rollouts.
        solved: share of its rollouts that are right in full.
        delivered: what became of the weights that it made.
        seconds: of the whole step.
    """

    step: int
    reward: float
    solved: float
    delivered: Delivered
    seconds: float


@dataclass(frozen=True, slots=True)
class Trained:
    """What came of a run.

    Attributes:
        model: with its master weights.
        version: the newest version.
        records: of its steps.
    """

    model: torch.nn.Module
    version: int
    records: list[StepRecord]


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; return the exit status."""
    settings = read_settings(argv)
    end_on_sigterm()
    try:
        run(settings)
    except (ExampleError, DeltaSnapshotError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; what is published stays, and the run can be continued", file=sys.stderr)
        return 130
    print(f"\nTry next:\n  delta-snapshot plot {settings.sync_dir} -o pictures")
    print(f"  delta-snapshot materialize {settings.sync_dir} trained")
    return 0


def run(settings: Settings) -> Trained:
    """Train, and keep the servers in step. Blocks until the last version is served.

    Raises:
        ExampleError: something is missing that it needs.
        DeltaSnapshotError: a version could not be published, or a server could not take it.
    """
    torch.manual_seed(settings.seed)
    settings.out.mkdir(parents=True, exist_ok=True)
    base = base_of(settings)
    task = WordProblems(
        load_problems(settings.data), load_tokenizer(base), prompt=settings.prompt, reward=settings.reward
    )
    model = load_trainer_model(base, settings.device)
    policy = Policy(model, learning_rate=settings.lr, clip=settings.clip)
    with ExitStack() as stack:
        publisher = stack.enter_context(DeltaPublisher(model, sync_dir=settings.sync_dir, base=base))
        servers = settings.server or (stack.enter_context(VllmServer(base, settings.out / "server.log")).url,)
        clients = [ServerClient(url, api_key=os.environ.get("VLLM_API_KEY")) for url in servers]
        for client in clients:
            client.wait_ready(timeout_s=settings.timeout)
        delivery: Delivery
        if settings.follow:
            delivery = Followed(publisher, settings.wait_for, settings.timeout)
        else:
            delivery = Pushed(publisher, servers, settings.sync_dir)
        delivery.begin()
        if publisher.version:
            print(f"the run is at version {publisher.version}; what comes next begins at the base weights again")
            delivery.bring(0, {})
        print(f"{base} on {settings.device}, {len(task.prompts)} problems, {settings.sync_dir}\n")
        print("step  reward  solved  density     delta / checkpoint     served after     pause   step")
        records = []
        for step in range(1, settings.steps + 1):
            records.append(run_step(step, settings, task, policy, delivery, clients))
            print(_line(records[-1]), flush=True)
    return Trained(model, publisher.version, records)


def run_step(
    step: int,
    settings: Settings,
    task: WordProblems,
    policy: Policy,
    delivery: Delivery,
    clients: Sequence[ServerClient],
) -> StepRecord:
    """Sample answers, learn from them, and have the servers take the new weights. Blocks."""
    started = time.monotonic()
    rollouts = sample_rollouts(
        clients,
        task,
        samples=settings.samples,
        max_tokens=settings.max_tokens,
        seed=settings.seed + step,
        questions=draw(settings.questions, len(task.prompts), step=step, seed=settings.seed),
        model=served_name(clients[0]),
    )
    policy.step(rollouts)
    reward = mean_reward(rollouts)
    solved = sum(item.reward == 1.0 for item in rollouts) / len(rollouts)
    delivered = delivery.bring(step, {"reward": reward, "solved": solved})
    return StepRecord(step, reward, solved, delivered, time.monotonic() - started)


def base_of(settings: Settings) -> Path:
    """Return the folder of the checkpoint that trainer and servers start from.

    Raises:
        ExampleError: there is none.
    """
    if settings.model == "smollm2":
        return smollm2_base(settings.out)
    if settings.model == "tiny":
        return tiny_base(settings.out, settings.seed)
    folder = Path(settings.model)
    if folder.exists():
        return checkpoint_base(folder, name=settings.model)
    return hub_base(settings.model)


def _line(record: StepRecord) -> str:
    delivered, published = record.delivered, record.delivered.published
    sizes = f"{published.payload_bytes / 1e6:.1f} MB / {published.checkpoint_bytes / 1e6:.0f} MB"
    pause = "" if delivered.pause_s is None else f"{1000 * delivered.pause_s:.0f} ms"
    return (
        f"{record.step:4}  {record.reward:6.3f}  {record.solved:6.3f}  {100 * published.density:6.3f} %  {sizes:>21}"
        f"  {delivered.seconds:13.2f} s  {pause:>8}  {record.seconds:4.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
