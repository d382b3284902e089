# SPDX-License-Identifier: Apache-2.0
"""A model sharded by FSDP2, published by its ranks without a gather: each compares and writes its own shard.

Two processes on a CPU (gloo), or one for each GPU (NCCL), beside servers that were started from the same checkpoint::

    torchrun --nproc-per-node 2 -m examples.fsdp2 --model /models/base --sync-dir /shared/run-1

With --server URL rank 0 brings that server to each version; without, `delta-snapshot follow` does beside the server.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from examples.options import parse
from trainer_hooks import ShardedPublisher
from vllm_delta_snapshot.drive import DeltaSync


def main(argv: Sequence[str] | None = None) -> torch.nn.Module:
    """Train, and return the model, of which this rank holds a part."""
    options = parse(__doc__, argv, steps=4, lr=1e-5)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    mesh = init_device_mesh(device, (dist.get_world_size(),))

    # Masters in fp32: what is published is cast to the checkpoint's own types.
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(device)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

    fleet = DeltaSync(options.server, sync_dir=options.sync_dir) if options.server else None
    with ShardedPublisher(model, sync_dir=options.sync_dir, base=options.model) as publisher:
        for step in range(1, options.steps + 1):
            seed = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
            tokens = torch.randint(0, model.config.vocab_size, (4, 16), generator=seed).to(device)
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            publisher.sync(fleet, step=step) if fleet else publisher.publish(step=step)
    if dist.get_rank() == 0:
        print(f"version {publisher.version}")
    return model


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
