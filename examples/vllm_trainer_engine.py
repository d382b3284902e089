# SPDX-License-Identifier: Apache-2.0
"""vLLM's own interface for trainers, with deltas behind it: for loops that speak it already.

Run it beside a server that was started from the same checkpoint::

    python -m examples.vllm_trainer_engine --model /models/base --sync-dir /shared/run-1 --server http://127.0.0.1:8000
"""

from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from examples.options import parse
from trainer_hooks.integrations.vllm import DeltaSnapshotTrainerInitInfo
from vllm_delta_snapshot.drive import DeltaSync


def main(argv: Sequence[str] | None = None) -> torch.nn.Module:
    """Train, and return the model."""
    options = parse(__doc__, argv, steps=4, lr=1e-5)

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    engine = WeightTransferTrainerFactory.trainer_init(
        DeltaSnapshotTrainerInitInfo(sync_dir=options.sync_dir, base=options.model, rank=0),
        client=DeltaSync(options.server, sync_dir=options.sync_dir),
        source=ModuleSource(model),
    )
    for step in range(options.steps):
        tokens = torch.randint(0, model.config.vocab_size, (4, 16), generator=torch.Generator().manual_seed(step))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.send_weights()
    print(f"version {engine.version}")
    engine.shutdown()
    return model


if __name__ == "__main__":
    main()
