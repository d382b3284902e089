"""The adapters and their examples: real frameworks train, a real server follows, every bit is compared."""

from __future__ import annotations

import functools
import queue
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from tests.support.follower import follower
from tests.support.server import CheckedServer, ServerProcess, greedy, servers
from tests.support.tiny_models import make_model, train_step
from tests.support.tiny_tokenizer import save_tokenizer
from trainer_hooks.integrations.rounds import Rounds
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.drive import DeltaSync, repair_server, verify_server
from vllm_delta_snapshot.errors import ApplyError, BaseMismatch, SourceError
from vllm_delta_snapshot.runs.materialize import materialize
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import open_store

PROMPT = [3, 4, 5, 6]


@dataclass
class Setup:
    """A server, and the one run that all trainers here continue, each from the base weights again."""

    base: Path
    sync_dir: Path
    client: CheckedServer

    def options(self, *more: str) -> list[str]:
        """Return what every example is told."""
        return [
            *("--model", str(self.base), "--sync-dir", str(self.sync_dir), "--server", self.client.url),
            *more,
        ]


@dataclass
class Witness:
    """Looks at the server after each round that an adapter makes."""

    setup: Setup
    folder: Path
    versions: list[int] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)

    def look(self, rounds: Rounds, model: torch.nn.Module) -> None:
        """Check that the server's live weights, all of them, are the trainer's to the last bit."""
        assert rounds.publisher is not None
        version = rounds.publisher.version
        self.versions.append(version)
        assert self.setup.client.weight_version() == f"{rounds.publisher.run_id}@{version}"
        assert not self.setup.client.is_paused()
        verify_server(self.setup.client, version)
        _assert_published(self.setup, version, model, self.folder / str(version))
        self.tokens.append(greedy(self.setup.client, PROMPT, 8))


def _assert_published(setup: Setup, version: int, model: torch.nn.Module, scratch: Path) -> None:
    materialize(RunFolder(open_store(str(setup.sync_dir))), Checkpoint(setup.base), version, scratch)
    assert_same_bits(scratch, model)


def assert_same_bits(folder: Path, model: torch.nn.Module) -> None:
    """Check a checkpoint against what transformers itself would save of a model with master weights."""
    from safetensors.torch import load_file
    from transformers.core_model_loading import revert_weight_conversion

    saved = load_file(folder / "model.safetensors")
    expected = revert_weight_conversion(model, {name: of.detach() for name, of in model.state_dict().items()})
    assert saved.keys() == expected.keys()
    for name, tensor in saved.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor.view(torch.int16), expected[name].to(torch.bfloat16).view(torch.int16)), name


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    folder = tmp_path_factory.mktemp("integrations")
    base = folder / "base"
    make_model("qwen3_moe", base)  # its experts are fused in the module and not in the checkpoint
    save_tokenizer(base)
    process = ServerProcess(
        base,
        folder / "server.log",
        *("--no-skip-tokenizer-init", "--logprobs-mode", "processed_logprobs"),
        DELTA_SNAPSHOT_STAGE_DIR=str(folder / "stage"),
    )
    with servers(process):
        yield Setup(base, folder / "run", process.client)


@pytest.fixture
def witness(setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Witness:
    """Have every round looked at, where it ends: when the adapter says that the engine has the version."""
    AcceleratorState._reset_state(reset_partial_state=True)  # a process has one; here it has many trainers
    seen = Witness(setup, tmp_path)
    sources: dict[int, Any] = {}
    begin, publish = Rounds.__init__, Rounds.publish

    def noted(rounds: Rounds, source: Any, **options: Any) -> None:
        begin(rounds, source, **options)
        sources[id(rounds)] = source

    def watched(rounds: Rounds, **options: Any) -> Any:
        publication = publish(rounds, **options)
        seen.changed.append(publication.wait().changed_elements)
        seen.look(rounds, sources[id(rounds)])
        return publication

    monkeypatch.setattr(Rounds, "__init__", noted)
    monkeypatch.setattr(Rounds, "publish", watched)
    monkeypatch.chdir(tmp_path)
    return seen


needs_trl = pytest.mark.skipif(find_spec("trl") is None, reason="requirements/adapters.txt is not installed")


@needs_trl
def test_trl_grpo_samples_each_step_from_the_weights_it_has_just_trained(setup: Setup, witness: Witness) -> None:
    from examples import trl_grpo

    labels: list[str] = []
    reward = trl_grpo.share_of_digits

    def asking(completions: list[str], **more: Any) -> list[float]:
        labels.append(setup.client.weight_version())
        return reward(completions, **more)

    asking.__name__ = reward.__name__
    trl_grpo.share_of_digits = asking
    try:
        trainer = trl_grpo.main(setup.options("--steps", "3", "--lr", "1e-3"))
    finally:
        trl_grpo.share_of_digits = reward
    first = witness.versions[0]
    assert witness.versions == [first, first + 1, first + 2]
    assert [label.partition("@")[2] for label in labels] == [str(version) for version in witness.versions]
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert len(rewards) == 3
    assert all(changed > 0 for changed in witness.changed[1:])


@needs_trl
def test_trl_refuses_what_would_sample_from_weights_that_never_change(setup: Setup) -> None:
    from trainer_hooks.integrations.trl import DeltaWeightTransfer, use_delta_sync

    with pytest.raises(SourceError, match="nobody would bring the server"), use_delta_sync(sync_dir="x", base="y"):
        pass
    transfer = DeltaWeightTransfer(sync_dir="x", base="y", samplers=["one"])
    with pytest.raises(SourceError, match=r"attach\(trainer\)"):
        transfer.init_weight_transfer()
    with pytest.raises(SourceError, match="no asynchronous trainer of TRL"):
        transfer.attach(object())


@needs_trl
def test_trl_rloo_too(setup: Setup, witness: Witness) -> None:
    from datasets import Dataset
    from trl import RLOOConfig, RLOOTrainer

    from trainer_hooks.integrations.trl import use_delta_sync

    settings = RLOOConfig(
        output_dir="out",
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=setup.client.url,
        max_steps=2,
        learning_rate=1e-3,
        max_completion_length=4,
        num_generations=2,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
    )
    fleet = DeltaSync([setup.client], sync_dir=str(setup.sync_dir))
    with use_delta_sync(sync_dir=str(setup.sync_dir), base=setup.base, fleet=fleet):
        trainer = RLOOTrainer(
            str(setup.base),
            lambda completions, **_: [float(len(text) % 3) for text in completions],
            args=settings,
            train_dataset=Dataset.from_list([{"prompt": "1 + 2 ="}, {"prompt": "3 + 4 ="}]),
        )
    trainer.train()
    assert trainer.vllm_generation.version == witness.versions[-1]
    assert len(witness.versions) == 2
    assert witness.changed[1] > 0


class IdleWorker:
    """Rollouts for the asynchronous trainer: none, as its training steps need a GPU."""

    def __init__(self) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self.versions: list[int] = []

    def start(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""

    def update_model_version(self, model_version: int) -> None:
        """Note it."""
        self.versions.append(model_version)

    def check_health(self, stale_after_s: float) -> None:
        """Be well."""


@needs_trl
def test_trl_asynchronous_trainer_hands_its_weights_over(
    setup: Setup, witness: Witness, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer

    from trainer_hooks.integrations.trl import DeltaWeightTransfer

    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)  # asks CUDA
    fleet = DeltaSync([setup.client], sync_dir=str(setup.sync_dir))
    transfer = DeltaWeightTransfer(sync_dir=str(setup.sync_dir), base=setup.base, fleet=fleet)
    worker = IdleWorker()
    trainer = AsyncGRPOTrainer(
        str(setup.base),
        args=AsyncGRPOConfig(
            "out", vllm_server_base_url=setup.client.url, max_steps=1, use_cpu=True, report_to="none", dtype="float32"
        ),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "1"}]}]),
        rollout_worker=worker,
        weight_transfer=transfer,
    )
    transfer.attach(trainer)
    trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)
    train_step(trainer.model, 1)
    trainer._sync_weight()
    transfer.destroy()
    assert worker.versions == [1, 2]
    assert transfer.version == witness.versions[-1]
    assert len(witness.versions) == 2
    assert witness.changed[1] > 0


def test_trainer_publishes_whole_steps_and_its_last_one(setup: Setup, witness: Witness) -> None:
    from examples import transformers_trainer

    trainer = transformers_trainer.main(setup.options("--steps", "5", "--every", "2", "--lr", "1e-3"))
    # What an earlier trainer left is replaced first; then steps 2 and 4, of two micro-batches each, and the last, 5.
    assert len(witness.versions) == 4
    assert all(changed > 0 for changed in witness.changed)
    assert len({tuple(tokens) for tokens in witness.tokens}) > 1
    steps = [_step_of(setup, version) for version in witness.versions]
    assert steps == [0, 2, 4, trainer.state.global_step]


def _step_of(setup: Setup, version: int) -> int | None:
    folder = RunFolder(open_store(str(setup.sync_dir)))
    return folder.read_metadata(folder.read_version(version)).step


def test_accelerate_publishes_fp32_masters_of_optimizer_steps_only(setup: Setup, witness: Witness) -> None:
    from examples import accelerate_loop

    model = accelerate_loop.main(setup.options("--steps", "2", "--lr", "1e-3"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert len(witness.versions) == 2
    assert all(changed > 0 for changed in witness.changed)


def test_vllms_factory_makes_our_trainer_engine(setup: Setup, witness: Witness) -> None:
    from examples import vllm_trainer_engine

    vllm_trainer_engine.main(setup.options("--steps", "2", "--lr", "1e-3"))
    assert len(witness.versions) == 2
    assert all(changed > 0 for changed in witness.changed)


def test_vllms_own_client_is_refused_unless_somebody_resets_caches(setup: Setup, tmp_path: Path) -> None:
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from trainer_hooks.integrations.vllm import DeltaSnapshotTrainerInitInfo

    def engine_of(source: Any, **more: Any) -> Any:
        info = DeltaSnapshotTrainerInitInfo(sync_dir=str(setup.sync_dir), base=str(setup.base), rank=0, **more)
        client = HTTPVLLMWeightSyncClient(setup.client.url)
        return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)

    model = _loaded(setup.base)
    with pytest.raises(ApplyError, match="neither pause generation nor reset caches"):
        engine_of(ModuleSource(model))
    train_step(model, 7)
    engine = engine_of(PairsSource(model), resets_caches=True)
    engine.send_weights()
    assert setup.client.weight_version().endswith(f"@{engine.version}")
    verify_server(setup.client, engine.version)
    _assert_published(setup, engine.version, model, tmp_path / "first")
    # A refusal is told in its own words, with its own kind, through a client that knows neither.
    setup.client.drift()
    train_step(model, 8)
    with pytest.raises(BaseMismatch):
        engine.send_weights()
    repair_server(setup.client)
    engine = engine_of(PropertySource(model), resets_caches=True)  # and a new trainer, as after a restart
    engine.send_weights()
    verify_server(setup.client, engine.version)
    _assert_published(setup, engine.version, model, tmp_path / "second")


@pytest.mark.parametrize("way", ["driven by the trainer", "followed"])
def test_word_problems_are_sampled_from_each_version_in_turn(setup: Setup, tmp_path: Path, way: str) -> None:
    from examples.grpo_gsm8k.__main__ import run
    from examples.grpo_gsm8k.settings import read_settings

    arguments = [
        *setup.options("--steps", "2", "--lr", "1e-3", "--out", str(tmp_path)),
        *("--questions", "4", "--samples", "4", "--max-tokens", "16", "--timeout", "120"),
    ]
    with ExitStack() as beside:
        if way == "followed":
            options = ("--sampler", "beside", "--max-lag", "0")
            beside.enter_context(follower(setup.sync_dir, setup.client.url, tmp_path / "follow.log", *options))
            arguments += ["--follow", "--wait-for", "beside"]
        trained = run(read_settings(arguments))
        assert setup.client.weight_version().endswith(f"@{trained.version}")
    assert not setup.client.is_paused()
    verify_server(setup.client, trained.version)
    _assert_published(setup, trained.version, trained.model, tmp_path / "published")
    folder = RunFolder(open_store(str(setup.sync_dir)))
    for record in trained.records:
        report = record.delivered.published
        assert report.changed_elements > 0
        assert record.delivered.pause_s is not None
        metadata = folder.read_metadata(folder.read_version(report.version))
        assert (metadata.step, metadata.metrics) == (record.step, {"reward": record.reward, "solved": record.solved})


@pytest.mark.skipif(find_spec("skyrl") is None, reason="SkyRL 0.4 needs Python 3.12 and more: make test-skyrl")
def test_skyrl_sends_deltas_of_ours_with_its_own_client(setup: Setup, witness: Witness) -> None:
    from skyrl.backends.skyrl_train.weight_sync import get_vllm_receive_backend

    from examples import skyrl_sync

    skyrl_sync.main(setup.options("--steps", "2", "--lr", "1e-3"))
    assert get_vllm_receive_backend("delta", colocate_all=False) == "delta_snapshot"
    assert len(witness.versions) == 2
    assert all(changed > 0 for changed in witness.changed)


class PairsSource:
    """A `WeightSource` that shows no module, as exporters of other frameworks: checkpoint names, full tensors."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def _pairs(self) -> dict[str, torch.Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self._model, {n: of.detach() for n, of in self._model.state_dict().items()})

    def metadata(self) -> list[Any]:
        """Return names, types and shapes."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._pairs().items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the pairs."""
        yield from self._pairs().items()


class PropertySource:
    """The same as vLLM 0.33 wants it: metadata is a property, and iteration has a name."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._pairs = PairsSource(model)

    @functools.cached_property
    def metadata(self) -> list[Any]:
        """Return names, types and shapes."""
        return self._pairs.metadata()

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the pairs."""
        return iter(self._pairs)


def _loaded(base: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
