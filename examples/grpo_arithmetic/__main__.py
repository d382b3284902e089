# SPDX-License-Identifier: Apache-2.0
"""GRPO on arithmetic with a live vLLM server: ``python -m examples.grpo_arithmetic``.

A trainer on the CPU and an unmodified vLLM server in its own process share nothing but a folder. At every step the
server samples answers, the trainer takes one policy-gradient step and publishes what changed, and the server takes
that over while it stays up. In the end the server's weights are compared with the trainer's, bit for bit, and with
those of a server started afresh.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from examples.grpo import ExampleError, end_on_sigterm
from examples.grpo.base import load_tokenizer, load_trainer_model
from examples.grpo.policy import Policy
from examples.grpo.rollout import greedy_tokens, mean_reward
from examples.grpo.server import VllmServer
from examples.grpo.tasks import Task
from examples.grpo_arithmetic import report
from examples.grpo_arithmetic.check import ServerState, Verdict, compare_checkpoint, judge, served_tensors
from examples.grpo_arithmetic.loop import StepRecord, run_step, sample
from examples.grpo_arithmetic.model import prepare_base
from examples.grpo_arithmetic.settings import Settings, clear_earlier_run, read_settings
from examples.grpo_arithmetic.tasks import make_task
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot import DeltaSnapshotError
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.drive import ServerClient
from vllm_delta_snapshot.runs.materialize import materialize
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import open_store


def main() -> int:
    """Run the demo; return the exit status."""
    end_on_sigterm()
    try:
        verdict = run(read_settings())
    except (ExampleError, DeltaSnapshotError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as reason:
        print(f"interrupted{f' by {reason}' if str(reason) else ''}; the server was stopped", file=sys.stderr)
        return 130
    return 1 if verdict.weight_problems or verdict.token_problems else 0


def run(settings: Settings) -> Verdict:
    """Train, keep a live server in step, and compare the two."""
    started = time.monotonic()
    torch.manual_seed(settings.seed)
    clear_earlier_run(settings)
    report.announce_base(settings)
    base = prepare_base(settings)
    task = make_task(settings, load_tokenizer(base))
    model = load_trainer_model(base)
    policy = Policy(model, learning_rate=settings.learning_rate)
    publisher = DeltaPublisher(model, sync_dir=str(settings.sync_dir), base=base)
    report.trainer(base, model, settings, task)

    records: list[StepRecord] = []
    with VllmServer(base, settings.out / "server.log") as server:
        report.server("live server", server)
        server.client.init(sync_dir=str(settings.sync_dir))
        before = state_of(server.client, settings, task)
        report.table_head()
        for step in range(1, settings.steps + 1):
            records.append(run_step(step, settings, task, policy, publisher, server.client))
            report.table_line(records[-1])
        final_reward = mean_reward(sample(settings.steps + 1, settings, task, server.client))
        live = state_of(server.client, settings, task)
        report.after(final_reward, publisher.version, server.client.weight_version())

    trainer = dict(served_tensors(model, base))
    materialize_newest(settings, base, publisher.version)
    with VllmServer(settings.final, settings.out / "server-fresh.log") as server:
        report.server("fresh server", server)
        fresh = state_of(server.client, settings, task)

    verdict = judge(trainer, before, live, fresh)
    verdict.weight_problems += compare_checkpoint(trainer, settings.final)
    report.write_files(settings, base, records, final_reward, verdict)
    report.conclusion(settings, task, before, live, verdict, seconds=time.monotonic() - started)
    return verdict


def state_of(client: ServerClient, settings: Settings, task: Task) -> ServerState:
    """Ask a server for its weights' checksums and its greedy answers."""
    return ServerState(client.checksums(), greedy_tokens(client, task, max_tokens=settings.max_tokens))


def materialize_newest(settings: Settings, base: Path, version: int) -> None:
    """Build the newest version from the base and the deltas."""
    folder = RunFolder(open_store(str(settings.sync_dir)))
    materialize(folder, Checkpoint(base), version, settings.final)


if __name__ == "__main__":
    sys.exit(main())
