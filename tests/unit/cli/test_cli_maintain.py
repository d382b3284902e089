"""``delta-snapshot compact``, ``anchor``, ``prune``, and what the other verbs say of a run that they were used on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli import Outcome, documented_fields, fields_of
from tests.support.runs import TinyRun, copy_of, make_run
from vllm_delta_snapshot.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_run(tmp_path_factory.mktemp("run"), 6)


@pytest.fixture
def run(pristine: TinyRun, tmp_path: Path) -> TinyRun:
    return copy_of(pristine, tmp_path / "run")


@pytest.mark.parametrize(("verb", "args"), [("compact", []), ("anchor", []), ("prune", []), ("prune", ["--yes"])])
def test_verb_has_the_documented_fields(run: TinyRun, verb: str, args: list[str]) -> None:
    outcome = Outcome(verb, run.sync_dir, *args, "--json")
    outcome.assert_ok()
    assert set(outcome.json) == documented_fields(f"`{verb}`") | {"ok"}


def test_run_is_shortened_pruned_and_still_told_in_full(run: TinyRun, tmp_path: Path) -> None:
    first = Outcome("compact", run.sync_dir, "--to", "4")
    assert first.stdout.startswith("merged/00000000-00000004-")
    assert "versions 0 to 4 in one delta" in first.stdout
    assert "there already" in Outcome("compact", run.sync_dir, "--to", "4").stdout
    assert "version 4" in Outcome("anchor", f"{run.sync_dir}@4").stdout
    assert "there already" in Outcome("anchor", f"{run.sync_dir}@4").stdout
    assert "versions 4 to 6" in Outcome("compact", run.sync_dir).stdout

    shown = Outcome("prune", run.sync_dir, "--keep-versions", "2")
    assert (shown.code, "would delete the deltas of versions 1 to 4; newest is 6" in shown.stdout) == (0, True)
    assert "--yes" in shown.stderr
    assert run.folder.pruned() == 0
    done = Outcome("prune", run.sync_dir, "--keep-versions", "2", "--yes")
    assert (done.code, done.stderr) == (0, "")
    assert "deleted the deltas of versions 1 to 4" in done.stdout
    assert "nothing to delete" in Outcome("prune", run.sync_dir, "--keep-versions", "2").stdout

    found = Outcome("log", run.sync_dir, "--json").json
    assert fields_of(found) == documented_fields("`log`") | {"ok"}
    assert (found["anchors"], found["merged"], found["pruned_up_to"]) == ([4], [[0, 4], [4, 6]], 4)
    assert [version["is_pruned"] for version in found["versions"]] == [True] * 4 + [False] * 2
    lines = Outcome("log", run.sync_dir).stdout.splitlines()
    assert lines[1] == "merged deltas: 0 to 4, 4 to 6"
    assert [line.split()[-1] for line in lines[-6:]] == ["record", "record", "record", "anchor", "delta", "delta"]
    assert Outcome("inspect", run.sync_dir, "--json").json["pruned_up_to"] == 4
    verified = Outcome("verify", run.sync_dir)
    assert (verified.code, "1 anchors, 2 merged deltas, deltas up to version 4 pruned" in verified.stdout) == (0, True)

    made = Outcome("materialize", run.sync_dir, tmp_path / "made", "--json").json
    assert Checkpoint(tmp_path / "made").state_digest == made["state_digest"] == run.record(6).state_digest


def test_what_holds_pruning_back_is_said(run: TinyRun) -> None:
    outcome = Outcome("prune", run.sync_dir, "--keep-versions", "1")
    outcome.assert_ok()
    assert "nothing to delete" in outcome.stdout
    assert "kept more than asked: from version 0 on the deltas are the only way" in outcome.stdout


def test_merging_one_version_is_refused(run: TinyRun) -> None:
    message = Outcome("compact", run.sync_dir, "--from", "3", "--to", "4").assert_failed(1, "OutOfOrder")
    assert "nothing to merge" in message


def test_anchor_without_the_base_asks_for_it(run: TinyRun, tmp_path: Path) -> None:
    run = make_run(tmp_path / "gone", 1)
    moved = run.base.rename(tmp_path / "moved")
    message = Outcome("anchor", run.sync_dir).assert_failed(2, "ObjectNotFound")
    assert f"delta-snapshot anchor {run.sync_dir} --base FOLDER" in message
    Outcome("anchor", run.sync_dir, "--base", moved).assert_ok()
    Outcome("materialize", run.sync_dir, tmp_path / "made").assert_ok()  # from the anchor
