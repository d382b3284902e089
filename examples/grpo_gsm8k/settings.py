# SPDX-License-Identifier: Apache-2.0
"""What to run, from the command line. The small and the large form differ in these numbers only."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

PRESETS: Final[dict[str, dict[str, Any]]] = {
    # For a machine without a GPU: a model that arrives by pip, and word problems of our own.
    "small": {
        "model": "smollm2",
        "data": "bundled",
        "steps": 8,
        "questions": 6,
        "samples": 6,
        "max_tokens": 32,
        "lr": 1e-5,
        "prompt": "plain",
        "reward": "ladder",
    },
    # The task of OpenRL's and SkyRL's write-ups: 8 groups of 8 rollouts of at most 512 tokens, 100 steps; 1e-6 is what
    # SkyRL's script gives this model.
    "gsm8k": {
        "model": "Qwen/Qwen2.5-1.5B-Instruct",
        "data": "openai/gsm8k",
        "steps": 100,
        "questions": 8,
        "samples": 8,
        "max_tokens": 512,
        "lr": 1e-6,
        "prompt": "chat",
        "reward": "exact",
    },
}


@dataclass(frozen=True, slots=True)
class Settings:
    """See the help of each option.

    Attributes:
        server: URLs; none means that one is started here.
    """

    model: str
    data: str
    steps: int
    questions: int
    samples: int
    max_tokens: int
    lr: float
    clip: float
    prompt: str
    reward: str
    seed: int
    device: str
    out: Path
    sync_dir: str
    server: tuple[str, ...]
    follow: bool
    wait_for: tuple[str, ...]
    timeout: float


def make_parser() -> argparse.ArgumentParser:
    """Return the parser; the preset's numbers are filled in by `read_settings`."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.grpo_gsm8k", description="GRPO on word problems, with vLLM servers kept in step."
    )
    add = parser.add_argument
    add("--preset", choices=sorted(PRESETS), default="small", help="where the other defaults come from (%(default)s)")
    add("--model", help="what to train: a local bf16 checkpoint, a name on the Hugging Face Hub, smollm2, or tiny")
    add("--data", help="the problems: a .jsonl or .parquet file as GSM8K has it, a name on the Hub, or bundled")
    add("--steps", type=int, help="optimizer steps; each makes a version")
    add("--questions", type=int, help="questions a step")
    add("--samples", type=int, help="answers to each: the group that rewards are normalised over")
    add("--max-tokens", type=int, help="longest answer")
    add("--lr", type=float, help="AdamW's learning rate")
    add("--clip", type=float, default=0.2, help="see examples/grpo/policy.py (%(default)s)")
    add("--prompt", choices=("chat", "plain"), help="the model's chat template, or two worked problems before each")
    add("--reward", choices=("exact", "ladder"), help="1 for a right answer and else 0, or steps in between")
    add("--seed", type=int, default=0, help="orders questions and seeds sampling (%(default)s)")
    add("--device", help="where to train; by default a GPU if there is one")
    add("--out", type=Path, help="for logs and the made base checkpoint (gsm8k_out)")
    add("--sync-dir", help="the run's folder: /path, s3://bucket/prefix or gs://bucket/prefix; by default in --out")
    add(
        "--server",
        action="append",
        default=[],
        metavar="URL",
        help="a running server, may be repeated; none: start one",
    )
    add("--follow", action="store_true", help="followers beside the servers bring them the versions, not the trainer")
    add(
        "--wait-for",
        action="append",
        default=[],
        metavar="NAME",
        help="with --follow: a sampler to wait for, may be repeated",
    )
    add(
        "--timeout",
        type=float,
        default=600.0,
        help="seconds to wait for servers and samplers (%(default)s)",
    )
    return parser


def read_settings(argv: Sequence[str] | None = None) -> Settings:
    """Read the command line; exits with 2 if it makes no sense."""
    parser = make_parser()
    given = vars(parser.parse_args(argv))
    preset = PRESETS[given.pop("preset")]
    values = {name: preset.get(name) if value is None else value for name, value in given.items()}
    if values["wait_for"] and not values["follow"]:
        parser.error("--wait-for is for --follow: otherwise the trainer brings the versions, and waits by itself")
    if values["follow"] and not values["server"]:
        parser.error("--follow needs the --server that a follower is beside")
    if min(values[name] for name in ("steps", "questions", "max_tokens")) < 1 or values["samples"] < 2:
        parser.error("--steps, --questions and --max-tokens must be at least 1, and --samples at least 2")
    values["out"] = (values["out"] or Path("gsm8k_out")).resolve()
    values["sync_dir"] = values["sync_dir"] or str(values["out"] / time.strftime("run-%Y%m%d-%H%M%S"))
    if "://" not in values["sync_dir"]:
        values["sync_dir"] = str(Path(values["sync_dir"]).resolve())  # servers have another working directory
    values["device"] = values["device"] or _best_device()
    return Settings(**{**values, "server": tuple(values["server"]), "wait_for": tuple(values["wait_for"])})


def _best_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
