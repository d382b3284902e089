"""A trainer that does as it is told: ``python -m tests.soak.trainer BASE SYNC_DIR STATES SEED``.

Reads one command a line (``{"do": "step", "count": 2}`` or ``{"do": "close"}``) and answers each with one line.
Before it publishes version N it writes all its tensors, with the safetensors library, to ``STATES/N.safetensors``: what
N must be is known by that file alone, whoever dies when. A trainer that is started again goes on from the newest.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.errors import DeltaSnapshotError
from vllm_delta_snapshot.upkeep import UpkeepPolicy

FROZEN = ("embed_tokens", "layers.0.input_layernorm", "layers.1.self_attn.q_proj", "layers.1.mlp.down_proj")
"""What has no gradient. It is written all the same, in the ways that people write it."""

Write = Callable[[torch.nn.Module, torch.nn.Parameter, random.Random], None]


def _by_data(_: torch.nn.Module, weight: torch.nn.Parameter, rng: random.Random) -> None:
    weight.data += rng.choice([0.125, -0.25])


def _by_numpy(_: torch.nn.Module, weight: torch.nn.Parameter, rng: random.Random) -> None:
    bits = weight.detach().view(torch.uint16).numpy().reshape(-1)
    bits[rng.randrange(bits.size)] ^= 1 << rng.randrange(16)  # a sign, an exponent, a NaN: any bit is a bit


def _in_place(_: torch.nn.Module, weight: torch.nn.Parameter, rng: random.Random) -> None:
    with torch.no_grad():
        weight.view(-1)[rng.randrange(weight.numel()) :].mul_(-1)


def _by_foreach(_: torch.nn.Module, weight: torch.nn.Parameter, rng: random.Random) -> None:
    with torch.no_grad():
        torch._foreach_add_([weight], rng.choice([0.5, -0.5]))


def _by_new_data(_: torch.nn.Module, weight: torch.nn.Parameter, rng: random.Random) -> None:
    weight.data = weight.data.roll(rng.randrange(1, 5), 0)


def _by_new_parameter(owner: torch.nn.Module, weight: torch.nn.Parameter, rng: random.Random) -> None:
    changed = weight.detach().clone()
    changed.view(-1)[rng.randrange(changed.numel())] = rng.choice([0.0, -0.0, 1.5])
    owner.weight = torch.nn.Parameter(changed, requires_grad=False)


ODD_WRITES: dict[str, Write] = {
    "data": _by_data,
    "numpy": _by_numpy,
    "in place": _in_place,
    "foreach": _by_foreach,
    "new data": _by_new_data,
    "new parameter": _by_new_parameter,
}


class Trainer:
    """A model, its publisher, and the states that it leaves."""

    def __init__(self, base: Path, sync_dir: str, states: Path, rng: random.Random) -> None:
        import transformers

        self._model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
        self._states, self._rng = states, rng
        known = sorted(states.glob("*.safetensors"))
        if known:
            self._model.load_state_dict(load_file(known[-1]))
        for name, parameter in self._model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in FROZEN))
        upkeep = UpkeepPolicy(anchor_every=10, merge_every=5) if rng.random() < 0.5 else None
        asynchronous = rng.random() < 0.5
        self.publisher = DeltaPublisher(
            self._model, sync_dir=sync_dir, base=base, asynchronous=asynchronous, upkeep=upkeep, threads=1
        )

    def step(self, *, is_published: bool = True) -> list[str]:
        """Change weights and publish them. Returns the odd ways in which frozen ones were written."""
        trained = [p for p in self._model.parameters() if p.requires_grad]
        with torch.no_grad():
            for weight in self._rng.sample(trained, self._rng.randrange(len(trained) // 2, len(trained) + 1)):
                density = 10 ** self._rng.uniform(-3, -0.5)
                chosen = torch.rand(weight.shape) < density
                weight.copy_(torch.where(chosen, weight * 1.125 + 0.0625 * torch.randn(weight.shape), weight))
        ways = [self._write_frozen() for _ in range(self._rng.randrange(3))]
        self._remember(self.publisher.version + 1)
        if is_published:
            self.publisher.publish(step=self.publisher.version + 1, metrics={"reward": self._rng.random()})
            self.publisher.drain()
        return ways

    def _write_frozen(self) -> str:
        modules = dict(self._model.named_modules())
        frozen = [(n, p) for n, p in self._model.named_parameters() if not p.requires_grad]
        name, weight = self._rng.choice(frozen)
        way = self._rng.choice(sorted(ODD_WRITES))
        ODD_WRITES[way](modules[name.rpartition(".")[0]], weight, self._rng)
        return way

    def _remember(self, version: int) -> None:
        unfinished = self._states / f"unfinished-{os.getpid()}"
        save_file({name: tensor.detach().clone() for name, tensor in self._model.state_dict().items()}, unfinished)
        unfinished.rename(self._states / f"{version:08d}.safetensors")

    def settle(self) -> None:
        """After an interrupt: learn what became of what was under way."""
        with contextlib.suppress(DeltaSnapshotError):  # the next publication carries it
            self.publisher.drain()


def _commands() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def _obey(trainer: Trainer, command: dict[str, Any]) -> dict[str, Any]:
    ways: list[str] = []
    interrupted = False
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for _ in range(command.get("count", 1)):
            ways += trainer.step()
    except KeyboardInterrupt:
        interrupted = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # one that comes late finds a trainer that waits for its user
    if interrupted:
        trainer.settle()
    version = trainer.publisher.version
    return {"version": version, "run_id": trainer.publisher.run_id, "ways": ways, "interrupted": interrupted}


def main(base: str, sync_dir: str, states: str, seed: str) -> None:
    """Obey until told to close, or until the input ends."""
    torch.manual_seed(int(seed))
    torch.set_num_threads(1)
    Path(states).mkdir(exist_ok=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    trainer = Trainer(Path(base), sync_dir, Path(states), random.Random(int(seed)))
    _say({"version": trainer.publisher.version, "run_id": trainer.publisher.run_id})
    for command in _commands():
        if command["do"] == "close":
            break
        _say(_obey(trainer, command))
    trainer.publisher.close()


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:5])
