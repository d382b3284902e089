"""What a reader of a page has before its first line of Python: a model, an optimizer, batches, servers, frameworks.

Names of this project are never prepared: a page imports what it uses of us.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from tests.docs.tiny import TinyModel, batch_of, make_tiny_model
from tests.docs.world import Desk
from trainer_hooks import DeltaPublisher, ShardedPublisher
from vllm_delta_snapshot.drive import ServerClient
from vllm_delta_snapshot.runs.acks import Acknowledger
from vllm_delta_snapshot.store import open_store

Namespace = dict[str, Any]


def prepare(names: Iterable[str], namespace: Namespace, desk: Desk) -> None:
    """Put what is wanted into the namespace of a page, unless it is there."""
    if getattr(namespace.get("publisher"), "_is_closed", False):
        del namespace["publisher"]
    for name in names:
        if name in _PREPARED and name not in namespace:
            for other in _BEFORE.get(name, ()):
                prepare([other], namespace, desk)
            namespace[name] = _PREPARED[name](namespace, desk)


def settle(namespace: Namespace) -> None:
    """Wait for what publishers do behind a block, and have their failures raised."""
    for value in namespace.values():
        if isinstance(value, DeltaPublisher | ShardedPublisher):
            value.drain(60)


def acknowledge(publisher: DeltaPublisher | ShardedPublisher, sync_dir: str) -> None:
    """Write what followers of servers, by any name that the pages give them, would write of the newest version."""
    for sampler in (*(f"node{number}-8000" for number in (1, 2)), *(f"server-{number}" for number in range(4))):
        Acknowledger(open_store(sync_dir), publisher.run_id, sampler).write(publisher.version, pause_s=0.1)


def clear(namespace: Namespace) -> None:
    """End what the blocks of a page have left open."""
    for value in namespace.values():
        if isinstance(value, DeltaPublisher | ShardedPublisher):
            value.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class Writer:
    """What TensorBoard's `SummaryWriter` is to our observer, which needs no more of it."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Check what it is given."""
        assert isinstance(scalar_value, int | float)


class WandbRun:
    """What a run of Weights & Biases is to our observer."""

    def define_metric(self, name: str, step_metric: str) -> None:
        """Do nothing."""

    def log(self, data: dict[str, float]) -> None:
        """Check what it is given."""
        assert data


def _loss(model: TinyModel, batch: torch.Tensor) -> torch.Tensor:
    return model(input_ids=batch, labels=batch).loss if hasattr(model, "config") else model(batch)


def _optimizer(namespace: Namespace, _: Desk) -> torch.optim.Optimizer:
    return torch.optim.AdamW(namespace["model"].parameters(), lr=1e-3)


def _publisher(namespace: Namespace, desk: Desk) -> DeltaPublisher:
    return DeltaPublisher(namespace["model"], sync_dir=desk.sync_dir, base=desk.base)


def _train(namespace: Namespace, _: Desk) -> Callable[[], None]:
    def train() -> None:
        for step, batch in enumerate(namespace["batches"], 1):
            _loss(namespace["model"], batch).backward()
            namespace["optimizer"].step()
            namespace["publisher"].publish(step=step, metrics={"reward": 0.5})

    return train


def _my_exporter(*_: object) -> Callable[[Any], Iterator[tuple[str, torch.Tensor, tuple[int, ...]]]]:
    def my_exporter(model: Any) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...]]]:
        for name, tensor in model.state_dict().items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            half = whole.shape[0] // 2
            yield name, whole[:half], (0,) * whole.ndim
            yield name, whole[half:], (half, *(0,) * (whole.ndim - 1))

    return my_exporter


def _complete(namespace: Namespace, _: Desk) -> Callable[[list[int]], Any]:
    def complete(prompt: list[int]) -> Any:
        body = {"model": "m", "prompt": prompt, "max_tokens": 4, "return_token_ids": True, "detokenize": False}
        return namespace["client"].request("POST", "/v1/completions", body)

    return complete


# --- frameworks: as small as they get, on the CPU


def _hf_model(desk: Desk) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(desk.base, dtype=torch.float32)


def _trainer(*_: object) -> Any:
    from transformers import Trainer

    return Trainer


def _training_arguments(_: Namespace, desk: Desk) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        str(desk.here / "out"),
        max_steps=4,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
    )


def _accelerator(*_: object) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True)


def _grpo_config(_: Namespace, desk: Desk) -> Any:
    from trl import GRPOConfig

    return partial(
        GRPOConfig,
        output_dir=str(desk.here / "grpo"),
        max_steps=1,
        max_completion_length=4,
        num_generations=2,
        per_device_train_batch_size=2,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
    )


def _grpo_trainer(*_: object) -> Any:
    from trl import GRPOTrainer

    return GRPOTrainer


def _prompts(*_: object) -> Any:
    from datasets import Dataset

    return Dataset.from_list([{"prompt": "1 + 2 ="}, {"prompt": "3 + 4 ="}])


class _IdleWorker:
    """Rollouts for TRL's asynchronous trainer: none, as its training steps need a GPU."""

    def __init__(self) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()

    def start(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""

    def update_model_version(self, model_version: int) -> None:
        """Do nothing."""

    def check_health(self, stale_after_s: float) -> None:
        """Be well."""


def _async_grpo_trainer(namespace: Namespace, desk: Desk) -> Any:
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer

    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # asks CUDA
    settings = AsyncGRPOConfig(
        str(desk.here / "async"), max_steps=1, use_cpu=True, report_to="none", dtype="float32",
        vllm_server_base_url=desk.server(),
    )  # fmt: skip
    return partial(AsyncGRPOTrainer, args=settings, rollout_worker=_IdleWorker())


def _factory(*_: object) -> Any:
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    return WeightTransferTrainerFactory


def _module_source(*_: object) -> Any:
    from vllm.distributed.weight_transfer.base import ModuleSource

    return ModuleSource


_PREPARED: dict[str, Callable[[Namespace, Desk], Any]] = {
    "torch": lambda *_: torch,
    "model": lambda _, desk: _hf_model(desk) if desk.world.servers else make_tiny_model(),
    "optimizer": _optimizer,
    "batches": lambda *_: [batch_of(1), batch_of(2)],
    "batch": lambda *_: batch_of(3),
    "loss": lambda *_: _loss,
    "step": lambda *_: 1,
    "reward": lambda *_: 0.5,
    "publisher": _publisher,
    "train": _train,
    "writer": lambda *_: Writer(),
    "run": lambda *_: WandbRun(),
    "path": lambda _, desk: desk.here / "trainer.pt",
    "fully_shard": lambda *_: torch.distributed.fsdp.fully_shard,
    "my_exporter": _my_exporter,
    "client": lambda _, desk: ServerClient(desk.server()),
    "prompt": lambda *_: [1, 2, 3],
    "complete": _complete,
    "url": lambda _, desk: desk.server(),
    "rank": lambda *_: 0,
    "Trainer": _trainer,
    "args": _training_arguments,
    "data": lambda *_: [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 8,
    "accelerator": _accelerator,
    "GRPOConfig": _grpo_config,
    "GRPOTrainer": _grpo_trainer,
    "reward_function": lambda *_: lambda completions, **_: [float(len(text) % 3) for text in completions],
    "prompts": _prompts,
    "AsyncGRPOTrainer": _async_grpo_trainer,
    "WeightTransferTrainerFactory": _factory,
    "ModuleSource": _module_source,
}
_BEFORE = {
    "optimizer": ["model"],
    "publisher": ["model"],
    "train": ["model", "optimizer", "batches"],
    "complete": ["client"],
}
