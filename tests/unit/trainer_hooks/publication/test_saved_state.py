"""What a trainer's checkpoint remembers of its run is compared with the store; nothing goes on past a mismatch."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import snapshot_of
from tests.support.runs import TinyRun, assert_same_state, copy_of, edit_record, make_run, replay
from trainer_hooks import DeltaPublisher
from trainer_hooks.publication.saved_state import SavedState
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import BrokenChain, RunMismatch, VersionConflict
from vllm_delta_snapshot.upkeep.anchor import write_anchor


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_run(tmp_path_factory.mktemp("run"), 3)


@pytest.fixture
def run(pristine: TinyRun, tmp_path: Path) -> TinyRun:
    return copy_of(pristine, tmp_path / "run")


def resumed(run: TinyRun, state: object) -> DeltaPublisher:
    return DeltaPublisher(run.trainer, sync_dir=str(run.sync_dir), base=run.base, resume_from=state, asynchronous=False)


def check_refused(run: TinyRun, state: dict[str, object], kind: type[Exception], message: str) -> Exception:
    """Check that neither way of resuming goes on, and that the store is left as it was."""
    before = snapshot_of(run.sync_dir)
    with pytest.raises(kind, match=message) as caught:
        resumed(run, state)
    assert caught.value.hint
    if (run.sync_dir / "run.json").exists():
        publisher = DeltaPublisher(run.trainer, sync_dir=str(run.sync_dir), base=run.base)
        with pytest.raises(kind, match=message):
            publisher.load_state_dict(state)
    assert snapshot_of(run.sync_dir) == before
    return caught.value


def test_state_names_run_version_digest_and_place(pristine: TinyRun):
    assert pristine.publisher.state_dict() == {
        "run_id": pristine.folder.read_run().run_id,
        "version": 3,
        "state_digest": pristine.record(3).state_digest,
        "sync_dir": str(pristine.sync_dir),
    }


def test_state_passes_through_torch_save_and_json(pristine: TinyRun, tmp_path: Path):
    state = pristine.publisher.state_dict()
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state
    assert json.loads(json.dumps(state)) == state


@pytest.mark.parametrize("versions", [0, 2])
def test_trainer_resumes_the_run_that_its_checkpoint_remembers(tmp_path: Path, versions: int):
    run = make_run(tmp_path, versions)
    state = run.publisher.state_dict()
    run.trainer.step(9)
    publisher = resumed(run, state)
    publisher.load_state_dict(state)
    assert publisher.publish().version == versions + 1
    assert_same_state(replay(run.sync_dir, run.base, tmp_path)[-1], run.trainer.state())


def test_trainer_of_an_older_checkpoint_goes_on_after_the_newest_version(run: TinyRun, tmp_path: Path):
    state = run.publisher.state_dict() | {"version": 1, "state_digest": run.record(1).state_digest}
    publisher = resumed(run, state)
    assert publisher.publish().version == 4


def test_run_that_was_moved_is_resumed(run: TinyRun):
    assert resumed(run, run.publisher.state_dict() | {"sync_dir": "/elsewhere"}).version == 3


def test_version_that_is_no_longer_kept_is_not_missed(run: TinyRun):
    write_anchor(run.folder, Checkpoint(run.base), 3)
    (run.sync_dir / "versions" / "00000002.json").unlink()
    state = run.publisher.state_dict() | {"version": 2}
    SavedState.of(state).check(run.folder)


def test_another_run_in_the_folder_is_refused(run: TinyRun):
    state = run.publisher.state_dict() | {"run_id": "0" * 32, "sync_dir": "/its/own"}
    error = check_refused(run, state, RunMismatch, "belongs to another run")
    assert "/its/own" in str(error.expected)


def test_no_run_in_the_folder_is_refused_and_none_is_made(run: TinyRun):
    state = run.publisher.state_dict()
    shutil.rmtree(run.sync_dir)
    run.sync_dir.mkdir()
    error = check_refused(run, state, RunMismatch, "belongs to another run")
    assert error.found == "no run"


def test_run_that_has_gone_back_is_refused(run: TinyRun):
    (run.sync_dir / "versions" / "00000003.json").unlink()
    error = check_refused(run, run.publisher.state_dict(), BrokenChain, "has gone back")
    assert (error.expected, error.found) == ("version 3 or newer", "version 2")


@pytest.mark.parametrize("version", [0, 3])
def test_run_that_went_another_way_is_refused(run: TinyRun, version: int):
    state = run.publisher.state_dict() | {"version": version, "state_digest": "0" * 16}
    error = check_refused(run, state, VersionConflict, f"version {version} is not the one")
    assert error.file.startswith(str(run.sync_dir))


WRONG = {
    "empty": {},
    "another object's": {"param_groups": []},
    "of wrong types": {"run_id": "a", "version": "3", "state_digest": "0", "sync_dir": "/x"},
    "with a negative version": {"run_id": "a", "version": -1, "state_digest": "0", "sync_dir": "/x"},
}


@pytest.mark.parametrize("state", WRONG.values(), ids=WRONG)
def test_what_is_no_state_is_refused(run: TinyRun, state: dict[str, object]):
    check_refused(run, state, RunMismatch, "not the state of a publisher")


def test_more_than_the_state_is_no_harm(run: TinyRun):
    assert resumed(run, run.publisher.state_dict() | {"added": 1}).version == 3


def test_digest_of_a_record_that_was_edited_is_refused(run: TinyRun):
    state = run.publisher.state_dict()
    edit_record(run, 3, state_digest="f" * 16)
    with pytest.raises(VersionConflict):
        resumed(run, state)
