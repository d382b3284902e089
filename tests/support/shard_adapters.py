"""Two real processes train a sharded model by an adapter: ``python -m tests.support.shard_adapters WORK NAME...``.

For every version a case leaves what ``full_tensor`` said; what the processes saw is printed as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.support.shard_ranks import ranks

STEPS = 2


def tiny_base(folder: Path) -> Path:
    """Write a tiny Llama in bf16; the first rank does."""
    if dist.get_rank() == 0:
        torch.manual_seed(1)
        config = transformers.LlamaConfig(
            vocab_size=48,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=True,
        )
        transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "base")
    dist.barrier()
    return folder / "base"


def trained_from(base: Path) -> transformers.PreTrainedModel:
    """Return the model as it is trained: in fp32."""
    return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


class Expected:
    """Writes what the model is in all, as the checkpoint has it, for every version. Collective.

    Args:
        folder: where to.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.count = 0

    def note(self, model: torch.nn.Module) -> None:
        """Take the model down as the next version."""
        self.count += 1
        full = {
            name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().to(torch.bfloat16)
            for name, tensor in model.named_parameters()
        }
        if dist.get_rank() == 0:
            save_file({name: tensor.contiguous() for name, tensor in full.items()}, self._path())

    def _path(self) -> Path:
        return self._folder / f"expected-{self.count}.safetensors"


class Served:
    """Engines that are at once where they are brought to; only the first rank's are."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    def sync(self, version: int, *, run_id: str | None = None, state_digest: str | None = None) -> Any:
        """Note the version."""
        self.versions.append(version)
        return SimpleNamespace(check=lambda: None)

    def init(self) -> Any:
        """Be well."""
        return SimpleNamespace(check=lambda: None)


def _force_fsdp2(state: Any) -> None:
    """Accelerate ignores its own FSDP on CPUs; a state that says it is on does not."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )


def _loss(model: torch.nn.Module, step: int) -> torch.Tensor:
    ids = torch.arange(6).view(1, -1) + step + dist.get_rank()
    return model(input_ids=ids, labels=ids).loss


def _train(model: torch.nn.Module, sync: Callable[[], object], expected: Expected) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        _loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        sync()
        expected.note(model)


def accelerate_loop(folder: Path) -> dict[str, Any]:
    """A loop of one's own, with Accelerate."""
    from accelerate import Accelerator

    from trainer_hooks.integrations.accelerate import AcceleratePublisher

    base = tiny_base(folder)
    accelerator = Accelerator(cpu=True)
    _force_fsdp2(accelerator.state)
    model = trained_from(base)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    expected, fleet = Expected(folder), Served()
    first = fleet if dist.get_rank() == 0 else None  # as a user may do it
    with AcceleratePublisher(accelerator, model, sync_dir=str(folder / "run"), base=base, fleet=first) as weights:
        for step in range(STEPS):
            accelerator.backward(_loss(model, step))
            optimizer.step()
            optimizer.zero_grad()
            weights.step()
            expected.note(accelerator.unwrap_model(model))
        return {"version": weights.version, "served": fleet.versions, "kind": type(model).__name__}


def transformers_trainer(folder: Path) -> dict[str, Any]:
    """A `Trainer` with the callback, which publishes behind the step."""
    from trainer_hooks.integrations.transformers import DeltaSnapshotCallback

    base = tiny_base(folder)
    data = [{"input_ids": torch.arange(6) + i, "labels": torch.arange(6) + i} for i in range(8)]
    callback = DeltaSnapshotCallback(sync_dir=str(folder / "run"), base=base)
    expected = Expected(folder)

    class Note(transformers.TrainerCallback):  # type: ignore[misc]
        """Notes what was just published."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            expected.note(kwargs["model"])

    arguments = transformers.TrainingArguments(
        str(folder / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=1,
        learning_rate=1e-2,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    model = trained_from(base)
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback, Note()])
    _force_fsdp2(trainer.accelerator.state)
    trainer.is_fsdp_enabled = True
    trainer.train()
    return {"version": callback.version, "served": [], "kind": type(trainer.model_wrapped).__name__}


def trl_asynchronous(folder: Path) -> dict[str, Any]:
    """What TRL's asynchronous trainer does to hand weights over, on every rank."""
    from accelerate import Accelerator
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    from trainer_hooks.integrations.trl import DeltaWeightTransfer

    base = tiny_base(folder)
    model, fleet = trained_from(base), Served()
    fully_shard(model)
    transfer = DeltaWeightTransfer(sync_dir=str(folder / "run"), base=base, fleet=fleet)
    # The trainer itself does not start on a CPU with several ranks; its synchronization is its own code.
    trainer = AsyncGRPOTrainer.__new__(AsyncGRPOTrainer)
    is_first = dist.get_rank() == 0
    trainer.accelerator, trainer.model = Accelerator(cpu=True), model
    trainer.weight_transfer = transfer if is_first else None
    trainer.rollout_worker, trainer.model_version, trainer._lora_sync = None, 0, False
    trainer._metrics = {"train": defaultdict(list)}
    transfer.attach(trainer)
    if is_first:
        transfer.init_weight_transfer()
    _train(model, trainer._sync_weight, Expected(folder))
    if is_first:
        transfer.destroy()
    return {"version": transfer.version, "served": fleet.versions, "kind": type(model).__name__}


def vllm_factory(folder: Path) -> dict[str, Any]:
    """vLLM's trainer factory with its own source of a sharded module."""
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from trainer_hooks.integrations.vllm import DeltaSnapshotTrainerInitInfo

    base = tiny_base(folder)
    model, fleet = trained_from(base), Served()
    fully_shard(model)
    info = DeltaSnapshotTrainerInitInfo(sync_dir=str(folder / "run"), base=str(base), rank=dist.get_rank())
    engine = WeightTransferTrainerFactory.trainer_init(info, client=fleet, source=ModuleSource(model))
    _train(model, engine.send_weights, Expected(folder))
    engine.shutdown()
    return {"version": engine.version, "served": fleet.versions, "kind": type(model).__name__}


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "accelerate": accelerate_loop,
    "transformers": transformers_trainer,
    "trl": trl_asynchronous,
    "vllm": vllm_factory,
}


def main(work: Path, names: list[str]) -> dict[str, Any]:
    """Play cases, each in two new processes."""
    torch.set_num_threads(1)
    os.environ |= {"DELTA_SNAPSHOT_KERNEL": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    os.environ |= {"ACCELERATE_USE_CPU": "true", "LOCAL_WORLD_SIZE": "2"}

    def play(rank: int, name: str) -> dict[str, Any]:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        return CASES[name](work / name)

    played = {}
    for name in names:
        group = work / name / "group"
        group.mkdir(parents=True)
        played[name] = ranks(2, group, lambda rank, name=name: play(rank, name))
    return played


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(main(Path(sys.argv[1]), sys.argv[2:])))
