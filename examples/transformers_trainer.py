# SPDX-License-Identifier: Apache-2.0
"""A transformers `Trainer` whose steps reach running vLLM servers.

Run it beside a server that was started from the same checkpoint::

    python -m examples.transformers_trainer --model /models/base --sync-dir /shared/run-1 --server http://127.0.0.1:8000

Without --server it only publishes, for servers that `delta-snapshot follow` keeps at the run. Works under torchrun too.
"""

from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from examples.options import parse
from trainer_hooks.integrations.transformers import DeltaSnapshotCallback
from vllm_delta_snapshot.drive import DeltaSync

TEXTS = [f"{a} + {b} = {a + b}" for a in range(8) for b in range(8)]


def main(argv: Sequence[str] | None = None) -> Trainer:
    """Train, and return the trainer."""
    options = parse(__doc__, argv, steps=20, lr=1e-5, every=1)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    examples = [tokenizer(text)["input_ids"][:5] for text in TEXTS]
    callback = DeltaSnapshotCallback(
        sync_dir=options.sync_dir,
        base=options.model,
        every=options.every,
        fleet=DeltaSync(options.server, sync_dir=options.sync_dir) if options.server else None,
    )
    trainer = Trainer(
        # Masters in fp32: what is published is cast to the checkpoint's own types.
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        train_dataset=[{"input_ids": ids, "labels": ids} for ids in examples],
        args=TrainingArguments(
            output_dir="trainer_out",
            max_steps=options.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=options.lr,
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
        ),
        callbacks=[callback],
    )
    trainer.train()
    print(f"step {trainer.state.global_step}, version {callback.version}")
    return trainer


if __name__ == "__main__":
    main()
