"""Parameters that nobody trains and somebody writes: published as they are, however they were written.

torch counts writes, but none of those through ``.data`` or numpy, or into the local part of a `DTensor`.
On several processes: the case "fsdp2 frozen" of test_sharded_publish.py.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from tests.support.checkpoints import write_checkpoint
from tests.support.runs import assert_same_state, replay
from tests.support.tensors import bits_of
from trainer_hooks import DeltaPublisher, ShardedPublisher

Publisher = DeltaPublisher | ShardedPublisher
BOTH = pytest.mark.parametrize("make", [DeltaPublisher, ShardedPublisher], ids=["one process", "several"])


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cold = nn.Parameter(torch.randn(64, 64), requires_grad=False)
        self.low = nn.Parameter(torch.randn(33).bfloat16(), requires_grad=False)
        self.warm = nn.Parameter(torch.randn(4))
        self.register_buffer("seen", torch.zeros(5))


def _numpy(tensor: torch.Tensor) -> None:
    tensor.detach().numpy()[3] += 1


def _in_inference(tensor: torch.Tensor) -> None:
    with torch.inference_mode():
        tensor.add_(1)


WRITES: dict[str, Callable[[Frozen], object]] = {
    "data, added to": lambda m: m.cold.data.add_(1),
    "data, one element": lambda m: m.low.data.__setitem__(7, 3.0),
    "data, replaced": lambda m: setattr(m.cold, "data", m.cold.data + 1),
    "foreach on data": lambda m: torch._foreach_add_([m.cold.data, m.low.data], 1.0),
    "numpy": lambda m: _numpy(m.cold),
    "a view of its storage": lambda m: torch.tensor([], dtype=torch.bfloat16).set_(m.low.untyped_storage()).fill_(2.0),
    "data, to minus zero": lambda m: m.cold.data.mul_(0.0).neg_(),
    "inference mode": lambda m: _in_inference(m.cold.data),
    "a buffer's data": lambda m: m.seen.data.add_(1),
    "swapped storages": lambda m: torch.utils.swap_tensors(m.cold, nn.Parameter(m.cold + 1, requires_grad=False)),
}


def opened(make: type[Publisher], module: nn.Module, folder: Path) -> Publisher:
    write_checkpoint(folder / "base", {name: t.clone() for name, t in module.state_dict().items()})
    return make(module, sync_dir=str(folder / "run"), base=folder / "base")


def check_last(module: nn.Module, folder: Path) -> None:
    found = replay(folder / "run", folder / "base", folder)[-1]
    assert_same_state(found, {name: bits_of(tensor) for name, tensor in module.state_dict().items()})


@BOTH
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_frozen_parameter_is_published_however_it_was_written(
    make: type[Publisher], write: Callable[[Frozen], object], tmp_path: Path
):
    module = Frozen()
    with opened(make, module, tmp_path) as publisher:
        publisher.publish()
        write(module)
        assert publisher.publish().report.changed_elements > 0
        assert publisher.publish().report.changed_elements == 0
    check_last(module, tmp_path)


@BOTH
def test_adapter_that_is_merged_by_data_is_published(make: type[Publisher], tmp_path: Path):
    """As PEFT merges LoRA: ``weight.data += scale * B @ A``, into layers whose own weights are frozen."""
    module = nn.Sequential(nn.Linear(16, 24, bias=False), nn.Linear(24, 16, bias=False)).requires_grad_(False)
    down, up = torch.randn(2, 16), torch.randn(24, 2)
    before = module[0].weight.clone()
    with opened(make, module, tmp_path) as publisher:
        publisher.publish()
        module[0].weight.data += 0.5 * up @ down
        publisher.publish().wait()
        check_last(module, tmp_path)
        module[0].weight.data -= 0.5 * up @ down
        module[1].weight.data = module[1].weight.data.clone()  # the same values elsewhere
        publisher.publish()
    assert not torch.equal(before, module[0].weight)  # rounding: what is published is what it is
    check_last(module, tmp_path)


@pytest.fixture(scope="module")
def router() -> DeepseekV3ForCausalLM:
    config = DeepseekV3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
    )
    torch.manual_seed(1)
    return DeepseekV3ForCausalLM(config)


@BOTH
@pytest.mark.parametrize("is_parameter", [False, True], ids=["as transformers has it", "as a frozen parameter"])
def test_router_bias_that_the_trainer_moves_is_published(
    make: type[Publisher], is_parameter: bool, router: DeepseekV3ForCausalLM, tmp_path: Path
):
    """The bias that balances experts gets no gradient; trainers move it after each step, by the load."""
    gate = router.model.layers[1].mlp.gate
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert name in router.state_dict()
    if is_parameter:
        bias = gate.e_score_correction_bias.detach().clone()
        gate.__dict__.pop("e_score_correction_bias", None)
        gate._buffers.pop("e_score_correction_bias", None)
        gate._parameters.pop("e_score_correction_bias", None)
        gate.register_parameter("e_score_correction_bias", nn.Parameter(bias, requires_grad=False))
    router.save_pretrained(tmp_path / "base")
    with make(router, sync_dir=str(tmp_path / "run"), base=tmp_path / "base") as publisher:
        publisher.publish()
        expected = []
        for step in range(3):
            load = torch.tensor([1.0, -1.0, 1.0, -1.0]) * (step + 1)
            gate.e_score_correction_bias.data.add_(0.001 * torch.sign(load - load.mean()))
            assert publisher.publish().report.changed_elements == 4
            expected.append(bits_of(gate.e_score_correction_bias))
    states = replay(tmp_path / "run", tmp_path / "base", tmp_path)
    assert [state[name].tolist() for state in states[2:]] == [bits.tolist() for bits in expected]
