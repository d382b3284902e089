"""``doctor``: what is in the way is found, and each finding says what to do. vLLM is a stand-in but for one test."""

import importlib.metadata
import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.checkpoints import snapshot_of
from tests.support.cli import Outcome, documented_fields, fields_of
from tests.support.faults import FaultyStore
from tests.support.runs import TinyRun, make_run
from vllm_delta_snapshot import __version__
from vllm_delta_snapshot.cli import main
from vllm_delta_snapshot.engine.ways import Choice
from vllm_delta_snapshot.errors import ExclusiveCreateUnsupported
from vllm_delta_snapshot.store.posix import PosixStore

COMMAND = Path(sys.executable).with_name("delta-snapshot")
PATCH_LOADER = "vllm.model_executor.model_loader.checkpoint_weight_patch"
RUN_CHECKS = ["run", "exclusive create", "clock", "file system", "room for the run"]
CHECKS = ["vllm-delta-snapshot", "vllm", "plugin", "VLLM_SERVER_DEV_MODE", "stage folder"]


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """A vLLM that is installed, of a tested version, and an environment that is as it should be."""
    for name in ("vllm", PATCH_LOADER):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["vllm"].__version__ = "0.32.0"  # type: ignore[attr-defined]
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.delenv("VLLM_SERVER_DEV_MODE", raising=False)
    monkeypatch.setenv("DELTA_SNAPSHOT_STAGE_DIR", str(tmp_path / "stage"))
    return sys.modules["vllm"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_run(tmp_path_factory.mktemp("run"), 2)


def checks_of(outcome: Outcome, *, code: int = 1) -> dict[str, dict[str, Any]]:
    """Return the checks by name, in order, after a look at what holds of every outcome."""
    found = outcome.json
    assert outcome.stderr == ""
    assert outcome.code == (0 if found["ok"] else code)
    assert found["ok"] == all(check["ok"] for check in found["checks"])
    assert all(set(check) == {"name", "ok", "detail", "hint"} for check in found["checks"])
    return {check["name"]: check for check in found["checks"]}


def failed(checks: dict[str, dict[str, Any]]) -> list[str]:
    return [name for name, check in checks.items() if not check["ok"]]


def test_good_set_up_has_the_documented_fields(tmp_path: Path):
    outcome = Outcome("doctor", "--json")
    checks = checks_of(outcome)
    assert list(checks) == CHECKS
    assert failed(checks) == []
    assert fields_of(outcome.json) | {"way", "reason"} == documented_fields("`doctor`") | {"ok"}
    assert outcome.json["apply"] is None
    assert (checks["vllm-delta-snapshot"]["detail"], checks["vllm"]["detail"]) == (__version__, "0.32.0")
    assert "vllm_delta_snapshot.plugin:register" in checks["plugin"]["detail"]
    assert checks["stage folder"]["detail"].startswith(f"{tmp_path / 'stage'}, ")
    assert not (tmp_path / "stage").exists()


def test_good_set_up_is_readable():
    outcome = Outcome("doctor")
    outcome.assert_ok()
    named = [line for line in outcome.stdout.splitlines() if not line.startswith("    ")]
    assert [line.partition(": ")[0] for line in named] == [f"ok  {name}" for name in CHECKS]


def test_missing_vllm_is_in_the_way(monkeypatch: pytest.MonkeyPatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else find_spec(name, *rest)
    )
    checks = checks_of(Outcome("doctor", "--json"))
    assert failed(checks) == ["vllm"]
    assert "pip install vllm" in checks["vllm"]["hint"]
    text = Outcome("doctor")
    assert (text.code, text.stderr) == (1, "")
    assert "NO  vllm: not installed here\n    pip install vllm" in text.stdout


def test_vllm_that_is_too_old_is_in_the_way(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch):
    vllm.__version__ = "0.20.0"  # type: ignore[attr-defined]
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == PATCH_LOADER else find_spec(name, *rest)
    )
    checks = checks_of(Outcome("doctor", "--json"))
    assert failed(checks) == ["vllm"]
    assert "found vLLM 0.20.0. Upgrade vLLM." in checks["vllm"]["detail"]


@pytest.mark.parametrize(
    ("allowed", "fixed"),
    [
        ("other", "other,delta_snapshot"),
        ("a,b", "a,b,delta_snapshot"),
        ("", "delta_snapshot"),
        ("a, delta_snapshot", "a,delta_snapshot"),
        (" delta_snapshot", "delta_snapshot"),
        ("delta-snapshot", "delta_snapshot"),
        ("a;'Delta_Snapshot'", "a,delta_snapshot"),
        ("vllm-delta-snapshot,b", "b,delta_snapshot"),
    ],
)
def test_vllm_plugins_that_leave_the_plugin_out_are_in_the_way(
    monkeypatch: pytest.MonkeyPatch, allowed: str, fixed: str
):
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    checks = checks_of(Outcome("doctor", "--json"))
    assert failed(checks) == ["plugin"]
    assert checks["plugin"]["detail"] == f"VLLM_PLUGINS={allowed!r} leaves it out"
    assert f'VLLM_PLUGINS="{fixed}" ' in checks["plugin"]["hint"]
    monkeypatch.setenv("VLLM_PLUGINS", fixed)
    assert failed(checks_of(Outcome("doctor", "--json"))) == []


@pytest.mark.parametrize(
    ("owners", "detail", "hint"),
    [
        ([], "vLLM would not find it", "Install vllm-delta-snapshot in this environment."),
        (["ours:register", "theirs:register"], "ours:register, theirs:register", "Uninstall one of them."),
    ],
)
def test_plugin_of_no_or_two_packages_is_in_the_way(
    monkeypatch: pytest.MonkeyPatch, owners: list[str], detail: str, hint: str
):
    points = [importlib.metadata.EntryPoint("delta_snapshot", owner, "vllm.general_plugins") for owner in owners]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: points)
    checks = checks_of(Outcome("doctor", "--json"))
    assert failed(checks) == ["plugin"]
    assert (checks["plugin"]["detail"], checks["plugin"]["hint"]) == (detail, hint)


def test_dev_mode_that_is_not_set_is_a_hint_and_not_in_the_way(monkeypatch: pytest.MonkeyPatch):
    check = checks_of(Outcome("doctor", "--json"))["VLLM_SERVER_DEV_MODE"]
    assert check["ok"]
    assert "VLLM_SERVER_DEV_MODE=1" in check["hint"]
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    check = checks_of(Outcome("doctor", "--json"))["VLLM_SERVER_DEV_MODE"]
    assert (check["detail"], check["hint"]) == ("1", "")


@pytest.mark.parametrize("place", ["below-a-file", "a-file", "of-the-kernel", "read-only"])
def test_stage_folder_that_cannot_be_written_is_in_the_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str):
    (tmp_path / "file").write_text("")
    (tmp_path / "closed").mkdir(mode=0o500)
    if place == "read-only" and os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    root = {
        "below-a-file": tmp_path / "file" / "stage",
        "a-file": tmp_path / "file",
        "of-the-kernel": Path("/proc/stage"),
        "read-only": tmp_path / "closed" / "stage",
    }[place]
    monkeypatch.setenv("DELTA_SNAPSHOT_STAGE_DIR", str(root))
    checks = checks_of(Outcome("doctor", "--json"))
    assert failed(checks) == ["stage folder"]
    assert checks["stage folder"]["detail"].startswith(f"{root} cannot be written")
    assert "DELTA_SNAPSHOT_STAGE_DIR" in checks["stage folder"]["hint"]


def test_good_run_adds_checks_and_is_not_touched(run: TinyRun):
    before = snapshot_of(run.sync_dir)
    checks = checks_of(Outcome("doctor", "--sync-dir", run.sync_dir, "--json"))
    assert list(checks) == [*CHECKS, *RUN_CHECKS]
    assert failed(checks) == []
    assert checks["run"]["detail"] == f"{run.publisher.run_id}, newest version 2"
    assert snapshot_of(run.sync_dir) == before


@pytest.mark.parametrize(
    ("sync_dir", "said"), [("{tmp}/none", "Check sync_dir"), ("ftp://host/run", "Mount the store as a folder")]
)
def test_run_that_is_not_there_is_in_the_way(tmp_path: Path, sync_dir: str, said: str):
    checks = checks_of(Outcome("doctor", "--sync-dir", sync_dir.format(tmp=tmp_path), "--json"))
    assert list(checks) == [*CHECKS, "run"]
    assert failed(checks) == ["run"]
    assert said in checks["run"]["detail"]
    assert list(tmp_path.iterdir()) == []


def test_store_that_is_unreachable_is_in_the_way(run: TinyRun, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "vllm_delta_snapshot.cli.doctor.storage.open_store", lambda uri: FaultyStore(PosixStore(uri), 0, down=True)
    )
    checks = checks_of(Outcome("doctor", "--sync-dir", run.sync_dir, "--json"), code=3)
    assert failed(checks) == ["run"]
    assert "[StoreUnavailable]" in checks["run"]["detail"]


def test_store_without_exclusive_create_is_the_trainers_concern(run: TinyRun, monkeypatch: pytest.MonkeyPatch):
    def refuse(_: PosixStore) -> None:
        raise ExclusiveCreateUnsupported("no hard links")

    monkeypatch.setattr(PosixStore, "check_exclusive_create", refuse)
    check = checks_of(Outcome("doctor", "--sync-dir", run.sync_dir, "--json"))["exclusive create"]
    assert check["ok"]
    assert "no hard links" in check["detail"]
    assert check["hint"] == "Only the trainer needs it."


def choices(monkeypatch: pytest.MonkeyPatch, **ways: str) -> list[tuple[str, dict[str, Any]]]:
    asked: list[tuple[str, dict[str, Any]]] = []

    def apply_table(model: str, options: dict[str, Any]) -> dict[str, Choice]:
        asked.append((model, options))
        sys.stdout.write("[Gloo] Rank 0 is connected\n")
        return {name: Choice(way, f"[why] of {way}") for name, way in ways.items()}  # type: ignore[arg-type]

    monkeypatch.setattr("vllm_delta_snapshot.engine.table.apply_table", apply_table)
    return asked


def test_model_adds_the_way_of_each_tensor(monkeypatch: pytest.MonkeyPatch):
    asked = choices(monkeypatch, a="scatter", b="scatter", c="reload")
    outcome = Outcome("doctor", "--model", "/models/tiny", "--dtype", "bfloat16", "--json")
    assert (outcome.code, outcome.stderr) == (0, "[Gloo] Rank 0 is connected\n")
    assert fields_of(outcome.json) == documented_fields("`doctor`") | {"ok"}
    assert outcome.json["apply"][2] == {"name": "c", "way": "reload", "reason": "[why] of reload"}
    assert outcome.json["checks"][-1]["detail"] == "tiny: 2 by scatter, 1 by reload"
    assert asked == [("/models/tiny", {"dtype": "bfloat16"})]
    text = Outcome("doctor", "--model", "/models/tiny")
    assert text.stdout.splitlines()[-1].split() == ["reload", "1", "c", "[why]", "of", "reload"]


def test_model_with_refused_tensors_is_in_the_way(monkeypatch: pytest.MonkeyPatch):
    choices(monkeypatch, a="scatter", b="refused")
    outcome = Outcome("doctor", "--model", "/models/tiny", "--json")
    assert (outcome.code, outcome.json["ok"]) == (1, False)
    assert '{"skip": ...}' in outcome.json["checks"][-1]["hint"]


def test_model_that_does_not_start_is_in_the_way(monkeypatch: pytest.MonkeyPatch):
    def apply_table(*_: object) -> None:
        raise RuntimeError("no such model")

    monkeypatch.setattr("vllm_delta_snapshot.engine.table.apply_table", apply_table)
    checks = checks_of(Outcome("doctor", "--model", "/models/none", "--json"))
    assert failed(checks) == ["model"]
    assert checks["model"]["detail"] == "RuntimeError: no such model"


@pytest.fixture
def talkative_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A vLLM to be imported that prints in every way there is."""
    package = tmp_path / "vllm"
    for name in PATCH_LOADER.split(".")[1:]:
        package.mkdir()
        (package / "__init__.py").write_text("")
        package = package / name
    package.with_suffix(".py").write_text("")
    (tmp_path / "vllm" / "__init__.py").write_text(
        "import logging, os, sys\n"
        "__version__ = '9.9.9'\n"
        "logging.getLogger('vllm').addHandler(logging.StreamHandler(sys.stdout))\n"
        "print('said by vLLM')\n"
        "os.write(1, b'said by C\\n')\n"
    )
    for name in vllm_modules():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [])
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in vllm_modules():
        del sys.modules[name]


def vllm_modules() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "vllm"]


@pytest.mark.usefixtures("talkative_vllm")
def test_what_vllm_prints_is_no_data(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["delta-snapshot", "doctor", "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capfd.readouterr()
    assert ended.value.code == 0, printed.err
    assert json.loads(printed.out)["checks"][1]["detail"] == "9.9.9"
    assert all(text in printed.err for text in ("said by vLLM", "said by C", "not tested with vLLM 9.9.9"))


@pytest.mark.vllm
def test_real_vllm_is_found_good():
    ended = subprocess.run([COMMAND, "doctor", "--json"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [check["name"] for check in json.loads(ended.stdout)["checks"]] == CHECKS
