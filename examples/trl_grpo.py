# SPDX-License-Identifier: Apache-2.0
"""GRPO with TRL: a vLLM server generates, and takes each step's delta through a shared folder. No NCCL between them.

Run it beside a server that was started from the same checkpoint::

    VLLM_SERVER_DEV_MODE=1 vllm serve /models/base --weight-transfer-config '{"backend": "delta_snapshot"}'
    python -m examples.trl_grpo --model /models/base --sync-dir /shared/run-1 --server http://127.0.0.1:8000
"""

from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from examples.options import parse
from trainer_hooks.integrations.trl import use_delta_sync
from vllm_delta_snapshot.drive import DeltaSync

PROMPTS = [f"{a} + {b} =" for a in range(8) for b in range(8)]


def share_of_digits(completions: list[str], **_: Any) -> list[float]:
    """Reward completions that are made of digits."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def main(argv: Sequence[str] | None = None) -> GRPOTrainer:
    """Train, and return the trainer."""
    options = parse(__doc__, argv, steps=20, lr=1e-6)

    settings = GRPOConfig(
        output_dir="grpo_out",
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=options.server[0],
        max_steps=options.steps,
        learning_rate=options.lr,
        max_completion_length=8,
        num_generations=4,
        per_device_train_batch_size=4,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        logging_steps=1,
    )
    fleet = DeltaSync(options.server, sync_dir=options.sync_dir)
    with use_delta_sync(sync_dir=options.sync_dir, base=options.model, fleet=fleet):
        dataset = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
        trainer = GRPOTrainer(options.model, share_of_digits, args=settings, train_dataset=dataset)
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
