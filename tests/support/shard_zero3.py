"""Processes that train by DeepSpeed ZeRO-3 and publish: ``python -m tests.support.shard_zero3 WORK``."""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.support.checkpoints import write_checkpoint
from tests.support.shards import Net, served
from trainer_hooks import ShardedPublisher
from vllm_delta_snapshot.errors import DeltaSnapshotError

SIZE = 3
STEPS = 3


def train(rank: int, work: Path) -> dict[str, Any]:
    """Train and publish on one rank; rank 0 writes what all of it is."""
    import deepspeed

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(SIZE)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    store = dist.FileStore(str(work / "store"), SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE)
    deepspeed.init_distributed(dist_backend="gloo")
    net = Net()
    net.head = torch.nn.Linear(8, 13, bias=False)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 10},
    }
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=net, model_parameters=trained, config=settings)

    def full() -> dict[str, torch.Tensor]:
        with deepspeed.zero.GatheredParameters(list(net.parameters())):
            state = (*net.named_parameters(), ("seen", net.seen))
            return {name: served(name, tensor) for name, tensor in state}

    state = full()
    if rank == 0:
        write_checkpoint(work / "base", state)
    dist.barrier()
    publisher = ShardedPublisher(
        net, sync_dir=str(work / "run"), base=work / "base", threads=1, timeout_s=60, asynchronous=False
    )
    versions = []
    for number in range(1, STEPS + 1):
        if number < STEPS:
            engine.backward(engine(torch.arange(6) + rank))
            engine.step()
        else:  # a frozen one, as a trainer moves a router's bias
            with deepspeed.zero.GatheredParameters([net.tower.bias], modifier_rank=0):
                net.tower.bias.data.add_(rank + 1)
        versions.append(publisher.publish(step=number).report.changed_elements)
        state = full()
        if rank == 0:
            save_file(state, work / f"expected-{number}.safetensors")
    refused = ""
    engine(torch.arange(6))  # gathers, and keeps the small ones so
    assert net.norm.bias.numel() == 7, "small parameters do not stay gathered any more"
    publisher.publish()
    net.norm.bias.data.add_(1)  # a write that training will not keep
    try:
        publisher.publish()
    except DeltaSnapshotError as error:
        refused = str(error)
    return {"changed": versions, "elements": publisher._published.baseline.elements, "refused": refused}


def main(work: Path) -> list[Any]:
    os.environ |= {"DS_ACCELERATOR": "cpu", "DELTA_SNAPSHOT_KERNEL": "0"}
    torch.set_num_threads(1)
    # DeepSpeed imports an optimizer, not used here, which is compiled: ten seconds of a process's time.
    torch.compile = lambda function=None, **_: function or (lambda it: it)
    import deepspeed  # once, not in every process

    import_module("torch._dynamo")  # the same: the first optimizer imports it
    # What it could compile here. None of it is to be: torch's own gloo does what its operator for CPUs would, and the
    # test needs no compiler.
    deepspeed.ops.__compatible_ops__ = {}
    children = []
    for rank in range(SIZE):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                (work / f"rank-{rank}.json").write_text(json.dumps(train(rank, work)))
                code = 0
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    deaths = [os.waitpid(child, 0)[1] for child in children]
    assert deaths == [0] * SIZE, deaths
    return [json.loads((work / f"rank-{rank}.json").read_text()) for rank in range(SIZE)]


if __name__ == "__main__":
    result = main(Path(sys.argv[1]))
    sys.stdout.write("\n" + json.dumps(result))
