"""A sharded trainer of several real processes, for engines to follow: ``python -m tests.support.shard_engine``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard

from tests.support.shard_faults import _die, once
from tests.support.shard_ranks import ranks
from tests.support.shards import _poke, _whole, _write
from trainer_hooks import ShardedPublisher


def train(work: Path, steps: int, *, dies_on: int | None) -> dict[str, Any]:
    """Make the first `steps` steps, and publish those that the run has not; collective.

    Args:
        work: has the base checkpoint in ``base``; the run is in ``run``, and what rank 0 would save in ``saved-STEPS``.
        steps: how many; the same number always makes the same steps.
        dies_on: the rank that is killed while it writes the last one.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(work / "base", dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    publisher = ShardedPublisher(model, sync_dir=str(work / "run"), base=work / "base", threads=1, timeout_s=60)
    found = publisher.version
    for number in range(1, steps + 1):
        for name, parameter in model.named_parameters():
            _write(parameter, _poke(_whole(parameter.detach()), name, number, share=0.02))
        if number > found:
            if number == steps and dist.get_rank() == dies_on:
                once(publisher._store, "put", _die)
            publisher.publish(step=number)
    publisher.close()
    full = {name: _whole(tensor.detach()) for name, tensor in model.state_dict().items()}
    if dist.get_rank() == 0:
        whole = transformers.AutoModelForCausalLM.from_pretrained(work / "base", dtype=torch.bfloat16)
        whole.load_state_dict(full)
        whole.save_pretrained(work / f"saved-{steps}")
    dist.barrier()
    return {"found": found, "version": publisher.version, "digest": publisher.state_digest}


def main() -> None:
    """Start the processes, and print what each saw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--dies-on", type=int)
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["DELTA_SNAPSHOT_KERNEL"] = "0"
    group = given.work / f"group-{len(list(given.work.glob('group-*')))}"
    group.mkdir()
    seen = ranks(given.ranks, group, lambda _: train(given.work, given.steps, dies_on=given.dies_on))
    sys.stdout.write("\n" + json.dumps(seen))


if __name__ == "__main__":
    main()
