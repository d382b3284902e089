# SPDX-License-Identifier: Apache-2.0
"""A training loop with Accelerate, in mixed precision, whose steps reach running vLLM servers.

Run it beside a server that was started from the same checkpoint::

    python -m examples.accelerate_loop --model /models/base --sync-dir /shared/run-1 --server http://127.0.0.1:8000

The same under `accelerate launch`.
"""

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.options import parse
from trainer_hooks.integrations.accelerate import AcceleratePublisher
from vllm_delta_snapshot.drive import DeltaSync

TEXTS = [f"{a} + {b} = {a + b}" for a in range(8) for b in range(8)]


def main(argv: Sequence[str] | None = None) -> torch.nn.Module:
    """Train, and return the model."""
    options = parse(__doc__, argv, steps=8, lr=1e-5)

    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    length = min(len(of) for of in ids)
    batches = DataLoader(torch.tensor([of[:length] for of in ids]), batch_size=4)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)

    fleet = DeltaSync(options.server, sync_dir=options.sync_dir) if options.server else None
    with AcceleratePublisher(
        accelerator, model, sync_dir=options.sync_dir, base=options.model, fleet=fleet
    ) as publisher:
        for batch, _ in zip(batches, range(2 * options.steps), strict=False):
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=batch, labels=batch).loss)
                optimizer.step()
                optimizer.zero_grad()
            publisher.step()
        accelerator.print(f"version {publisher.version}")
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    main()
