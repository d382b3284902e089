# SPDX-License-Identifier: Apache-2.0
"""SkyRL 0.4's weight sync with this project's deltas: what its policy worker does, in one process and on any device.

Run it with Python 3.12 or newer, beside a server that was started from the same checkpoint::

    python -m examples.skyrl_sync --model /models/base --sync-dir /shared/run-1 --server http://127.0.0.1:8000

In a SkyRL run the configuration says ``weight_sync_backend="delta"``, and `use_delta_snapshot` is called in the entry
point and in a policy worker of one's own (docs/integrations.md).
"""

from collections.abc import Sequence

import torch
from skyrl.backends.skyrl_train.weight_sync.sources import FsdpWeightSource
from skyrl.backends.skyrl_train.weight_sync.weight_senders import build_trainer_engine, teardown_engine
from skyrl.train.config import DeltaWeightSyncConfig, InferenceEngineConfig
from transformers import AutoModelForCausalLM

from examples.options import parse
from trainer_hooks.integrations.skyrl import use_delta_snapshot


def main(argv: Sequence[str] | None = None) -> torch.nn.Module:
    """Train, and return the model."""
    options = parse(__doc__, argv, steps=4, lr=1e-5)
    use_delta_snapshot()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    engine = build_trainer_engine(
        ie_cfg=InferenceEngineConfig(
            weight_sync_backend="delta", delta_weight_sync=DeltaWeightSyncConfig(sync_dir=options.sync_dir)
        ),
        colocate_all=False,
        rank=0,
        inference_world_size=1,
        source_factory=lambda dtype, backend: FsdpWeightSource(model, dtype),
        draft_source_factory=lambda dtype: None,
        server_urls=options.server,
        data_parallel_size=1,
        base_model_path=options.model,
    )
    engine.skyrl_set_reset_prefix_cache(True)
    for step in range(options.steps):
        tokens = torch.randint(0, model.config.vocab_size, (4, 16), generator=torch.Generator().manual_seed(step))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.send_weights()
    print(f"version {engine.version}")
    teardown_engine(engine)
    return model


if __name__ == "__main__":
    main()
