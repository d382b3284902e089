"""Records that say what cannot be: never believed, named with what to do, and nothing is deleted because of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from tests.support.checkpoints import snapshot_of
from tests.support.cli import Outcome
from tests.support.hosts import Host
from tests.support.runs import TinyRun, edit_metadata, edit_record, make_run
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import CorruptFile, RunMismatch
from vllm_delta_snapshot.runs.acks import Acknowledger, read_acknowledgements, wait_applied
from vllm_delta_snapshot.runs.materialize import materialize
from vllm_delta_snapshot.upkeep.retention import RetentionPolicy, plan_pruning


@pytest.fixture
def run(tmp_path: Path) -> TinyRun:
    return make_run(tmp_path, 3)


def acknowledge(run: TinyRun, version: int) -> Path:
    run_id = run.folder.read_run().run_id
    Acknowledger(run.folder.store, run_id, "a").write(version, pause_s=0.0)
    return next((run.sync_dir / "acks" / "a").iterdir())


def of_another_sampler(run: TinyRun) -> None:
    path = acknowledge(run, 3)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sampler": "b"}))


def of_no_version(run: TinyRun) -> None:
    acknowledge(run, 4)


def of_another_run(run: TinyRun) -> None:
    path = acknowledge(run, 3)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"run_id": "f" * 8 + "-ffff-ffff-ffff-" + "f" * 12}))


LIES = [of_another_sampler, of_no_version, of_another_run]


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_acknowledgement_that_cannot_be_is_not_believed_and_named(run: TinyRun, lie: Callable[[TinyRun], None]) -> None:
    lie(run)
    before, run_id = snapshot_of(run.sync_dir), run.folder.read_run().run_id
    for ask in (
        lambda: read_acknowledgements(run.folder.store, run_id, newest=3),
        lambda: wait_applied(run.folder.store, run_id, 3, ["a"], timeout_s=0.0),
        lambda: plan_pruning(run.folder, RetentionPolicy(keep_versions=1)),
    ):
        with pytest.raises((CorruptFile, RunMismatch)) as caught:
            ask()
        assert caught.value.file == str(run.sync_dir / "acks" / "a")
        assert caught.value.expected != caught.value.found
        assert "Delete" in str(caught.value.hint)
    assert snapshot_of(run.sync_dir) == before


def test_later_version_than_waited_for_is_believed_where_it_exists(run: TinyRun) -> None:
    acknowledge(run, 3)
    said = wait_applied(run.folder.store, run.folder.read_run().run_id, 2, ["a"], timeout_s=0.0)
    assert said["a"].version == 3


def test_renamed_tensor_in_the_run_is_named(run: TinyRun) -> None:
    path = run.sync_dir / "run.json"
    fields = json.loads(path.read_text())
    name = fields["tensors"][0]["name"]
    fields["tensors"][0]["name"] = "renamed"
    path.write_text(json.dumps(fields))
    with pytest.raises(RunMismatch) as caught:
        DeltaPublisher(run.trainer, sync_dir=str(run.sync_dir), base=run.base, asynchronous=False)
    assert caught.value.file == str(path)
    assert f"{name} is not in run.json" in str(caught.value.found)
    assert "renamed is not in the checkpoint" in str(caught.value.found)
    assert "restore it" in str(caught.value.hint)


def with_other_values(run: TinyRun) -> str:
    """Have metadata say other digests than the values have."""
    record = json.loads((run.sync_dir / "versions" / "00000002.json").read_text())
    tensors = json.loads((run.sync_dir / record["folder"] / "metadata.json").read_text())["tensors"]
    tensors[0]["new_digest"] = f"{int(tensors[0]['new_digest'], 16) ^ 1:016x}"
    edit_metadata(run, 2, tensors=tensors)
    return record["folder"]


def with_garbage(run: TinyRun) -> str:
    """Have the payload be something else, which metadata has the checksums of."""
    record = json.loads((run.sync_dir / "versions" / "00000002.json").read_text())
    files = json.loads((run.sync_dir / record["folder"] / "metadata.json").read_text())["files"]
    data = b'\x08\0\0\0\0\0\0\0{"a":1}'
    (run.sync_dir / record["folder"] / files[0]["name"]).write_bytes(data)
    files[0] |= {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
    edit_metadata(run, 2, files=files)
    edit_record(run, 2, payload_bytes=sum(file["bytes"] for file in files))
    return f"{record['folder']}/{files[0]['name']}"


@pytest.mark.parametrize("damage", [with_other_values, with_garbage], ids=lambda damage: damage.__name__)
def test_what_does_not_decode_is_named_as_the_object_of_the_store(
    run: TinyRun, damage: Callable[[TinyRun], str], tmp_path: Path
) -> None:
    where = f"{run.sync_dir}/{damage(run)}"
    with pytest.raises(CorruptFile) as caught:
        materialize(run.folder, Checkpoint(run.base), 3, tmp_path / "out")
    assert caught.value.file == where
    assert "delta-snapshot verify" in str(caught.value.hint)
    [problem] = [p for p in Outcome("verify", run.sync_dir, "--json").json["problems"] if p["version"] == 2]
    assert problem["file"] == where
    host = Host(run, tmp_path / "stage")
    host.tell(0, 0)
    host.stager.step()
    assert host.state.problem is not None
    assert (host.state.problem.version, host.state.problem.error["file"]) == (2, where)
    host.close()
