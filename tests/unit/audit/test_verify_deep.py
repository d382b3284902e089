"""``verify --deep``: a run is proven from its base through every version, and every kind of damage is named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support import damage
from tests.support.checkpoints import snapshot_of, tiny_tensors, write_checkpoint
from tests.support.cli import Outcome, documented_fields, fields_of
from tests.support.runs import (
    TinyRun,
    copy_of,
    edit_record,
    forge_difference,
    forge_old_value,
    make_mixed_run,
    make_run,
)
from vllm_delta_snapshot.audit.verify_deep import verify_deep
from vllm_delta_snapshot.audit.verify_run import verify_run
from vllm_delta_snapshot.audit.working_copy import WorkingCopy
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import VerifyError
from vllm_delta_snapshot.upkeep.anchor import write_anchor
from vllm_delta_snapshot.upkeep.compact import compact
from vllm_delta_snapshot.upkeep.retention import RetentionPolicy, plan_pruning, prune


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A run in all encodings, with an anchor of version 4 and merged deltas from 0 to 3 and from 4 to 7."""
    run = make_mixed_run(tmp_path_factory.mktemp("run"))
    compact(run.folder, 0, 3)
    compact(run.folder, 4, 7)
    write_anchor(run.folder, Checkpoint(run.base), 4)
    return run


@pytest.fixture
def run(pristine: TinyRun, tmp_path: Path) -> TinyRun:
    return copy_of(pristine, tmp_path / "run")


def proven(run: TinyRun, *options: object) -> Outcome:
    return Outcome("verify", "--deep", run.sync_dir, *options)


def problem_of(outcome: Outcome) -> str:
    """Return the one problem, which names a file and a command that exists."""
    problem, *rest = [line for line in outcome.stdout.splitlines() if line.startswith("version ")]
    assert (outcome.code, rest) == (1, [])
    assert re.search(r": file /\S+", problem), problem
    verb = re.search(r"delta-snapshot (\w+) ", problem)
    assert verb, problem
    assert verb[1] in ("log", "prune", "compact")
    return problem


def test_good_run_is_proven_up_to_its_newest_version(pristine: TinyRun, tmp_path: Path):
    before = snapshot_of(pristine.sync_dir)
    outcome = proven(pristine, "--scratch", tmp_path, "--json")
    outcome.assert_ok()
    assert fields_of(outcome.json) == documented_fields("`verify`") - {"version"} | {"ok"}
    told = ("versions", "newest_version", "newest_proven", "is_deep", "anchors", "merged", "not_checked", "problems")
    assert [outcome.json[name] for name in told] == [8, 8, 8, True, 1, 2, [], []]
    assert snapshot_of(pristine.sync_dir) == before
    assert list(tmp_path.iterdir()) == []
    assert "the weights recomputed bit by bit up to version 8" in proven(pristine).stdout
    shallow = Outcome("verify", pristine.sync_dir, "--json").json
    assert shallow == outcome.json | {"is_deep": False, "newest_proven": None}


@pytest.mark.parametrize("encoding", ["raw", "difference"])
def test_old_value_that_the_trainer_remembered_wrong_is_found(tmp_path: Path, encoding: str):
    run = make_run(tmp_path, 2, encoding=encoding)
    name = forge_old_value(run, encoding)
    assert verify_run(run.folder).is_ok  # nothing of this is in the bytes of the delta itself
    problem = problem_of(proven(run))
    assert problem.startswith("version 3: version 3: the values before")
    assert f"tensor {name}, expected digest " in problem
    assert f"file {run.sync_dir}/deltas/00000003-" in problem


def test_difference_that_is_not_the_one_that_was_digested_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = make_run(tmp_path, 2, encoding="difference")
    name = forge_difference(run, monkeypatch)
    assert verify_run(run.folder).is_ok
    assert f"tensor {name}, expected a digest moved by " in problem_of(proven(run))


def damage_anchor(run: TinyRun) -> None:
    """Flip a bit of the anchor's weights."""
    record = json.loads((run.sync_dir / "anchors" / "00000004.json").read_text())
    (file,) = (run.sync_dir / record["folder"]).glob("*.safetensors")
    damage.flip_first_byte(file)


@pytest.mark.parametrize(
    ("harm", "versions"),
    [
        (damage.flip_payload, {1}),
        (damage.truncate_payload, {1}),
        (damage.remove_payload, {1}),
        (damage.flip_metadata, {1}),
        (damage.foreign_record, {1, 2}),
        (damage.unknown_format, {1, 2}),
        (damage.missing_version, {2}),
        (damage_anchor, {4}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_damage_is_named_and_the_proof_goes_on_from_the_next_anchor(
    run: TinyRun, harm: Callable, versions: set[int], tmp_path: Path
):
    harm(run if harm is damage_anchor else run.sync_dir)
    outcome = proven(run, "--json")
    assert (outcome.code, outcome.stderr) == (1, "")
    found = outcome.json
    assert {problem["version"] for problem in found["problems"]} == versions
    assert all(problem["file"] and problem["hint"] for problem in found["problems"])
    assert found["newest_proven"] == 8
    if harm is not damage_anchor:
        assert any("the weights of version" in text for text in found["not_checked"])
        assert any("merged delta from version 0 to 3" in text for text in found["not_checked"])


def test_anchor_with_another_bit_is_named_by_tensor_and_position(pristine: TinyRun, tmp_path: Path):
    copy = WorkingCopy(pristine.folder, tmp_path / "work")
    copy.start(Checkpoint(pristine.base), 0)
    tensors = tiny_tensors()
    tensors["model.embed.weight"].view(torch.int16).view(-1)[7] ^= 1
    other = Checkpoint(write_checkpoint(tmp_path / "other", tensors))
    with pytest.raises(VerifyError, match=r"anchors/x, tensor model\.embed\.weight, expected bits .* at position 7"):
        copy.compare(other, file="anchors/x", hint="Delete it.")
    copy.compare(Checkpoint(pristine.base), file="anchors/x", hint="")


def test_disk_that_does_not_give_back_what_was_written_is_found(pristine: TinyRun, tmp_path: Path):
    copy = WorkingCopy(pristine.folder, tmp_path)
    copy.start(Checkpoint(pristine.base), 0)
    copy.take(pristine.record(1))
    copy.check_bytes()
    (file,) = tmp_path.glob("*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    with file.open("r+b") as opened:  # in place, where the copy has it mapped
        opened.write(data)
    with pytest.raises(VerifyError, match="the local copy is not what was written to it"):
        copy.check_bytes()


def test_version_that_leads_elsewhere_than_it_says_is_found(run: TinyRun):
    # Both records and the metadata lie alike; only the bits tell.
    digest = "0123456789abcdef"
    edit_record(run, 8, state_digest=digest)
    outcome = proven(run, "--json")
    assert outcome.code == 1
    assert (outcome.json["newest_proven"], len(outcome.json["problems"])) == (7, 1)


def test_pruned_run_is_proven_by_what_is_left(run: TinyRun):
    prune(run.folder, plan_pruning(run.folder, RetentionPolicy(keep_versions=3)))
    found = proven(run, "--json").json
    assert (found["ok"], found["newest_proven"], found["pruned_up_to"]) == (True, 8, 5)
    # Version 4 by its anchor, 7 by the merged delta from there, 8 by its own.
    why = "nothing that is whole leads there from the base or an anchor"
    assert found["not_checked"] == [f"the weights of versions 1 to 3: {why}", f"the weights of versions 5 to 6: {why}"]


def test_without_the_base_the_proof_begins_at_the_oldest_anchor(run: TinyRun, tmp_path: Path):
    moved = run.base.rename(tmp_path / "elsewhere")
    try:
        found = proven(run, "--json").json
        assert (found["ok"], found["newest_proven"]) == (True, 8)
        assert found["not_checked"][-1].startswith("the weights of versions 1 to 3: ")
        assert proven(run, "--json", "--base", moved).json["not_checked"] == []
    finally:
        moved.rename(run.base)


def test_run_without_base_and_anchor_asks_for_the_base(tmp_path: Path):
    run = make_run(tmp_path, 1)
    run.base.rename(tmp_path / "moved")
    message = proven(run).assert_failed(2, "ObjectNotFound")
    assert f"delta-snapshot verify --deep {run.sync_dir} --base FOLDER" in message


def test_another_base_is_refused(pristine: TinyRun, tmp_path: Path):
    write_checkpoint(tmp_path / "other", tiny_tensors(seed=1))
    proven(pristine, "--base", tmp_path / "other").assert_failed(1, "BaseMismatch")


def test_scratch_that_is_not_there_is_a_problem(pristine: TinyRun, tmp_path: Path):
    assert "Make it" in proven(pristine, "--scratch", tmp_path / "none").assert_failed(1, "StageError")


@pytest.mark.parametrize("options", [("--base", "x"), ("--scratch", "x")])
def test_options_of_deep_need_it(pristine: TinyRun, options: tuple[str, str]):
    assert "go with --deep" in Outcome("verify", pristine.sync_dir, *options).usage


def test_run_without_versions_is_proven(tmp_path: Path):
    run = make_run(tmp_path, 0)
    found = verify_deep(run.folder, Checkpoint(run.base))
    assert (found.is_ok, found.newest_proven, found.versions) == (True, 0, 0)
