"""``inspect`` and ``log``: data on stdout, the documented fields, names as they are."""

import json
import re
from pathlib import Path

import pytest
import torch

from tests.support.cli import ERROR_FIELDS, Outcome, documented_fields, fields_of
from tests.support.openrl import write_openrl_delta
from tests.support.runs import TinyRun, copy_of, edit_metadata, make_run
from vllm_delta_snapshot.checkpoint import Checkpoint

forms = pytest.mark.parametrize("form", [(), ("--json",)], ids=["text", "json"])


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    run = make_run(tmp_path_factory.mktemp("run"), 2)
    run.trainer.step(3)
    run.publisher.publish(step=30, metrics={"reward[mean]": 0.25, "a:smile:": 3})
    return run


def test_inspect_of_a_run_has_the_documented_fields(pristine: TinyRun):
    outcome = Outcome("inspect", pristine.sync_dir, "--json")
    outcome.assert_ok()
    found = outcome.json
    assert set(found) == documented_fields("`inspect` of a run") | {"ok"}
    assert (found["ok"], found["kind"], found["run_id"]) == (True, "run", pristine.publisher.run_id)
    assert (found["num_versions"], found["newest_version"], found["num_tensors"]) == (3, 3, len(pristine.specs))
    assert found["base_state_digest"] == Checkpoint(pristine.base).state_digest
    assert found["checkpoint_bytes"] == sum(spec.num_bytes for spec in pristine.specs.values())


def test_inspect_of_a_run_is_readable(pristine: TinyRun):
    outcome = Outcome("inspect", f"file://{pristine.sync_dir}")
    outcome.assert_ok()
    fields = dict(line.split(maxsplit=1) for line in outcome.stdout.splitlines())
    assert fields["run_id"] == pristine.publisher.run_id
    assert fields["newest_version"] == "3"


def test_inspect_of_a_version_has_the_documented_fields(pristine: TinyRun):
    outcome = Outcome("inspect", f"{pristine.sync_dir}@3", "--json")
    outcome.assert_ok()
    found = outcome.json
    assert fields_of(found) == documented_fields("`inspect` of a delta") | {"ok"}
    assert (found["kind"], found["version"], found["base_version"], found["step"]) == ("delta", 3, 2, 30)
    assert found["metrics"] == {"reward[mean]": 0.25, "a:smile:": 3}
    assert found["state_digest"] == pristine.publisher.state_digest
    assert found["folder"] == pristine.record(3).folder
    assert found["changed_elements"] == sum(tensor["changed"] for tensor in found["tensors"])


def test_inspect_of_a_version_is_readable(pristine: TinyRun):
    outcome = Outcome("inspect", f"{pristine.sync_dir}@2")
    outcome.assert_ok()
    lines = outcome.stdout.splitlines()
    assert "step               -" in lines
    assert any(line.startswith("model.layers.0.step") and "scalar" in line and "100.000 %" in line for line in lines)


@forms
def test_inspect_of_a_version_that_is_missing_names_the_next_command(form: tuple[str, ...], pristine: TinyRun):
    message = Outcome("inspect", f"{pristine.sync_dir}@9", *form).assert_failed(1, "BrokenChain")
    assert f"delta-snapshot log {pristine.sync_dir}" in message


def test_inspect_of_a_delta_folder_says_the_same_as_of_its_version(pristine: TinyRun):
    folder = pristine.payload(2).parent
    outcome = Outcome("inspect", folder, "--json")
    outcome.assert_ok()
    version = Outcome("inspect", f"{pristine.sync_dir}@2", "--json").json
    assert outcome.json == version | {"folder": str(folder)}


def test_inspect_of_an_openrl_folder_has_the_documented_fields(tmp_path: Path):
    changes = {
        "model.a": ([0, 3, 4], torch.ones(3, dtype=torch.bfloat16), [3, 4]),
        "model.b": ([1], torch.ones(1), [2]),
    }
    folder = write_openrl_delta(tmp_path / "delta", changes)
    outcome = Outcome("inspect", folder, "--json")
    outcome.assert_ok()
    found = outcome.json
    assert fields_of(found) < documented_fields("`inspect` of a delta") | {"ok"}
    assert (found["kind"], found["changed_elements"], found["total_elements"]) == ("OpenRL sparse_delta", 4, 14)
    assert found["tensors"][0] == {
        "name": "model.a", "dtype": "BF16", "shape": [3, 4], "changed": 3, "encoding": "raw"
    }  # fmt: skip
    text = Outcome("inspect", folder)
    text.assert_ok()
    assert "OpenRL sparse_delta" in text.stdout
    assert "model.b" in text.stdout


def test_inspect_of_a_damaged_folder_is_a_problem(tmp_path: Path):
    (tmp_path / "metadata.json").write_text("{")
    Outcome("inspect", tmp_path, "--json").assert_failed(1, "CorruptFile")


def test_inspect_shows_twenty_tensors_and_counts_the_others(tmp_path: Path):
    changes = {f"model.t{i}": ([0], torch.ones(1), [2]) for i in range(23)}
    outcome = Outcome("inspect", write_openrl_delta(tmp_path, changes))
    assert outcome.stdout.count("model.t") == 20
    assert outcome.stdout.endswith("and 3 more; --json lists all\n")


def test_log_has_the_documented_fields(pristine: TinyRun):
    outcome = Outcome("log", pristine.sync_dir, "--json")
    outcome.assert_ok()
    found = outcome.json
    assert fields_of(found) == documented_fields("`log`") | {"ok"}
    assert [version["version"] for version in found["versions"]] == [1, 2, 3]
    assert [version["step"] for version in found["versions"]] == [None, None, 30]
    assert found["versions"][2]["state_digest"] == pristine.publisher.state_digest
    assert found["base"] == str(pristine.base)


def test_log_is_a_line_a_version_and_takes_names_as_they_are(pristine: TinyRun):
    outcome = Outcome("log", pristine.sync_dir)
    outcome.assert_ok()
    title, sizes, density, _, _, *versions = outcome.stdout.splitlines()
    assert title.startswith(f"run {pristine.publisher.run_id}, base {pristine.base}, checkpoint ")
    assert sizes.startswith("3 versions up to 3, ")
    assert re.fullmatch(r"density [\u2581-\u2588]{3}  0 to [\d.]+ %", density)
    assert [line.split()[0] for line in versions] == ["1", "2", "3"]
    assert [" delta " in line for line in versions] == [True] * 3
    assert versions[2].rstrip().endswith("reward[mean]=0.25 a:smile:=3")


def test_log_cuts_nothing_where_there_is_no_terminal(tmp_path: Path):
    run = make_run(tmp_path, 0)
    run.trainer.step(1)
    run.publisher.publish(metrics={f"a_metric_with_a_long_name_{i:02}": i for i in range(60)})
    assert "a_metric_with_a_long_name_59=59" in Outcome("log", run.sync_dir).stdout


def test_log_of_a_run_without_versions_is_empty(tmp_path: Path):
    run = make_run(tmp_path, 0)
    outcome = Outcome("log", run.sync_dir, "--json")
    outcome.assert_ok()
    assert outcome.json["versions"] == []
    Outcome("log", run.sync_dir).assert_ok()


def test_log_shows_a_broken_chain_and_exits_with_1(pristine: TinyRun, tmp_path: Path):
    run = copy_of(pristine, tmp_path / "run")
    (run.sync_dir / "versions" / "00000001.json").write_text("{")
    (run.sync_dir / "versions" / "00000002.json").unlink()
    (run.sync_dir / "versions" / "00000006.json").write_bytes((run.sync_dir / "versions/00000003.json").read_bytes())
    outcome = Outcome("log", run.sync_dir)
    assert (outcome.code, outcome.stderr) == (1, "")
    lines = [" ".join(line.split()) for line in outcome.stdout.splitlines()]
    assert "1 DAMAGED" in lines
    assert "2 MISSING" in lines
    assert "4 to 5 MISSING" in lines
    assert "6 DAMAGED" in lines
    assert lines[lines.index("the chain is broken:") + 1].startswith("version 1: ")
    found = Outcome("log", run.sync_dir, "--json")
    assert (found.code, found.stderr, found.json["ok"]) == (1, "", False)
    assert fields_of(found.json) == documented_fields("`log`") | {"ok"} | ERROR_FIELDS
    assert found.json["gaps"] == [[2, 2], [4, 5]]
    assert [problem["version"] for problem in found.json["problems"]] == [1, 6]


def test_log_shows_no_control_characters_of_a_run(pristine: TinyRun, tmp_path: Path):
    run = copy_of(pristine, tmp_path / "run")
    edit_metadata(run, 3, metrics={"\x1b]0;hacked\x07\n": 1.0})
    text = Outcome("log", run.sync_dir).stdout
    assert "?]0;hacked??=1" in text
    assert "\x1b" not in text
    assert json.loads(Outcome("log", run.sync_dir, "--json").stdout)["versions"][2]["metrics"] == {
        "\x1b]0;hacked\x07\n": 1.0
    }
