"""The command, what goes wrong with every verb, ``verify`` of a run, ``materialize``."""

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import damage
from tests.support.checkpoints import snapshot_of, tiny_tensors, write_checkpoint
from tests.support.cli import ERROR_FIELDS, Outcome, documented_fields
from tests.support.faults import FaultyStore
from tests.support.runs import TinyRun, assert_same_state, copy_of, make_run
from vllm_delta_snapshot import __version__
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.store.posix import PosixStore

COMMAND = Path(sys.executable).with_name("delta-snapshot")
VERBS = (
    *("inspect", "log", "verify", "sync", "follow", "repair", "doctor", "materialize", "export", "plan"),
    *("compact", "anchor", "prune", "plot", "diff"),
)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_run(tmp_path_factory.mktemp("run"), 3)


@pytest.fixture
def run(pristine: TinyRun, tmp_path: Path) -> TinyRun:
    return copy_of(pristine, tmp_path / "run")


def python(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", f"import sys; {code}", *map(str, args)]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


# --- the command itself


HEAVY = {"numpy", "pydantic", "rich", "torch", "vllm", "transformers", "boto3", "google", "matplotlib", "xxhash"}


@pytest.mark.parametrize("args", [("--help",), ("follow", "--help")], ids=" ".join)
def test_help_is_there_at_once(args: tuple[str, ...]):
    # Of the time on the processor, since others may have it meanwhile; the best of some, since they share its cache.
    best = float("inf")
    for _ in range(8):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        ended = subprocess.run([COMMAND, *args], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert ended.stderr == ""
        if best < 0.3:
            break
    assert best < 0.3


def test_help_names_all_verbs():
    outcome = Outcome("--help")
    outcome.assert_ok()
    assert [verb for verb in VERBS if verb not in outcome.stdout] == []
    assert "not vLLM's process snapshots" in " ".join(outcome.stdout.split())
    assert "..." not in outcome.stdout.partition("Commands:")[2]  # none is cut off


def test_help_imports_nothing_heavy():
    # One process for all verbs: what any of them imports stays.
    code = f"""
from vllm_delta_snapshot.cli import main
for verb in [None, *{VERBS!r}]:
    sys.argv = ["delta-snapshot", *([verb] if verb else []), "--help"]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code
print({HEAVY!r} & sys.modules.keys())
"""
    ended = python(code)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.endswith("\nset()\n")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_help_and_json(verb: str):
    outcome = Outcome(verb, "--help")
    outcome.assert_ok()
    assert "--json" in outcome.stdout


def test_version_is_printed():
    outcome = Outcome("--version")
    outcome.assert_ok()
    assert outcome.stdout == f"{__version__}\n"


def test_no_verb_shows_the_help_and_is_wrong_usage():
    outcome = Outcome()
    assert outcome.code == 2
    assert all(verb in outcome.stdout + outcome.stderr for verb in VERBS)


@pytest.mark.parametrize("library", ["typer", "rich"])
def test_missing_extra_says_how_to_install_it(library: str):
    ended = python(f"sys.modules[{library!r}] = None; from vllm_delta_snapshot.cli import main; main()", "log", "run")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"delta-snapshot needs {library}")
    assert "pip install 'vllm-delta-snapshot[cli]'" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_whole_command_on_a_run_needs_no_vllm(pristine: TinyRun):
    code = "import atexit; atexit.register(lambda: print({'vllm'} & sys.modules.keys()))"
    code += "; from vllm_delta_snapshot.cli import main; main()"
    ended = python(code, "verify", pristine.sync_dir)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("ok: 3 versions")
    assert ended.stdout.endswith("\nset()\n")


def test_whole_command_fails_without_a_traceback(tmp_path: Path):
    ended = subprocess.run([COMMAND, "log", tmp_path / "none"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == (
        f"no run here: file {tmp_path}/none/run.json. Check sync_dir; the trainer's DeltaPublisher creates run.json "
        "when it starts. [ObjectNotFound]\n"
    )


# --- what goes wrong with every verb that reads a run


READERS: list[Callable[[object], tuple[object, ...]]] = [
    lambda sync_dir: ("inspect", sync_dir),
    lambda sync_dir: ("inspect", f"{sync_dir}@1"),
    lambda sync_dir: ("log", sync_dir),
    lambda sync_dir: ("verify", sync_dir),
    lambda sync_dir: ("materialize", sync_dir, "/nowhere/out"),
    lambda sync_dir: ("export", sync_dir, "/nowhere/out"),
    lambda sync_dir: ("plot", sync_dir, "-o", "/nowhere/out"),
]
readers = pytest.mark.parametrize(
    "call", READERS, ids=["inspect", "inspect-version", "log", "verify", "materialize", "export", "plot"]
)
forms = pytest.mark.parametrize("form", [(), ("--json",)], ids=["text", "json"])


@readers
@forms
def test_missing_run_is_a_problem_with_a_hint(call: Callable, form: tuple[str, ...], tmp_path: Path):
    outcome = Outcome(*call(tmp_path / "none"), *form)
    assert "Check sync_dir" in outcome.assert_failed(1, "ObjectNotFound")
    assert bool(outcome.stdout) == bool(form)


@readers
@forms
def test_store_that_is_unreachable_exits_with_3(
    call: Callable, form: tuple[str, ...], pristine: TinyRun, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        "vllm_delta_snapshot.cli.output.open_store", lambda uri: FaultyStore(PosixStore(uri), 0, down=True)
    )
    outcome = Outcome(*call(pristine.sync_dir), *form)
    outcome.assert_failed(3, "StoreUnavailable")
    assert bool(outcome.stdout) == bool(form)


@readers
@forms
def test_store_of_another_kind_is_wrong_usage(call: Callable, form: tuple[str, ...]):
    outcome = Outcome(*call("ftp://host/run"), *form)
    assert "Mount the store as a folder" in outcome.assert_failed(2, "CompatibilityError")
    assert bool(outcome.stdout) == bool(form)


@pytest.mark.parametrize(
    "args", [("inspect",), ("log",), ("materialize", "run"), ("log", "run", "--none"), ("nothing",)]
)
def test_wrong_arguments_are_wrong_usage(args: tuple[str, ...]):
    assert "Usage: delta-snapshot" in Outcome(*args).usage


# --- verify


def test_verify_of_a_good_run_has_the_documented_fields(pristine: TinyRun):
    before = snapshot_of(pristine.sync_dir)
    outcome = Outcome("verify", pristine.sync_dir, "--json")
    outcome.assert_ok()
    assert set(outcome.json) == documented_fields("`verify`") - {"version"} | {"ok"}  # version is of its problems
    assert outcome.json | {"payload_bytes": 0, "changed_elements": 0} == {
        "ok": True,
        "run_id": pristine.publisher.run_id,
        "versions": 3,
        "newest_version": 3,
        "payload_bytes": 0,
        "changed_elements": 0,
        "problems": [],
        "leftovers": [],
        "pruned_up_to": 0,
        "anchors": 0,
        "merged": 0,
        "is_deep": False,
        "newest_proven": None,
        "not_checked": [],
    }
    assert snapshot_of(pristine.sync_dir) == before


@pytest.mark.parametrize(
    ("harm", "found"),
    [
        (damage.flip_payload, {(1, "CorruptFile")}),
        (damage.truncate_payload, {(1, "CorruptFile")}),
        (damage.remove_payload, {(1, "CorruptFile")}),
        (damage.flip_metadata, {(1, "CorruptFile")}),
        (damage.foreign_record, {(1, "RunMismatch"), (2, "BrokenChain")}),
        (damage.unknown_format, {(1, "UnsupportedFormat"), (2, "BrokenChain")}),
        (damage.out_of_order, {(1, "BaseMismatch"), (2, "BaseMismatch")}),
        (damage.missing_version, {(2, "BrokenChain")}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_verify_finds_damage_and_exits_with_1(run: TinyRun, harm: Callable[[Path], None], found: set[tuple[int, str]]):
    harm(run.sync_dir)
    outcome = Outcome("verify", run.sync_dir, "--json")
    assert (outcome.code, outcome.stderr) == (1, "")
    assert outcome.json["ok"] is False
    assert {(problem["version"], problem["kind"]) for problem in outcome.json["problems"]} == found
    assert all(set(problem) == ERROR_FIELDS | {"version"} for problem in outcome.json["problems"])
    text = Outcome("verify", run.sync_dir)
    assert text.code == 1
    *problems, verdict = text.stdout.splitlines()
    assert len(problems) == len(found)
    assert all(line.startswith("version ") for line in problems)
    assert verdict.startswith("NOT ok: ")


def test_verify_takes_leftovers_of_a_crash_for_harmless(run: TinyRun):
    leftover = run.sync_dir / "deltas" / "00000004-0badcafe"
    leftover.mkdir()
    outcome = Outcome("verify", run.sync_dir)
    assert outcome.code == 0
    assert outcome.stdout.startswith("ok: 3 versions")
    assert outcome.stderr.endswith("(harmless): deltas/00000004-0badcafe\n")
    assert Outcome("verify", run.sync_dir, "--json").json["leftovers"] == ["deltas/00000004-0badcafe"]


# --- materialize


@pytest.mark.parametrize(("suffix", "version"), [("", 3), ("@3", 3), ("@1", 1), ("@0", 0)])
def test_materialize_has_the_documented_fields_and_the_bits(
    pristine: TinyRun, tmp_path: Path, suffix: str, version: int
):
    outcome = Outcome("materialize", f"{pristine.sync_dir}{suffix}", tmp_path / "out", "--json")
    outcome.assert_ok()
    found = outcome.json
    assert set(found) == documented_fields("`materialize`") | {"ok"}
    assert found["anchor"] is None
    checkpoint = Checkpoint(tmp_path / "out")
    assert (found["ok"], found["version"], found["folder"]) == (True, version, str(tmp_path / "out"))
    assert found["state_digest"] == checkpoint.state_digest
    assert_same_state({name: checkpoint.bits(name) for name in checkpoint.specs}, pristine.history[version])


def test_materialize_says_where_it_is(pristine: TinyRun, tmp_path: Path):
    outcome = Outcome("materialize", pristine.sync_dir, tmp_path / "out")
    outcome.assert_ok()
    run_id, digest = pristine.publisher.run_id, pristine.publisher.state_digest
    assert outcome.stdout == f"{tmp_path}/out: version 3 of run {run_id}, digest {digest}\n"


@forms
def test_materialize_without_the_base_asks_for_it(form: tuple[str, ...], tmp_path: Path):
    run = make_run(tmp_path, 1)
    moved = run.base.rename(tmp_path / "moved")
    outcome = Outcome("materialize", run.sync_dir, tmp_path / "out", *form)
    message = outcome.assert_failed(2, "ObjectNotFound")
    assert bool(outcome.stdout) == bool(form)
    assert f"file {run.base}" in message
    assert f"delta-snapshot materialize {run.sync_dir} {tmp_path}/out --base FOLDER" in message
    Outcome("materialize", run.sync_dir, tmp_path / "out", "--base", moved, *form).assert_ok()


@forms
@pytest.mark.parametrize(
    ("args", "kind"),
    [
        (("{run}@9", "{tmp}/out"), "BrokenChain"),
        (("{run}", "{tmp}/out", "--base", "{tmp}/none"), "ObjectNotFound"),
        (("{run}", "{tmp}/out", "--base", "{tmp}/other"), "BaseMismatch"),
        (("{run}", "{tmp}"), "StageError"),
    ],
    ids=["version", "base", "other-base", "output"],
)
def test_materialize_that_fails_leaves_nothing(
    pristine: TinyRun, tmp_path: Path, args: tuple[str, ...], kind: str, form: tuple[str, ...]
):
    write_checkpoint(tmp_path / "other", tiny_tensors(seed=1))
    before = snapshot_of(tmp_path)
    outcome = Outcome("materialize", *(arg.format(run=pristine.sync_dir, tmp=tmp_path) for arg in args), *form)
    outcome.assert_failed(1, kind)
    assert bool(outcome.stdout) == bool(form)
    assert snapshot_of(tmp_path) == before
