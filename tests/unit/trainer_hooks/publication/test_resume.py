"""A trainer that restarts continues its run: from what was published, whatever it remembers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import snapshot_of, tiny_tensors, write_checkpoint
from tests.support.runs import (
    MIXED,
    TinyRun,
    TinyTrainer,
    assert_same_state,
    copy_of,
    edit_record,
    forge_difference,
    forge_old_value,
    make_mixed_run,
    make_run,
    replay,
)
from trainer_hooks import DeltaPublisher
from trainer_hooks.publication.resume import open_run, policy_of
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import (
    BaseMismatch,
    BrokenChain,
    CorruptFile,
    RunMismatch,
    UnsupportedFormat,
    VerifyError,
)
from vllm_delta_snapshot.format.choose import POLICIES, encodings_of
from vllm_delta_snapshot.format.encodings import ENCODINGS
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store.posix import PosixStore


@pytest.fixture(scope="module", params=["difference", "auto"])
def pristine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A run of differences, or of both kinds."""
    return make_run(tmp_path_factory.mktemp("run"), 3, encoding=request.param)


@pytest.fixture
def run(pristine: TinyRun, tmp_path: Path) -> TinyRun:
    return copy_of(pristine, tmp_path / "run")


def restarted(run: TinyRun, trainer: object, base: Path | None = None) -> DeltaPublisher:
    return DeltaPublisher(trainer, sync_dir=str(run.sync_dir), base=base or run.base, asynchronous=False)


def trainer_after(steps: int) -> TinyTrainer:
    trainer = TinyTrainer()
    for step in range(1, steps + 1):
        trainer.step(step)
    return trainer


def test_restarted_trainer_finds_the_newest_version(run: TinyRun):
    publisher = restarted(run, trainer_after(3))
    assert (publisher.run_id, publisher.version) == (run.publisher.run_id, 3)
    assert publisher.state_digest == run.publisher.state_digest


@pytest.mark.parametrize("steps", [0, 2, 3, 5], ids="checkpoint of step {}".format)
def test_restarted_trainer_publishes_the_next_version_exactly(run: TinyRun, tmp_path: Path, steps: int):
    trainer = trainer_after(steps)
    assert restarted(run, trainer).publish().version == 4
    found = replay(run.sync_dir, run.base, tmp_path)
    for state, expected in zip(found, [*run.history, trainer.state()], strict=True):
        assert_same_state(state, expected)


def test_restarted_trainer_with_the_published_weights_publishes_nothing_new(run: TinyRun):
    assert restarted(run, trainer_after(3)).publish().report.changed_elements == 0


def test_restart_changes_nothing_in_the_store(run: TinyRun):
    before = snapshot_of(run.sync_dir)
    restarted(run, trainer_after(3))
    assert snapshot_of(run.sync_dir) == before


def test_restart_from_a_moved_copy_of_the_base_is_the_same_run(run: TinyRun, tmp_path: Path):
    moved = write_checkpoint(tmp_path / "moved", tiny_tensors(), shards=3)
    assert restarted(run, trainer_after(3), moved).version == 3


def test_run_opened_has_the_published_weights_as_baseline(run: TinyRun):
    state = open_run(RunFolder(PosixStore(run.sync_dir)), Checkpoint(run.base))
    assert_same_state({spec.name: bits for spec, bits in state.baseline.items()}, run.history[3])


def test_new_run_records_base_and_tensors(pristine: TinyRun):
    info = pristine.folder.read_run()
    checkpoint = Checkpoint(pristine.base)
    assert (info.base.state_digest, dict(info.specs())) == (checkpoint.state_digest, checkpoint.specs)


@pytest.mark.parametrize("encoding", [None, *POLICIES])
def test_run_records_its_encodings_and_is_continued_in_them(tmp_path: Path, encoding: str | None):
    run = make_run(tmp_path, 2, encoding=encoding)
    allowed = encodings_of(encoding or "auto")
    assert run.folder.read_run().encodings == allowed
    assert set(encodings_of(policy_of(allowed))) == set(allowed)
    again = restarted(run, run.trainer)
    for number in (3, 4):
        run.trainer.step(number)
        again.publish()
    used = {entry.encoding for version in (1, 2, 3, 4) for entry in run.metadata(version).tensors}
    assert used <= set(allowed)
    assert_same_state(replay(run.sync_dir, run.base, tmp_path)[-1], run.trainer.state())


def test_run_started_raw_continues_raw(tmp_path: Path):
    run = make_run(tmp_path, 1, encoding="raw")
    run.trainer.step(2)
    restarted(run, run.trainer).publish()
    assert {entry.encoding for entry in run.metadata(2).tensors} == {"raw"}


MISMATCHES = [("raw", "auto"), ("raw", "difference"), ("raw", "packed"), ("absolute", "auto"), ("difference", "raw")]


@pytest.mark.parametrize(("started", "wanted"), MISMATCHES)
def test_encoding_that_the_run_does_not_allow_is_refused_and_touches_nothing(tmp_path: Path, started: str, wanted: str):
    run = make_run(tmp_path, 1, encoding=started)
    before = snapshot_of(run.sync_dir)
    with pytest.raises(RunMismatch, match="started with other encodings") as caught:
        DeltaPublisher(run.trainer, sync_dir=str(run.sync_dir), base=run.base, encoding=wanted, asynchronous=False)
    assert caught.value.expected == " ".join(encodings_of(started))
    assert wanted in str(caught.value.found)
    assert snapshot_of(run.sync_dir) == before


@pytest.mark.parametrize(("started", "wanted"), [("auto", "absolute"), ("auto", "raw"), ("absolute", "packed")])
def test_encoding_that_the_run_allows_may_be_forced_by_a_restart(tmp_path: Path, started: str, wanted: str):
    run = make_run(tmp_path, 1, encoding=started)
    again = DeltaPublisher(run.trainer, sync_dir=str(run.sync_dir), base=run.base, encoding=wanted, asynchronous=False)
    run.trainer.step(2)
    again.publish()
    assert {entry.encoding for entry in run.metadata(2).tensors} <= set(encodings_of(wanted))
    assert_same_state(replay(run.sync_dir, run.base, tmp_path)[-1], run.trainer.state())


def test_unknown_encoding_is_unsupported_and_makes_no_run(tmp_path: Path):
    with pytest.raises(UnsupportedFormat, match="unknown encoding") as caught:
        make_run(tmp_path, 0, encoding="zip")
    assert caught.value.found == "zip"
    assert not (tmp_path / "run" / "run.json").exists()


def test_run_of_encodings_that_no_policy_has_needs_one_of_them(run: TinyRun):
    path, some = run.sync_dir / "run.json", [name for name in ENCODINGS if name != "bitmap"]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"encodings": some}))
    with pytest.raises(UnsupportedFormat, match="does not choose by itself") as caught:
        restarted(run, trainer_after(3))
    assert caught.value.found == " ".join(some)
    again = DeltaPublisher(
        trainer_after(4), sync_dir=str(run.sync_dir), base=run.base, encoding="packed", asynchronous=False
    )
    assert again.publish().version == 4


@pytest.mark.parametrize("versions", range(1, len(MIXED) + 1))
def test_run_of_all_encodings_is_resumed_exactly(tmp_path: Path, versions: int):
    run = make_mixed_run(tmp_path, versions)
    state = open_run(run.folder, Checkpoint(run.base))
    assert state.version == versions
    assert_same_state({spec.name: bits for spec, bits in state.baseline.items()}, run.history[versions])
    assert restarted(run, run.trainer).publish().report.changed_elements == 0


def test_version_by_a_trainer_that_remembered_one_element_wrong_is_a_verify_error(run: TinyRun):
    forge_old_value(run, "difference")
    with pytest.raises(VerifyError, match="version 4 does not have the state it claims"):
        restarted(run, trainer_after(3))


def test_difference_that_is_not_the_one_of_its_digests_is_a_verify_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = make_run(tmp_path, 1)
    forge_difference(run, monkeypatch)
    with pytest.raises(VerifyError, match="version 2 does not have the state it claims"):
        restarted(run, run.trainer)


def test_two_runs_have_different_ids(tmp_path: Path, pristine: TinyRun):
    other = make_run(tmp_path, 0)
    assert other.publisher.run_id != pristine.publisher.run_id


def test_other_bits_in_the_base_are_a_run_mismatch_and_touch_nothing(run: TinyRun, tmp_path: Path):
    other = write_checkpoint(tmp_path / "other", tiny_tensors(seed=1))
    before = snapshot_of(run.sync_dir)
    with pytest.raises(RunMismatch, match="another base checkpoint") as caught:
        restarted(run, TinyTrainer(seed=1), other)
    assert caught.value.file == f"{run.sync_dir}/run.json"
    assert snapshot_of(run.sync_dir) == before


def test_other_tensors_in_the_base_are_a_run_mismatch(run: TinyRun, tmp_path: Path):
    tensors = {"w": torch.zeros(4)}
    with pytest.raises(RunMismatch):
        restarted(run, tensors, write_checkpoint(tmp_path / "other", tensors))


def test_gap_in_the_versions_is_a_broken_chain(run: TinyRun):
    (run.sync_dir / "versions" / "00000002.json").unlink()
    with pytest.raises(
        BrokenChain, match=r"nothing leads to version 3.*expected version 2 next.*versions/00000002\.json was lost"
    ):
        restarted(run, trainer_after(3))


def test_version_of_another_run_is_a_run_mismatch(run: TinyRun):
    edit_record(run, 2, run_id="ffffffff-ffff-ffff-ffff-ffffffffffff")
    with pytest.raises(RunMismatch):
        restarted(run, trainer_after(3))


def test_version_made_against_other_weights_is_a_base_mismatch(run: TinyRun):
    edit_record(run, 2, base_state_digest="0" * 16)
    with pytest.raises(BaseMismatch):
        restarted(run, trainer_after(3))


@pytest.mark.parametrize("version", [1, 2, 3])
def test_damaged_payload_is_corrupt_and_named(run: TinyRun, version: int):
    path = run.payload(version)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptFile) as caught:
        restarted(run, trainer_after(3))
    assert caught.value.file == str(path)


def test_base_that_changed_after_it_was_checked_is_a_verify_error(run: TinyRun, tmp_path: Path):
    path = write_checkpoint(tmp_path / "base", tiny_tensors()) / "model.safetensors"
    base = Checkpoint(tmp_path / "base")
    assert base.state_digest == run.folder.read_run().base.state_digest
    with path.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises(VerifyError, match="version 3 does not have the state it claims"):
        open_run(run.folder, base)


def test_run_of_a_newer_format_is_unsupported_and_kept(run: TinyRun):
    path = run.sync_dir / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 2}))
    before = snapshot_of(run.sync_dir)
    with pytest.raises(UnsupportedFormat):
        restarted(run, trainer_after(3))
    assert snapshot_of(run.sync_dir) == before


def test_damaged_run_is_corrupt_and_kept(run: TinyRun):
    (run.sync_dir / "run.json").write_bytes(b"{")
    before = snapshot_of(run.sync_dir)
    with pytest.raises(CorruptFile):
        restarted(run, trainer_after(3))
    assert snapshot_of(run.sync_dir) == before


def test_folder_of_strangers_files_becomes_a_run_and_keeps_them(pristine: TinyRun, tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("precious")
    restarted(replace(pristine, sync_dir=tmp_path / "run"), TinyTrainer())
    assert (tmp_path / "run" / "notes.txt").read_text() == "precious"
