"""Tensors that no rank has: a base with a draft head and a stored copy of tied weights, and what ranks say of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from tests.support.checkpoints import write_checkpoint
from tests.support.shard_faults import Rows
from tests.support.shards import Net, Story, served
from trainer_hooks import ShardedPublisher
from vllm_delta_snapshot.errors import DeltaSnapshotError

EMBED, HEAD, STEPS = "model.embed_tokens.weight", "lm_head.weight", 2
DRAFT = {f"mtp.{number}.weight": (11 + number, 6) for number in range(5)}
TIED = '{"tie_word_embeddings": true}'


def draft() -> dict[str, torch.Tensor]:
    """Return the weights of the draft head."""
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in DRAFT.items()}


def rows_lacking(folder: Path) -> dict[str, Any]:
    """Publish rows of a model whose head is only stored in the base; then have two, untie them, and train a draft."""
    rows = Rows()
    rows.state = {EMBED if name == "model.a" else name: tensor for name, tensor in rows.state.items()}
    _write(folder, rows.state | draft() | {HEAD: rows.state[EMBED]})
    refusal = _refusal(lambda: rows.publisher(folder))
    held, audits = [], []
    with rows.publisher(folder, unsourced=["mtp.*"], asynchronous=True) as publisher:
        held.append(publisher._published.baseline.elements)
        for number in range(1, STEPS + 1):
            rows.step(number)
            publisher.publish(step=number)
            audits.append(publisher.audit().elements)
    rows.state[HEAD] = rows.state[EMBED]
    with rows.publisher(folder, unsourced=["mtp.*"]) as publisher:
        rows.state[HEAD] = rows.state[HEAD] + 1
        untied = _refusal(publisher.publish)
        rows.state[EMBED] = rows.state[HEAD]
        publisher.publish()
    rows.state |= {name: tensor + 1 for name, tensor in draft().items() if name == "mtp.3.weight"}
    with rows.publisher(folder, unsourced=["mtp.*"]) as publisher:
        publisher.publish()
    del rows.state["mtp.3.weight"]
    trained = _refusal(lambda: rows.publisher(folder, unsourced=["mtp.*"]))
    return {
        "refusal": refusal,
        "held": held,
        "audits": audits,
        "untied": untied,
        "trained": trained,
        "embed": rows.state[EMBED].view(torch.int16).flatten().tolist(),
    }


def fsdp2_lacking(folder: Path) -> dict[str, Any]:
    """Publish an FSDP2 model with a tied head that the base stores twice, beside a draft head."""
    model = Net()
    _write(folder, {name: served(name, tensor) for name, tensor in model.state_dict().items()} | draft())
    fully_shard(model)
    story = Story(model, forward=False, backward=False)
    where = {"sync_dir": str(folder / "run"), "base": folder / "base", "threads": 1, "timeout_s": 30.0}
    refusal = _refusal(lambda: ShardedPublisher(model, **where))
    with ShardedPublisher(model, unsourced=["mtp.*"], **where) as publisher:
        story.step(1)
        publisher.publish()
        elements = publisher.audit().elements
    embed = served("embed.weight", story.full()["embed.weight"])
    return {
        "refusal": refusal,
        "audits": [elements],
        "embed": embed.view(torch.int16).flatten().tolist(),
    }


LACKING = {"rows that lack": rows_lacking, "a model that lacks": fsdp2_lacking}


def _write(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    if dist.get_rank() == 0:
        write_checkpoint(folder / "base", {name: tensor.clone() for name, tensor in tensors.items()})
        (folder / "base" / "config.json").write_text(TIED)
    dist.barrier()


def _refusal(act: Any) -> list[str]:
    try:
        act()
    except DeltaSnapshotError as error:
        return [type(error).__name__, str(error)]
    return []
