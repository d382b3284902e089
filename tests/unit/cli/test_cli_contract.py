"""The contract of every verb: with --json exactly one JSON object on stdout and all else on stderr; its exit codes.

``follow``, which ends by a signal, has its in test_cli_drive.py.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import damage
from tests.support.cli import ERROR_FIELDS, Outcome
from tests.support.object_stores import S3_ENVIRONMENT
from tests.support.runs import TinyRun, copy_of, make_run
from tests.support.stub_server import EngineStub, answering

SILENT = "s3://bucket/run"
"""A run in a store that does not answer."""


@dataclass(frozen=True)
class Places:
    """What the calls below name."""

    run: str
    broken: str
    tmp: str
    server: str
    nowhere: str


Call = Callable[[Places], tuple[object, ...]]

# By verb and exit code, a call that ends so. What is left out cannot be: `plan` reads nothing, `repair` no store.
CALLS: dict[tuple[str, int], Call] = {
    ("inspect", 0): lambda at: (at.run,),
    ("inspect", 1): lambda at: (at.tmp,),
    ("inspect", 2): lambda at: ("ftp://host/run",),
    ("inspect", 3): lambda at: (SILENT,),
    ("log", 0): lambda at: (at.run,),
    ("log", 1): lambda at: (at.broken,),
    ("log", 2): lambda at: ("ftp://host/run",),
    ("log", 3): lambda at: (SILENT,),
    ("plot", 1): lambda at: (at.tmp, "-o", f"{at.tmp}/out"),
    ("plot", 2): lambda at: ("ftp://host/run", "-o", f"{at.tmp}/out"),
    ("plot", 3): lambda at: (SILENT, "-o", f"{at.tmp}/out"),
    ("diff", 0): lambda at: (f"{at.run}@1", f"{at.run}@1"),
    ("diff", 1): lambda at: (f"{at.run}@1", f"{at.run}@2"),
    ("diff", 2): lambda at: (f"{at.run}@1", f"{at.run}@9"),
    ("diff", 3): lambda at: (f"{SILENT}@1", f"{SILENT}@2"),
    ("verify", 0): lambda at: (at.run, "--deep"),
    ("verify", 1): lambda at: (at.broken, "--deep"),
    ("verify", 2): lambda at: ("ftp://host/run",),
    ("verify", 3): lambda at: (SILENT, "--deep"),
    ("doctor", 1): lambda at: ("--sync-dir", at.tmp, "--server", at.nowhere),
    ("doctor", 3): lambda at: ("--sync-dir", SILENT),
    ("plan", 0): lambda at: ("--params", "7e9", "--gbps", "10"),
    ("materialize", 0): lambda at: (at.run, f"{at.tmp}/made"),
    ("materialize", 1): lambda at: (at.broken, f"{at.tmp}/out"),
    ("materialize", 2): lambda at: ("ftp://host/run", f"{at.tmp}/out"),
    ("materialize", 3): lambda at: (SILENT, f"{at.tmp}/out"),
    ("export", 1): lambda at: (f"{at.run}@9", f"{at.tmp}/out"),
    ("export", 2): lambda at: ("ftp://host/run", f"{at.tmp}/out"),
    ("export", 3): lambda at: (SILENT, f"{at.tmp}/out"),
    ("compact", 0): lambda at: (at.run,),
    ("compact", 1): lambda at: (at.broken,),
    ("compact", 2): lambda at: ("ftp://host/run",),
    ("compact", 3): lambda at: (SILENT,),
    ("anchor", 0): lambda at: (at.run,),
    ("anchor", 1): lambda at: (at.broken,),
    ("anchor", 2): lambda at: ("ftp://host/run",),
    ("anchor", 3): lambda at: (SILENT,),
    ("prune", 0): lambda at: (at.run,),
    ("prune", 1): lambda at: (at.tmp,),
    ("prune", 2): lambda at: ("ftp://host/run",),
    ("prune", 3): lambda at: (SILENT,),
    ("sync", 0): lambda at: (at.run, "--server", at.server),
    ("sync", 1): lambda at: (at.run, "--server", at.nowhere),
    ("sync", 2): lambda at: (at.run, "--server", "ftp://host"),
    ("sync", 3): lambda at: (SILENT, "--server", at.server),
    ("repair", 0): lambda at: ("--server", at.server),
    ("repair", 1): lambda at: ("--server", at.nowhere, "--timeout", 0),
    ("repair", 2): lambda at: ("--server", "ftp://host"),
}
# What needs arguments of another kind, or is slow (a picture, a model), is in the tests of the verb.
USAGE = ("plan", "doctor", "export", "plot", "inspect", "log", "diff", "verify", "materialize", "compact", "anchor")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_run(tmp_path_factory.mktemp("run"), 3)


@pytest.fixture
def at(pristine: TinyRun, tmp_path: Path, nowhere: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Places]:
    broken = copy_of(pristine, tmp_path / "broken")
    damage.flip_payload(broken.sync_dir)
    damage.missing_version(broken.sync_dir)
    (tmp_path / "empty").mkdir()
    for name, value in S3_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DELTA_SNAPSHOT_STORE_ATTEMPTS", "1")
    with socket.socket() as bound, answering(EngineStub()) as server:
        bound.bind(("127.0.0.1", 0))  # taken, but nobody listens
        monkeypatch.setenv("DELTA_SNAPSHOT_STORE_ENDPOINT_URL", f"http://127.0.0.1:{bound.getsockname()[1]}")
        run = copy_of(pristine, tmp_path / "run").sync_dir
        yield Places(str(run), str(broken.sync_dir), str(tmp_path / "empty"), server.url, nowhere)


@pytest.mark.parametrize(("verb", "code"), CALLS, ids=[f"{verb}-{code}" for verb, code in CALLS])
def test_json_is_one_object_and_the_exit_code_is_the_documented_one(at: Places, verb: str, code: int):
    outcome = Outcome(verb, *CALLS[verb, code](at), "--json")
    assert outcome.code == code, outcome.stdout + outcome.stderr
    assert "Traceback" not in outcome.stderr
    found: dict[str, Any] = json.loads(outcome.stdout)  # and not two, nor a line beside it
    assert found["ok"] is (code == 0 or (verb == "diff" and "error" not in found))
    if "error" in found:
        assert set(found["error"]) == ERROR_FIELDS
        assert outcome.stderr.count("\n") == 1  # one paragraph
        assert found["error"]["what"] in outcome.stderr
    if code == 3:
        assert "S3 does not answer" in outcome.stdout


@pytest.mark.parametrize("verb", USAGE)
def test_option_that_there_is_not_is_wrong_usage_and_no_data(verb: str):
    outcome = Outcome(verb, "--no-such-option", "--json")
    assert (outcome.code, outcome.stdout) == (2, "")
    assert f"Usage: delta-snapshot {verb}" in outcome.stderr


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("{run}@2", "This verb takes the run as a whole: delta-snapshot ... {run}"),
        ("{run}/versions", "It is a part of the run in {run}: delta-snapshot log {run}"),
        ("{base}", "It holds a checkpoint or a delta: delta-snapshot inspect"),
        ("{run}/none", "Check sync_dir"),
    ],
)
def test_what_is_no_run_is_told_for_what_it_is(pristine: TinyRun, target: str, said: str):
    places = {"run": pristine.sync_dir, "base": pristine.base}
    message = Outcome("verify", target.format(**places)).assert_failed(1, "ObjectNotFound")
    assert said.format(**places) in message


@pytest.mark.parametrize(("args", "title"), [(("verify", "--deep"), "proving"), (("compact",), "merging")])
def test_long_work_shows_bytes_and_rate_on_a_terminal(
    pristine: TinyRun, tmp_path: Path, args: tuple[str, ...], title: str
):
    # In one process of its own each: rich finds out about the terminal from the real stderr.
    command = [sys.executable, "-c", "from vllm_delta_snapshot.cli import main; main()", *args]
    run = copy_of(pristine, tmp_path / "run").sync_dir
    terminal, end = os.openpty()
    try:
        env = os.environ | {"TERM": "xterm", "COLUMNS": "200"}
        subprocess.run([*command, str(run)], stdout=subprocess.DEVNULL, stderr=end, check=True, env=env)
        os.set_blocking(terminal, False)
        said = os.read(terminal, 1 << 16).decode()
    finally:
        os.close(end)
        os.close(terminal)
    assert title in said
    assert re.search(r"\d B/s|kB/s", said)
