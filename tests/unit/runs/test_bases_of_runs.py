"""The base of a run, by whatever name: from the trainer's first look at it to the last command that needs it."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.checkpoints import tiny_tensors, write_checkpoint
from tests.support.cli import Outcome
from tests.support.hub import COMMIT, cached
from tests.support.runs import TinyTrainer, assert_same_state
from tests.support.shard_faults import Rows
from trainer_hooks import DeltaPublisher, ShardedPublisher, UpkeepPolicy
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import ObjectNotFound, RunMismatch, VerifyError
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store.posix import PosixStore

ROOT = Path(__file__).parents[3]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a working folder with a base checkpoint, the working folder of this process."""
    write_checkpoint(tmp_path / "work" / "base", tiny_tensors())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """Be the only rank of a group."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def opened(trainer: TinyTrainer, base: str | Path = "base", **options: Any) -> DeltaPublisher:
    return DeltaPublisher(trainer, sync_dir="run", base=base, asynchronous=False, **options)


def publish(publisher: DeltaPublisher, trainer: TinyTrainer) -> None:
    trainer.step(publisher.version + 1)
    publisher.publish()


def run_of(work: Path) -> RunFolder:
    return RunFolder(PosixStore(work / "run"))


def assert_made(folder: Path, trainer: TinyTrainer) -> None:
    made = Checkpoint(folder)
    assert_same_state({name: made.bits(name) for name in made.specs}, trainer.state())


def overwrite(base: Path) -> None:
    """Write other weights into the very file that is mapped."""
    other = write_checkpoint(base.parent / "other", tiny_tensors(seed=9))
    with (base / "model.safetensors").open("r+b") as file:
        file.write((other / "model.safetensors").read_bytes())


def replace_folder(base: Path) -> None:
    """Put another checkpoint in its place."""
    base.rename(base.parent / "before")
    write_checkpoint(base, tiny_tensors(seed=9))


def test_run_of_a_relative_base_outlives_a_change_of_the_working_folder(work: Path, tmp_path: Path):
    trainer = TinyTrainer()
    with opened(trainer, upkeep=UpkeepPolicy(anchor_every=2)) as publisher:
        os.chdir(tmp_path / "elsewhere")
        publish(publisher, trainer)
        publish(publisher, trainer)
        assert publisher._reopened().state_digest == publisher.state_digest
    folder = run_of(work)
    assert folder.read_run().base.name == str(work / "base")
    notes = [folder.read_metadata(folder.read_version(version)).base_model for version in (1, 2)]
    assert notes == [str(work / "base")] * 2
    assert list(folder.shortcuts().anchors) == [2]  # by a process that was started elsewhere
    assert not any((tmp_path / "elsewhere").iterdir())
    Outcome("materialize", f"{work / 'run'}@1", tmp_path / "made").assert_ok()


def test_ranks_with_a_relative_base_outlive_a_change_of_the_working_folder(work: Path, tmp_path: Path, alone: None):
    rows = Rows()
    write_checkpoint(work / "rows", rows.state)
    options: dict[str, Any] = {"upkeep": UpkeepPolicy(anchor_every=1), "threads": 1, "asynchronous": False}
    with ShardedPublisher(rows.export, sync_dir="run", base="rows", **options) as publisher:
        os.chdir(tmp_path / "elsewhere")
        rows.step(1)
        publisher.publish()
    folder = run_of(work)
    assert folder.read_run().base.name == str(work / "rows")
    assert folder.read_metadata(folder.read_version(1)).base_model == str(work / "rows")
    assert list(folder.shortcuts().anchors) == [1]


@pytest.mark.parametrize("change", [overwrite, replace_folder])
def test_base_that_others_replace_during_the_run_is_never_taken_for_the_base(
    work: Path, tmp_path: Path, change: Any, caplog: pytest.LogCaptureFixture
):
    trainer = TinyTrainer()
    shutil.copytree("base", tmp_path / "kept")
    publisher = opened(trainer, upkeep=UpkeepPolicy(anchor_every=2))
    change(work / "base")
    publish(publisher, trainer)
    with pytest.raises(RunMismatch):
        publisher._reopened()
    with caplog.at_level(logging.WARNING):
        publish(publisher, trainer)
        publisher.close()
    assert "[BaseMismatch]" in caplog.text  # the anchor's
    assert not run_of(work).shortcuts().anchors
    with pytest.raises(RunMismatch):
        opened(trainer)
    Outcome("materialize", "run", tmp_path / "not made").assert_failed(1, "BaseMismatch")
    Outcome("materialize", "run", tmp_path / "made", "--base", tmp_path / "kept").assert_ok()
    assert_made(tmp_path / "made", trainer)


def test_base_that_is_deleted_during_the_run_is_missed_only_where_it_is_read(work: Path, tmp_path: Path):
    trainer = TinyTrainer()
    shutil.copytree("base", tmp_path / "kept")
    with opened(trainer) as publisher:
        shutil.rmtree("base")
        publish(publisher, trainer)
        with pytest.raises(ObjectNotFound, match="no such checkpoint folder") as caught:
            publisher._reopened()
    assert caught.value.file == str(work / "base")
    message = Outcome("materialize", "run", tmp_path / "made").assert_failed(2, "ObjectNotFound")
    assert message.endswith("--base FOLDER [ObjectNotFound]")
    Outcome("materialize", "run", tmp_path / "made", "--base", tmp_path / "kept").assert_ok()
    assert_made(tmp_path / "made", trainer)


def test_rank_whose_base_was_overwritten_does_not_mend_itself_with_it(work: Path, alone: None):
    rows = Rows()
    write_checkpoint(work / "base", rows.state)
    publisher = rows.publisher(work)
    rows.step(1)
    publisher.publish()
    path = work / "base" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-8:] = bytes(byte ^ 1 for byte in data[-8:])
    with path.open("r+b") as file:
        file.write(data)
    publisher._published._is_moving = True  # as an interruption leaves it
    with pytest.raises(VerifyError, match="does not lead to the state"):
        publisher.publish()
    publisher.close()


def test_publisher_says_what_it_was_given_where_that_is_no_checkpoint(work: Path):
    (work / "base" / "model.safetensors").rename(work / "base" / "pytorch_model.bin")
    with pytest.raises(ObjectNotFound, match=r"only pickles: pytorch_model\.bin"):
        opened(TinyTrainer())
    with pytest.raises(ObjectNotFound, match="no such checkpoint folder") as caught:
        opened(TinyTrainer(), "bases")
    assert caught.value.file == str(work / "bases")
    assert not (work / "run").exists()


def test_run_of_a_hub_id_from_the_trainer_to_every_command(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    snapshot = cached(tmp_path / "home" / "hub", work / "base")
    shutil.rmtree(work / "base")
    env = {name: value for name, value in os.environ.items() if not name.endswith("_HUB_CACHE")}
    env |= {"HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}

    def called(code: str, *words: str) -> None:
        """Run code in a process of its own, which finds the cache where its environment says."""
        done = subprocess.run(
            [sys.executable, "-c", code, *words], cwd=work, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    called(_TRAINER, "org/model")
    trainer = TinyTrainer()
    trainer.step(1)
    trainer.step(2)
    assert run_of(work).read_run().base.name == str(snapshot)
    called(_CLI, "materialize", "run", "by id", "--base", "org/model")
    assert_made(work / "by id", trainer)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    pinned = f"org/model@{COMMIT}"
    Outcome("materialize", "run", "as the run says").assert_ok()
    Outcome("materialize", "run", "pinned", "--base", pinned).assert_ok()
    assert_made(work / "as the run says", trainer)
    assert_made(work / "pinned", trainer)
    Outcome("verify", "run", "--deep", "--base", "org/model").assert_ok()
    assert Outcome("diff", "run@0", "run", "--base", "org/model", "--json").json["num_tensors"] > 0
    Outcome("export", "run", "out", "--format", "openrl-v2", "--base", "org/model").assert_failed(
        1, "UnsupportedFormat"
    )

    # On a machine whose cache does not have it.
    shutil.move(tmp_path / "home", tmp_path / "moved")
    message = Outcome("materialize", "run", "made").assert_failed(2, "ObjectNotFound")
    assert f"--base {pinned}" in message
    message = Outcome("materialize", "run", "made", "--base", pinned).assert_failed(1, "ObjectNotFound")
    assert f"hf download org/model --revision {COMMIT}" in message
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "moved" / "hub"))
    Outcome("anchor", "run", "--base", "org/model").assert_ok()
    Outcome("materialize", "run", "of the anchor").assert_ok()
    assert_made(work / "of the anchor", trainer)


_CLI = "from vllm_delta_snapshot.cli.app import app; app()"

_TRAINER = """
import sys
from tests.support.runs import TinyTrainer
from trainer_hooks import DeltaPublisher
trainer = TinyTrainer()
with DeltaPublisher(trainer, sync_dir="run", base=sys.argv[1], asynchronous=False) as publisher:
    for number in (1, 2):
        trainer.step(number)
        publisher.publish()
"""
