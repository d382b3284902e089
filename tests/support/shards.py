"""Models that several processes hold together, in the ways that trainers shard them, and what they hold in all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from tests.support.tensors import rng_of
from trainer_hooks import PartialTensor

State = dict[str, torch.Tensor]


class Net(nn.Module):
    """Odd shapes, a tied head, a frozen tower, a part that becomes trainable late, buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(13, 8)
        self.up = nn.Linear(8, 9)
        self.down = nn.Linear(9, 7, bias=False)
        self.norm = nn.LayerNorm(7)
        self.gate = nn.Parameter(torch.full((1,), 0.5))
        self.tower = nn.Linear(7, 10).requires_grad_(requires_grad=False)
        self.late = nn.Linear(10, 8).requires_grad_(requires_grad=False)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor(3))
        self.register_buffer("scratch", torch.zeros(5), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        hidden = self.norm(self.down(torch.relu(self.up(self.embed(ids)))))
        return self.head(self.late(self.tower(hidden * self.gate))).float().square().mean()


KEPT_FP32 = ("norm.weight",)


def served(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the type of the checkpoint: bf16, but for some."""
    is_cast = tensor.dtype == torch.float32 and name not in KEPT_FP32
    return (tensor.to(torch.bfloat16) if is_cast else tensor).detach().clone().contiguous()


@dataclass
class Trained:
    """A model in training.

    Attributes:
        source: what a publisher is given.
        full: returns all of it, by checkpoint name, in its own types; collective.
        step: makes one change; collective.
    """

    source: object
    full: Callable[[], State]
    step: Callable[[int], None]


def _poke(tensor: torch.Tensor, *seed: object, share: float = 0.1) -> torch.Tensor:
    """Return a full tensor with some elements changed, NaN and -0.0 among the new values."""
    rng = rng_of(*seed)
    flat = tensor.detach().clone().reshape(-1)
    count = max(1, int(share * flat.numel()))
    at = torch.from_numpy(rng.choice(flat.numel(), count, replace=False))
    new = torch.from_numpy(rng.standard_normal(count)).to(flat.dtype)
    new[::7] = -0.0
    new[3::11] = float("nan")
    flat[at] = new
    return flat.view(tensor.shape)


def _write(parameter: torch.Tensor, full: torch.Tensor) -> None:
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            local = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(local.to_local())
        else:
            parameter.copy_(full)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Story:
    """What happens to a module: steps, none, a late start, NaN, old values again, a frozen tower that is loaded anew.

    Args:
        module: sharded in any way that leaves DTensors or plain tensors.
        forward: whether its forward pass runs in this layout.
        backward: whether its backward pass does; else elements are written.
    """

    STEPS = 6

    def __init__(self, module: nn.Module, *, forward: bool, backward: bool) -> None:
        self.module = module
        self.forward, self.backward = forward, backward
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=0.05, foreach=False)
        self.old: State = {}

    def full(self) -> State:
        return {name: _whole(t.detach()) for name, t in self.module.state_dict().items() if name != "head.weight"}

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters()

    def step(self, number: int) -> None:
        if number == 1:
            self.train(number)
            self.old = {name: t.clone() for name, t in self.full().items()}
        elif number == 3:
            for parameter in self.module.late.parameters():
                parameter.requires_grad_()
            self.train(number)
        elif number == 4:
            for name, parameter in self.parameters():
                if not name.startswith("tower"):
                    _write(parameter, _poke(_whole(parameter.detach()), name, number))
        elif number == 5:
            for name, parameter in self.parameters():
                _write(parameter, self.old[name])
        elif number == 6:
            _write(self.module.tower.weight, _poke(_whole(self.module.tower.weight.detach()), number))
            self.module.seen += 1

    def train(self, number: int) -> None:
        if self.backward:
            self.module(torch.arange(6) + dist.get_rank()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            for name, parameter in self.parameters():
                if parameter.requires_grad:
                    _write(parameter, _poke(_whole(parameter.detach()), name, number, share=0.5))
        if self.forward:
            with torch.no_grad():
                self.module(torch.arange(4))  # leaves the root gathered, in lower precision where there is one

    def trained(self) -> Trained:
        return Trained(self.module, self.full, self.step)


def _fsdp2(mesh: Any = None, *, backward: bool = True, **options: Any) -> Trained:
    net = Net()
    for inner in (net.up, net.down, net.tower, net.late):
        fully_shard(inner, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    return Story(net, forward=True, backward=backward).trained()


def fsdp2() -> Trained:
    return _fsdp2()


def fsdp2_mixed_precision() -> Trained:
    # A part that becomes trainable late has no backward pass here in torch 2.13.
    return _fsdp2(backward=False, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def fsdp2_offloaded() -> Trained:
    return _fsdp2(offload_policy=CPUOffloadPolicy(pin_memory=False))


def fsdp2_columns() -> Trained:
    def placed(parameter: nn.Parameter) -> Shard:
        return Shard(1) if parameter.dim() > 1 and parameter.shape[1] % dist.get_world_size() == 0 else Shard(0)

    return _fsdp2(shard_placement_fn=placed)


def hsdp() -> Trained:
    return _fsdp2(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def fsdp_and_tp() -> Trained:
    """Some of it tensor parallel; what is not lies on the data-parallel ranks only, so two ranks hold each of it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = Net()
    parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    return Story(net, forward=False, backward=False).trained()


def strided() -> Trained:
    """A strided shard that no other dimension of the mesh completes: its rows are not consecutive."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = Net()
    for module in net.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.dim() == 2 and parameter.shape[0] == 8:
                placement = _StridedShard(0, split_factor=2)
                sharded = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
                module._parameters[name] = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
    return Story(net, forward=False, backward=False).trained()


def fsdp1(**options: Any) -> Trained:
    net = Net()
    net.head = nn.Linear(8, 13, bias=False)
    device = torch.device("cpu")
    for name in ("up", "down"):
        inner = FullyShardedDataParallel(getattr(net, name), use_orig_params=True, device_id=device, **options)
        setattr(net, name, inner)
    net = FullyShardedDataParallel(net, use_orig_params=True, device_id=device, **options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, foreach=False)

    def full() -> State:
        with FullyShardedDataParallel.summon_full_params(net, writeback=False):
            return {
                name.replace("_fsdp_wrapped_module.", ""): tensor.detach().clone()
                for name, tensor in (*net.named_parameters(), ("seen", net.module.seen))
            }

    def step(number: int) -> None:
        if number == 2:
            return
        if number == 3:
            for parameter in net.module.late.parameters():
                parameter.requires_grad_()
        net(torch.arange(6) + dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 4:
            with torch.no_grad():
                net(torch.arange(4))  # leaves the root gathered, in lower precision where there is one

    return Trained(net, full, step)


def fsdp1_mixed_precision() -> Trained:
    return fsdp1(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))


def partials() -> Trained:
    """A generic exporter: rows on some ranks, columns on others, the same box on two, whole ones everywhere."""
    state: State = {name: tensor.detach().clone() for name, tensor in Net().state_dict().items()}
    rank, size = dist.get_rank(), dist.get_world_size()

    def export() -> Iterator[Any]:
        names = list(state) if rank % 2 else list(reversed(state))
        for name in names:
            tensor = state[name]
            if tensor.dim() == 2:
                start, stop = tensor.shape[0] * rank // size, tensor.shape[0] * (rank + 1) // size
                yield PartialTensor(name, tensor[start:stop, :3], (start, 0))
                half = tensor.shape[0] // 2
                if rank < 2:  # both of them
                    yield PartialTensor(name, tensor[:half, 3:], (0, 3))
                if rank == size - 1:
                    yield PartialTensor(name, tensor[half:, 3:], (half, 3))
            else:
                yield name, tensor

    def step(number: int) -> None:
        if number != 2:
            for name, tensor in state.items():
                if tensor.is_floating_point():
                    tensor.copy_(_poke(tensor, name, number))

    return Trained(export, lambda: dict(state), step)


class Experts:
    """A mixture of experts of transformers, which keeps them fused, trained by FSDP2; what it is in all is what
    ``save_pretrained`` of an unsharded twin writes.

    Args:
        folder: where to write such twins.
    """

    def __init__(self, folder: Path) -> None:
        import transformers

        torch.manual_seed(11)
        config = transformers.Qwen3MoeConfig(
            vocab_size=61,
            hidden_size=12,
            intermediate_size=20,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=6,
            moe_intermediate_size=5,
            num_experts=3,
            num_experts_per_tok=2,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            tie_word_embeddings=False,
        )
        kind = transformers.Qwen3MoeForCausalLM
        self.twin, module = kind(config), kind(config)
        module.load_state_dict(self.twin.state_dict())
        for layer in module.model.layers:
            fully_shard(layer)
        fully_shard(module)
        self.module = module
        self.folder = folder / "twin"

    def full(self) -> State:
        """Return what the checkpoint would be, on rank 0."""
        self.twin.load_state_dict({name: _whole(t.detach()) for name, t in self.module.state_dict().items()})
        if dist.get_rank():
            return {}  # transformers writes on one rank only
        self.twin.save_pretrained(self.folder)
        return load_file(self.folder / "model.safetensors")

    def step(self, number: int) -> None:
        """Write some elements of each parameter."""
        if number != 2:
            for name, parameter in self.module.named_parameters():
                _write(parameter, _poke(_whole(parameter.detach()), name, number))


class Large:
    """One large matrix, all of which changes."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.module = nn.Linear(900, 700, bias=False)
        fully_shard(self.module)

    def full(self) -> State:
        """Return all of it."""
        return {"weight": _whole(self.module.weight.detach())}

    def step(self, number: int) -> None:
        """Change all of it, once."""
        if number == 1:
            _write(self.module.weight, -_whole(self.module.weight.detach()))


def experts(folder: Path) -> Trained:
    model = Experts(folder)
    return Trained(model.module, model.full, model.step)


def large() -> Trained:
    model = Large()
    return Trained(model.module, model.full, model.step)


def fsdp2_frozen() -> Trained:
    """Frozen parameters written in place as a DTensor is: torch counts none of it."""
    trained = _fsdp2()
    net: Any = trained.source
    weights = [net.tower.weight, net.tower.bias]

    def step(number: int) -> None:
        with torch.no_grad():
            if number == 1:
                net.tower.weight.add_(0.5)
            elif number == 3:
                torch._foreach_mul_(weights, 1.5)
            elif number == 4:
                net.tower.weight.data.sub_(0.25)
                torch._foreach_add_([weight.data for weight in weights], 1.0)
            elif number == 5:
                for weight in weights:
                    weight.to_local().numpy()[...] += 1  # an alias that torch knows nothing of
            elif number == 6:
                weights[0].to_local().data.neg_()
                weights[1].copy_(weights[1] * 3)

    return Trained(net, trained.full, step)


def partials_lent() -> Trained:
    """An exporter with one buffer, which it fills again for every box."""
    trained = partials()

    def export() -> Iterator[Any]:
        buffer = torch.empty(1024, dtype=torch.float64)
        for item in trained.source():
            partial = item if isinstance(item, PartialTensor) else PartialTensor(*item)
            lent = buffer.view(partial.tensor.dtype)[: partial.tensor.numel()].view(partial.tensor.shape)
            yield PartialTensor(partial.name, lent.copy_(partial.tensor), partial.offsets)
            buffer.fill_(float("nan"))

    return Trained(export, trained.full, trained.step)


CASES: dict[str, tuple[int, Callable[[], Trained]]] = {
    "fsdp2": (4, fsdp2),
    "fsdp2 mixed precision": (2, fsdp2_mixed_precision),
    "fsdp2 offloaded": (2, fsdp2_offloaded),
    "fsdp2 columns": (4, fsdp2_columns),
    "hsdp": (4, hsdp),
    "fsdp and tp": (4, fsdp_and_tp),
    "strided": (4, strided),
    "fsdp1": (4, fsdp1),
    "fsdp1 mixed precision": (2, fsdp1_mixed_precision),
    "partials": (4, partials),
    "fsdp2 frozen": (2, fsdp2_frozen),
    "partials lent": (2, partials_lent),
    "large": (2, large),
}
"""By name: how many processes, and the model."""
