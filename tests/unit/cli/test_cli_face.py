"""``plot`` and ``diff``: what they write and say, their documented fields and exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkpoints import tiny_tensors, write_checkpoint
from tests.support.cli import ERROR_FIELDS, Outcome, documented_fields, fields_of
from tests.support.faults import FaultyStore
from tests.support.runs import TinyRun, copy_of, make_run
from vllm_delta_snapshot.store.posix import PosixStore

PICTURES = ["density", "layers", "bytes", "times"]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    run = make_run(tmp_path_factory.mktemp("run"), 2)
    run.trainer.step(3)
    run.publisher.publish(step=30, metrics={"reward": 0.25, "kl": 1})
    return run


@pytest.fixture
def without_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip turning figures into pixels, which takes longer than all else; tests of pictures do it."""
    monkeypatch.setattr("vllm_delta_snapshot.report.write.picture_bytes", lambda figure, form: form.encode())


# --- plot


@pytest.mark.usefixtures("without_rendering")
def test_plot_writes_what_it_says(pristine: TinyRun, tmp_path: Path):
    out, page = tmp_path / "out", tmp_path / "page.html"
    outcome = Outcome("plot", pristine.sync_dir, "-o", out, "--html", page, "--metric", "kl", "--touched", "--json")
    outcome.assert_ok()
    found = outcome.json
    assert fields_of(found) == documented_fields("`plot`") - {"version"} | {"ok"}
    assert {Path(file).name for file in found["files"]} == {
        "versions.csv", "layers.csv", "touched.csv", "page.html",
        *(f"{name}.{form}" for name in [*PICTURES, "touched"] for form in ("png", "svg")),
    }  # fmt: skip
    assert all(Path(file).is_file() for file in found["files"])
    assert (found["num_versions"], found["newest_version"], found["shown_metrics"]) == (3, 3, ["kl"])
    assert 0 < found["touched_elements"] < found["total_elements"]


@pytest.mark.usefixtures("without_rendering")
def test_plot_prints_a_line_a_file(pristine: TinyRun, tmp_path: Path):
    outcome = Outcome("plot", pristine.sync_dir, "-o", tmp_path)
    outcome.assert_ok()
    assert sorted(map(Path, outcome.stdout.splitlines())) == sorted(tmp_path.iterdir())
    assert not (tmp_path / "touched.csv").exists()


@pytest.mark.usefixtures("without_rendering")
def test_plot_of_a_broken_chain_draws_what_there_is_and_exits_with_1(pristine: TinyRun, tmp_path: Path):
    run = copy_of(pristine, tmp_path / "run")
    (run.sync_dir / "versions" / "00000002.json").unlink()
    outcome = Outcome("plot", run.sync_dir, "--html", tmp_path / "page.html", "--touched", "--json")
    assert outcome.code == 1
    assert outcome.stderr.startswith("version 3: nothing leads to version 3")
    assert fields_of(outcome.json) == documented_fields("`plot`") | {"ok"} | ERROR_FIELDS
    assert (outcome.json["ok"], outcome.json["num_versions"]) == (False, 2)
    assert "The chain is broken" in (tmp_path / "page.html").read_text()


def test_plot_of_a_run_without_versions_says_so(tmp_path: Path):
    run = make_run(tmp_path, 0)
    Outcome("plot", run.sync_dir, "-o", tmp_path / "out", "--html", tmp_path / "page.html", "--touched").assert_ok()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["layers.csv", "touched.csv", "versions.csv"]
    assert "No version was published yet" in (tmp_path / "page.html").read_text()


def test_plot_needs_a_place(pristine: TinyRun):
    assert "say where to: -o FOLDER, --html FILE, or both" in Outcome("plot", pristine.sync_dir).usage


def test_plot_of_an_unknown_metric_names_those_there_are(pristine: TinyRun, tmp_path: Path):
    outcome = Outcome("plot", pristine.sync_dir, "-o", tmp_path / "out", "--metric", "loss")
    assert "expected kl, reward, found loss" in outcome.assert_failed(1, "ObjectNotFound")
    assert not (tmp_path / "out").exists()


def test_plot_without_matplotlib_says_how_to_get_it(pristine: TinyRun, tmp_path: Path):
    code = "import sys; sys.modules['matplotlib'] = None; from vllm_delta_snapshot.cli import main; main()"
    argv = [sys.executable, "-c", code, "plot", str(pristine.sync_dir), "-o", str(tmp_path)]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.endswith("pip install 'vllm-delta-snapshot[plot]' [CompatibilityError]\n")


# --- diff


def test_diff_of_two_versions_has_the_documented_fields(pristine: TinyRun):
    outcome = Outcome("diff", f"{pristine.sync_dir}@1", pristine.sync_dir, "--json")
    assert (outcome.code, outcome.stderr) == (1, "")
    found = outcome.json
    assert fields_of(found) == documented_fields("`diff`") | {"ok"}
    assert (found["ok"], found["same"], found["exact"]) == (True, False, True)
    assert (found["a"], found["b"]) == (f"{pristine.sync_dir}@1", f"{pristine.sync_dir}@3")
    assert found["differing_tensors"] == len(found["tensors"])
    assert found["changed_elements"] == sum(tensor["changed"] for tensor in found["tensors"])


def test_diff_is_readable(pristine: TinyRun):
    outcome = Outcome("diff", pristine.sync_dir, f"{pristine.sync_dir}@1")
    assert (outcome.code, outcome.stderr) == (1, "")
    title, _, head, *rows = outcome.stdout.splitlines()
    assert " tensors differ, in " in title
    assert head.split() == ["tensor", "what", "changed", "density", "max", "ulp"]
    assert [row.split()[0] for row in rows] == sorted(row.split()[0] for row in rows)


def test_diff_of_a_version_with_what_materialize_made_of_it_is_nothing(pristine: TinyRun, tmp_path: Path):
    Outcome("materialize", f"{pristine.sync_dir}@2", tmp_path / "made").assert_ok()
    outcome = Outcome("diff", f"{pristine.sync_dir}@2", tmp_path / "made")
    outcome.assert_ok()
    assert outcome.stdout.startswith("same: 7 tensors, ")
    outcome = Outcome("diff", tmp_path / "made", f"{pristine.sync_dir}@3", "--json")
    expected = Outcome("diff", f"{pristine.sync_dir}@2", f"{pristine.sync_dir}@3", "--json").json
    assert outcome.code == 1
    assert outcome.json["changed_elements"] == expected["changed_elements"]
    assert Outcome("diff", pristine.base, f"{pristine.sync_dir}@0").code == 0


def test_diff_of_checkpoints_names_what_is_on_one_side_only(tmp_path: Path):
    tensors = tiny_tensors()
    a = write_checkpoint(tmp_path / "a", tensors)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].double()
    del tensors["model.layers.0.step"]
    b = write_checkpoint(tmp_path / "b", tensors)
    outcome = Outcome("diff", a, b)
    assert outcome.code == 1
    assert "only in A" in outcome.stdout
    assert "F32[8] in A, F64[8] in B" in outcome.stdout
    assert "only in B" in Outcome("diff", b, a).stdout


def test_diff_without_the_base_says_what_it_does_not_know(tmp_path: Path):
    run = make_run(tmp_path, 2, encoding="raw")
    run.base.rename(tmp_path / "elsewhere")
    outcome = Outcome("diff", f"{run.sync_dir}@1", f"{run.sync_dir}@2")
    assert outcome.code == 1
    assert "in at most " in outcome.stdout
    assert "--base FOLDER" in outcome.stdout
    outcome = Outcome("diff", f"{run.sync_dir}@1", f"{run.sync_dir}@2", "--base", tmp_path / "elsewhere", "--json")
    assert outcome.json["exact"] is True


@pytest.mark.parametrize(
    ("a", "b", "kind"),
    [
        ("{run}@1", "{run}@9", "BrokenChain"),
        ("{run}@1", "{none}", "ObjectNotFound"),
        ("{none}", "{base}", "ObjectNotFound"),
        ("{empty}", "{base}", "ObjectNotFound"),
        ("ftp://host/run", "{base}", "CompatibilityError"),
    ],
)
def test_diff_of_what_cannot_be_compared_exits_with_2(pristine: TinyRun, tmp_path: Path, a: str, b: str, kind: str):
    (tmp_path / "empty").mkdir()
    names = {"run": pristine.sync_dir, "none": tmp_path / "none", "base": pristine.base, "empty": tmp_path / "empty"}
    Outcome("diff", a.format(**names), b.format(**names), "--json").assert_failed(2, kind)


def test_diff_of_nothing_says_what_it_takes(tmp_path: Path):
    message = Outcome("diff", tmp_path / "none", tmp_path).assert_failed(2, "ObjectNotFound")
    assert message.startswith(f"no such folder: file {tmp_path}/none. Give a version (SYNC_DIR@N), a run")


def test_help_of_plot_names_what_it_needs():
    assert "Needs matplotlib." in " ".join(Outcome("plot", "--help").stdout.split())


def test_diff_with_an_unreachable_store_exits_with_3(pristine: TinyRun, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "vllm_delta_snapshot.cli.output.open_store", lambda uri: FaultyStore(PosixStore(uri), 0, down=True)
    )
    Outcome("diff", f"{pristine.sync_dir}@1", f"{pristine.sync_dir}@2").assert_failed(3, "StoreUnavailable")
