"""Real training steps, published by hand or by a hook: whatever a step does to weights, a version is exactly that."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.checkpoints import write_checkpoint
from tests.support.runs import State, assert_same_state, replay
from tests.support.tensors import bits_of
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store.posix import PosixStore


class Towers(nn.Module):
    """A frozen tower, a trained one, and a parameter that is trained late; fp32, served in bf16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.body = nn.Linear(8, 8)
        self.late = nn.Parameter(torch.randn(8), requires_grad=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.body(self.frozen(batch)) * self.late


class Training:
    """A model, its optimizer, and a publisher; every published state is noted."""

    def __init__(self, folder: Path, *, asynchronous: bool) -> None:
        self.folder = folder
        self.model = Towers()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        base = write_checkpoint(folder / "base", {name: p.detach().bfloat16() for name, p in self.named()})
        self.publisher = DeltaPublisher(self.model, sync_dir=str(folder / "run"), base=base, asynchronous=asynchronous)
        self.history = [self.state()]

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.model.named_parameters())

    def state(self) -> State:
        """Return what engines should have."""
        return {name: bits_of(p.detach().bfloat16()) for name, p in self.named()}

    def backward(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.model(torch.randn(4, 8, generator=generator)).square().sum().backward()

    def step(self, seed: int) -> None:
        self.backward(seed)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def publish(self) -> None:
        """Publish, and do not wait."""
        self.publisher.publish()
        self.history.append(self.state())

    def check(self) -> None:
        self.publisher.close()
        found = replay(self.folder / "run", self.folder / "base", self.folder)
        for state, expected in zip(found, self.history, strict=True):
            assert_same_state(state, expected)

    def changed(self, version: int) -> set[str]:
        """Return the tensors that a version changes."""
        folder = RunFolder(PosixStore(self.folder / "run"))
        return {entry.name for entry in folder.read_metadata(folder.read_version(version)).tensors}

    def steps_recorded(self) -> list[int | None]:
        """Return the step that each version says it is of."""
        folder = RunFolder(PosixStore(self.folder / "run"))
        return [folder.read_metadata(folder.read_version(version)).step for version in folder.versions()]


@pytest.fixture(params=[True, False], ids=["asynchronous", "blocking"])
def training(request: pytest.FixtureRequest, tmp_path: Path) -> Training:
    return Training(tmp_path, asynchronous=request.param)


def two_steps_a_publication(training: Training) -> None:
    for seed in range(0, 6, 2):
        training.step(seed)
        training.step(seed + 1)
        training.publish()


def gradient_accumulation(training: Training) -> None:
    for seed in range(6):
        training.backward(seed)
        if seed % 2:
            training.optimizer.step()
            training.optimizer.zero_grad()
        training.publish()


def skipped_steps(training: Training) -> None:
    for seed in range(4):
        training.step(seed)
        training.publish()
        training.optimizer.zero_grad()
        training.optimizer.step()  # without a gradient
        training.publish()
    training.publisher.drain()
    assert [len(training.changed(version)) for version in range(1, 9)] == [2, 0] * 4


def frozen_tower(training: Training) -> None:
    for seed in range(3):
        training.step(seed)
        training.publish()
    training.publisher.drain()
    assert training.changed(1) | training.changed(2) | training.changed(3) == {"body.weight", "body.bias"}


def late_parameter(training: Training) -> None:
    for seed in range(5):
        if seed == 2:
            training.model.late.requires_grad_(True)
        training.step(seed)
        training.publish()
    training.publisher.drain()
    assert ["late" in training.changed(version) for version in range(1, 6)] == [False, False, True, True, True]


def nan_weights(training: Training) -> None:
    with torch.no_grad():
        training.model.body.weight[0] = float("nan")
        training.model.body.weight[1] = float("inf")
        training.model.body.bias.fill_(-0.0)
    training.publish()
    training.publish()
    with torch.no_grad():
        training.model.body.bias.fill_(0.0)
    training.publish()
    training.step(1)  # by a gradient that is NaN where the weights are not finite
    training.publish()
    assert torch.isnan(training.model.body.weight[:2]).all()
    training.publisher.drain()
    assert training.changed(2) == set()


def old_value_again(training: Training) -> None:
    old = {name: p.detach().clone() for name, p in training.named()}
    for seed in range(3):
        training.step(seed)
        training.publish()
        training.model.load_state_dict(old)
        training.publish()
    first, last = training.history[0], training.history[-1]
    assert_same_state(last, first)


CASES = [
    two_steps_a_publication,
    gradient_accumulation,
    skipped_steps,
    frozen_tower,
    late_parameter,
    nan_weights,
    old_value_again,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_every_version_is_exact(training: Training, case: Callable[[Training], None]):
    case(training)
    training.check()


def test_step_that_raises_while_a_publication_is_under_way_harms_none(training: Training):
    def broken(*args: object) -> None:
        raise FloatingPointError("the loss is not finite")

    training.step(1)
    training.publish()
    handle = training.optimizer.register_step_pre_hook(broken)
    with pytest.raises(FloatingPointError):
        training.step(2)
    handle.remove()
    training.optimizer.zero_grad()
    training.step(3)
    training.publish()
    training.check()


@pytest.mark.parametrize("every", [1, 2, 3])
def test_hook_publishes_every_so_many_steps_and_says_which(training: Training, every: int):
    training.publisher.hook(training.optimizer, every=every)
    for number in range(1, 8):
        training.step(number)
        if number % every == 0:
            training.history.append(training.state())
    training.check()
    assert training.steps_recorded() == [number for number in range(1, 8) if number % every == 0]


def test_hook_counts_on_after_a_resume(training: Training):
    training.publisher.hook(training.optimizer, every=2, first_step=10)
    for seed in range(3):
        training.step(seed)
    training.publisher.close()
    assert training.steps_recorded() == [10, 12]


def test_hook_that_was_removed_publishes_no_more(training: Training):
    handle = training.publisher.hook(training.optimizer)
    training.step(1)
    training.history.append(training.state())
    handle.remove()
    training.step(2)
    training.check()


def test_hook_counts_no_micro_batches(training: Training):
    training.publisher.hook(training.optimizer, every=2)
    for seed in range(8):
        training.backward(seed)
        if seed % 2:
            training.optimizer.step()
            training.optimizer.zero_grad()
    training.publisher.close()
    assert training.steps_recorded() == [2, 4]


def test_hook_counts_no_step_that_a_scaler_skips(training: Training):
    training.publisher.hook(training.optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for seed, is_finite in enumerate([True, False, True, False]):
        factor = 1.0 if is_finite else float("inf")
        generator = torch.Generator().manual_seed(seed)
        scaler.scale(training.model(torch.randn(4, 8, generator=generator)).square().sum() * factor).backward()
        scaler.step(training.optimizer)
        scaler.update()
        training.optimizer.zero_grad()
        if is_finite:
            training.history.append(training.state())
    training.check()
    assert training.steps_recorded() == [1, 2]


@pytest.mark.parametrize("every", [0, -1])
def test_hook_of_no_steps_is_refused(training: Training, every: int):
    with pytest.raises(ValueError, match="at least 1"):
        training.publisher.hook(training.optimizer, every=every)


def test_hook_raises_out_of_the_step_after_the_weights_were_updated(training: Training):
    training.publisher.hook(training.optimizer)
    training.publisher.close()
    before = training.state()
    with pytest.raises(Exception, match="closed"):
        training.step(1)
    assert any(not np.array_equal(before[name], bits) for name, bits in training.state().items())
