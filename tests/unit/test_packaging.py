"""What goes out: the wheel, the sdist, their metadata, the licences of what they need, the changelog, the workflows."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.licences import EXTRAS, REFUSED, needed
from tools.release_notes import notes
from vllm_delta_snapshot._version import __version__

ROOT = Path(__file__).parents[2]
OURS = ("trainer_hooks", "vllm_delta_snapshot")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
INFO = f"vllm_delta_snapshot-{__version__}.dist-info"


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    built = next(WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("wheel")), versions=["standard"]))
    with zipfile.ZipFile(built) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


@pytest.fixture(scope="module")
def about(wheel: dict[str, bytes]) -> Message:
    return message_from_bytes(wheel[f"{INFO}/METADATA"])


def committed() -> set[str]:
    """Return the names of the repository's files, as git knows them."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: what is committed cannot be told")
    return set(subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split())


# --- wheel


def test_wheel_holds_both_packages_and_nothing_else(wheel: dict[str, bytes]):
    packaged = {name for name in wheel if PurePosixPath(name).parts[0] in OURS}
    on_disk = {
        path.relative_to(ROOT).as_posix()
        for package in OURS
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert packaged == on_disk
    assert {f"{package}/py.typed" for package in OURS} <= packaged
    assert set(wheel) - packaged == {
        f"{INFO}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    }


def test_wheel_registers_the_plugin_and_the_command(wheel: dict[str, bytes]):
    assert wheel[f"{INFO}/entry_points.txt"].decode().split("\n\n") == [
        "[console_scripts]\ndelta-snapshot = vllm_delta_snapshot.cli:main",
        "[vllm.general_plugins]\ndelta_snapshot = vllm_delta_snapshot.plugin:register\n",
    ]


def test_metadata_is_complete(about: Message, project: dict[str, Any], wheel: dict[str, bytes]):
    assert (about["Name"], about["Version"]) == ("vllm-delta-snapshot", __version__)
    assert (about["License-Expression"], about["License-File"]) == ("Apache-2.0", "LICENSE")
    assert wheel[f"{INFO}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert about["Requires-Python"] == ">=3.11"
    assert about["Description-Content-Type"] == "text/markdown"
    assert set(about.get_all("Provides-Extra", [])) == set(project["optional-dependencies"]) == {*EXTRAS, "vllm"} - {""}
    assert "Typing :: Typed" in about.get_all("Classifier", [])


def test_every_python_that_is_named_is_tested():
    named = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert load("tests")["jobs"]["fast"]["strategy"]["matrix"]["python"] == named


def test_every_extra_that_is_said_to_install_exists(project: dict[str, Any]):
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *(path for o in OURS for path in (ROOT / o).rglob("*.py"))]
    said = {
        extra
        for path in texts
        for extras in re.findall(r"vllm-delta-snapshot\[([a-z0-9,]+)\]", path.read_text())
        for extra in extras.split(",")
    }
    assert {"cli", "plot", "s3"} <= said <= set(project["optional-dependencies"])


# --- sdist


def test_sdist_holds_all_that_is_committed(tmp_path: Path):
    expected = committed()
    built = next(SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"]))
    with tarfile.open(built) as opened:
        packed = {name.partition("/")[2] for name in opened.getnames()}
    assert expected - packed == set()
    # Files that are about to be committed lie in the working tree; nothing of .gitignore may go out.
    unknown = sorted(packed - expected - {"PKG-INFO"})
    ignored = subprocess.run(["git", "check-ignore", *unknown], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ignored.stdout == ""


# --- licences


def test_nothing_is_needed_whose_licence_binds_users():
    found = needed()
    assert [row for row in found if REFUSED.search(row.licence) or row.licence == "not stated"] == []
    assert len(found) > 20


@pytest.mark.parametrize(
    "licence",
    ["GPL-3.0-or-later", "AGPL-3.0", "LGPL-2.1-only", "GPLv2", "GNU General Public License v3 (GPLv3)", "SSPL-1.0",
     "GNU Affero General Public License", "GNU Lesser General Public License v3 (LGPLv3)", "MIT AND GPL-2.0-only"],
)  # fmt: skip
def test_licence_that_binds_users_is_known(licence: str):
    assert REFUSED.search(licence)


@pytest.mark.parametrize("licence", ["MIT", "Apache Software License", "BSL-1.0", "MPL-2.0", "BSD License", "PSF-2.0"])
def test_licence_that_binds_nobody_passes(licence: str):
    assert not REFUSED.search(licence)


def test_licences_page_names_every_requirement(project: dict[str, Any]):
    rows = re.findall(r"^\| ([a-z0-9-]+) \| .+ \| (.+) \| (.+) \|$", (ROOT / "docs" / "licences.md").read_text(), re.M)
    listed = {name: (licence, by) for name, licence, by in rows}
    for extra, lines in {"": project["dependencies"], **project["optional-dependencies"]}.items():
        for line in lines if extra != "vllm" else []:
            licence, by = listed[canonicalize_name(Requirement(line).name)]
            assert not REFUSED.search(licence)
            assert by == "all" or f"`[{extra}]`" in by


# --- changelog


def test_changelog_keeps_its_form():
    headings = re.findall(r"^##.*$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == "## [Unreleased]"
    kinds = "Added|Changed|Deprecated|Removed|Fixed|Security"
    form = re.compile(rf"## \[(Unreleased|\d+\.\d+\.\d+)\]( - \d{{4}}-\d\d-\d\d)?|### ({kinds})")
    assert [heading for heading in headings if not form.fullmatch(heading)] == []


CHANGELOG = """# Changelog

## [Unreleased]

## [1.2.3] - 2026-01-31

### Fixed

- A.

## [1.2.2] - 2026-01-01

- B.
"""


def test_release_notes_are_the_section_of_the_tag():
    assert notes("v1.2.3", "1.2.3", CHANGELOG) == "### Fixed\n\n- A.\n"
    assert notes("v1.2.2", "1.2.2", CHANGELOG) == "- B.\n"


@pytest.mark.parametrize(
    ("tag", "version"), [("v1.2.4", "1.2.3"), ("1.2.3", "1.2.3"), ("v1.2.4", "1.2.4"), ("v1.2", "1.2")]
)
def test_release_of_another_version_or_of_an_unwritten_one_is_refused(tag: str, version: str):
    with pytest.raises(ValueError, match="expected"):
        notes(tag, version, CHANGELOG)


# --- workflows


def load(name: str) -> dict[str, Any]:
    loaded = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
    assert isinstance(loaded, dict)
    return loaded


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    return load(path.stem)["jobs"]


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in jobs(path).values() for step in job.get("steps", [])]


def test_workflows_are_those_of_tests_and_release():
    assert [path.stem for path in WORKFLOWS] == ["release", "tests"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_has_no_more_rights_than_it_needs(path: Path):
    assert load(path.stem)["permissions"] == {"contents": "read"}
    rights = {name: job["permissions"] for name, job in jobs(path).items() if "permissions" in job}
    assert rights == (
        {"publish": {"id-token": "write"}, "announce": {"contents": "write"}} if path.stem == "release" else {}
    )
    assert "secrets." not in path.read_text()
    for step in steps(path):
        assert "${{" not in step.get(
            "run", ""
        )  # what others may name (branches, tags) reaches a shell by variables only
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_runs_what_there_is(path: Path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    commands = " ; ".join(step["run"] for step in steps(path) if "run" in step)
    made = re.findall(r"\bmake ([a-z-]+)", commands)
    assert made
    assert set(made) <= targets
    for file in re.findall(r"\b(?:tools|tests|requirements)/[\w./-]+", commands):
        assert (ROOT / file).is_file()
    for job in jobs(path).values():
        assert ("uses" in job) != (job.get("timeout-minutes", 0) > 0)
        called = job.get("uses", "./.github/workflows/tests.yml")
        assert (ROOT / called).is_file()
        needs = job.get("needs", [])
        assert set(needs) <= set(jobs(path))
    for step in steps(path):
        assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+|[0-9a-f]{40})", step.get("uses", "a/b@v1"))


def test_release_needs_the_tests_and_a_tag():
    release = load("release")
    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads the key `on` as true
    assert set(release["jobs"]["publish"]["needs"]) == {"build", "test"}
    assert release["jobs"]["test"]["uses"] == "./.github/workflows/tests.yml"
    assert release["jobs"]["announce"]["needs"] == ["publish"]
    assert "workflow_call" in load("tests")[True]


def test_workflow_of_tests_runs_what_ci_runs():
    run = set(re.findall(r"^step make (.+)$", (ROOT / ".ci" / "run").read_text(), re.M))
    made = {
        step["run"].removeprefix("make ")
        for step in steps(ROOT / ".github" / "workflows" / "tests.yml")
        if "run" in step
    }
    assert run <= made
