"""``doctor`` on stores and servers: file systems, clocks, room, credentials, routes; each bad case is a real one."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import snapshot_of
from tests.support.cli import Outcome
from tests.support.mounts import make_read_only, tmpfs
from tests.support.object_stores import S3_ENVIRONMENT
from tests.support.runs import TinyRun, copy_of, make_run
from tests.support.stub_server import StubServer, answering
from vllm_delta_snapshot.cli.doctor.check import Check
from vllm_delta_snapshot.cli.doctor.storage import clock_check, mount_check
from vllm_delta_snapshot.store.mounts import mount_of
from vllm_delta_snapshot.store.posix import PosixStore

SECRET = "very-secret-key"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_run(tmp_path_factory.mktemp("run"), 2)


def checks_of(*args: object) -> tuple[int, dict[str, dict[str, Any]]]:
    outcome = Outcome("doctor", *args, "--json")
    assert SECRET not in outcome.stdout + outcome.stderr
    return outcome.code, {check["name"]: check for check in outcome.json["checks"]}


# --- the run and its folder


def test_folder_without_a_run_is_still_looked_at(tmp_path: Path):
    code, checks = checks_of("--sync-dir", tmp_path)
    assert code == 1
    assert not checks["run"]["ok"]
    assert "trainer's DeltaPublisher creates run.json" in checks["run"]["detail"]
    assert all(checks[name]["ok"] for name in ("exclusive create", "clock", "file system", "room for the run"))
    assert list(tmp_path.iterdir()) == []


def test_folder_that_is_another_tools_is_in_the_way(tmp_path: Path):
    (tmp_path / "run.json").write_text('{"format": "something else"}')
    code, checks = checks_of("--sync-dir", tmp_path)
    assert (code, checks["run"]["ok"]) == (1, False)
    assert f"file {tmp_path}/run.json" in checks["run"]["detail"]


def test_read_only_folder_is_the_trainers_concern(run: TinyRun, tmp_path: Path):
    with tmpfs(tmp_path / "mounted", "16m") as mounted:
        copy = copy_of(run, mounted / "run")
        make_read_only(mounted)
        _, checks = checks_of("--sync-dir", copy.sync_dir)
        assert checks["exclusive create"]["ok"]
        assert "Mount it writable" in checks["exclusive create"]["detail"]
        assert checks["exclusive create"]["hint"] == "Only the trainer needs it."
        assert "cannot be compared from here" in checks["clock"]["detail"]
        assert checks["file system"]["detail"] == f"tmpfs (none at {mounted})"


def test_full_file_system_is_in_the_way(run: TinyRun, tmp_path: Path):
    with tmpfs(tmp_path / "mounted", "1m") as mounted:
        copy = copy_of(run, mounted / "run")
        (mounted / "filler").write_bytes(bytes(shutil.disk_usage(mounted).free))
        code, checks = checks_of("--sync-dir", copy.sync_dir)
        assert (code, checks["room for the run"]["ok"]) == (1, False)
        assert f"delta-snapshot prune {copy.sync_dir}" in checks["room for the run"]["hint"]


def test_stage_folder_without_room_for_the_run_is_in_the_way(
    run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with tmpfs(tmp_path / "mounted", "64k") as mounted:
        monkeypatch.setenv("DELTA_SNAPSHOT_STAGE_DIR", str(mounted / "stage"))
        (mounted / "filler").write_bytes(bytes(max(0, shutil.disk_usage(mounted).free - 4096)))
        _, checks = checks_of("--sync-dir", run.sync_dir)
        assert not checks["stage folder"]["ok"]
        assert "a version of this run takes" in checks["stage folder"]["detail"]


# --- clock


class ShiftedStore(PosixStore):
    """A store whose clock is off."""

    shift = 0.0

    def now(self) -> float:
        return super().now() + self.shift


@pytest.mark.parametrize(("shift", "said"), [(600.0, "600 s behind"), (-600.0, "600 s ahead of")])
def test_clock_that_is_off_is_in_the_way(tmp_path: Path, shift: float, said: str):
    store = ShiftedStore(tmp_path)
    assert clock_check(store).is_ok
    store.shift = shift
    found = clock_check(store)
    assert not found.is_ok
    assert said in found.detail
    assert "NTP" in found.hint
    assert list(tmp_path.iterdir()) == []


# --- file systems

HOST = "23 28 0:21 / / rw,relatime - ext4 /dev/vda1 rw\n"


def found_on(tmp_path: Path, kind: str, options: str, source: str = "nfs.example:/export") -> Check:
    """Return what is said of a folder on such a mount, whose point has a space in its name."""
    folder = tmp_path / "shared runs"
    folder.mkdir()
    point = str(folder).replace(" ", "\\040")
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(f"{HOST}91 23 0:45 / {point} rw,relatime shared:9 - {kind} {source} rw,{options}\n")
    return mount_check(folder / "run-1", mountinfo)


@pytest.mark.parametrize(
    ("kind", "options", "is_ok", "detail", "hint"),
    [
        ("nfs4", "vers=4.2,hard", True, "vers=4.2", "hidden for up to 30 s"),
        ("nfs4", "vers=4.2,lookupcache=pos", True, "lookupcache=pos", "hidden for up to 0 s"),
        ("nfs", "vers=3,actimeo=3", True, "vers=3 actimeo=3", "hidden for up to 3 s"),
        ("nfs", "vers=3,acdirmin=5,acdirmax=9", True, "acdirmin=5 acdirmax=9", "hidden for up to 5 s"),
        ("nfs4", "noac", True, "noac", "makes every access slower"),
        ("nfs4", "nocto", False, "nocto", "a listing may be 60 s old"),
        ("nfs4", "nocto,acdirmax=9", False, "acdirmax=9 nocto", "a listing may be 9 s old"),
        ("nfs4", "soft", False, "soft", "mount it hard"),
        ("fuse.s3fs", "allow_other", False, "fuse.s3fs", "give s3://... or gs://..."),
        ("ext4", "", True, "ext4", "other hosts do not see it"),
        ("lustre", "flock", True, "lustre", ""),
    ],
)
def test_mount_is_named_with_what_its_options_mean(
    tmp_path: Path, kind: str, options: str, is_ok: bool, detail: str, hint: str
):
    found = found_on(tmp_path, kind, options)
    assert (found.name, found.is_ok) == ("file system", is_ok)
    assert found.detail.startswith(f"{kind} (nfs.example:/export at {tmp_path}/shared runs)")
    assert detail in found.detail
    assert hint in found.hint


def test_mount_on_top_is_the_one_that_counts(tmp_path: Path):
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(
        f"{HOST}40 23 0:5 / {tmp_path} rw - nfs4 a:/ rw\n41 23 0:6 / {tmp_path} rw - xfs /dev/b rw\nnonsense\n"
    )
    found = mount_of(tmp_path / "x", mountinfo)
    assert found is not None
    assert (found.kind, found.source) == ("xfs", "/dev/b")
    assert mount_check(tmp_path, tmp_path / "none").detail == "not known here"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc/self/mountinfo is Linux's")
def test_mount_of_this_machine_is_found():
    assert mount_of(Path("/proc/self")).kind == "proc"  # type: ignore[union-attr]


# --- buckets


@pytest.fixture
def closed_port() -> Iterator[int]:
    with socket.socket() as bound:  # taken, but nobody listens
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, closed_port: int) -> None:
    for name, value in S3_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("DELTA_SNAPSHOT_STORE_ENDPOINT_URL", f"http://127.0.0.1:{closed_port}")
    monkeypatch.setenv("DELTA_SNAPSHOT_STORE_ATTEMPTS", "1")


@pytest.mark.usefixtures("s3")
def test_endpoint_that_nobody_listens_at_exits_with_3_and_says_which_credentials_there_are():
    code, checks = checks_of("--sync-dir", "s3://bucket/run-1")
    assert code == 3
    assert checks["credentials"]["detail"] == "boto3 finds them by 'env', profile 'default'"
    assert not checks["run"]["ok"]
    assert checks["run"]["detail"].startswith("S3 does not answer: file s3://bucket/run-1/run.json")
    assert "exclusive create" not in checks


@pytest.mark.usefixtures("s3")
def test_missing_credentials_are_in_the_way(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    code, checks = checks_of("--sync-dir", "s3://bucket/run-1")
    assert (code, checks["credentials"]["ok"]) == (1, False)
    assert "Set them up as for the aws command" in checks["credentials"]["detail"]


def test_credentials_of_gcs_that_cannot_be_read_are_in_the_way_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "key.json").write_text(f'{{"private_key": "{SECRET}"')
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    code, checks = checks_of("--sync-dir", "gs://bucket/run-1")
    assert code == 1
    assert "no credentials for GCS" in checks["run"]["detail"]


# --- servers

PATHS = (
    *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
    *("/pause", "/resume", "/is_paused", "/reset_prefix_cache", "/weight_info"),
)


@pytest.fixture
def server() -> Iterator[StubServer]:
    with answering(StubServer()) as stub:
        stub.routes |= {
            "/health": (200, {}),
            "/version": (200, {"version": "0.32.0"}),
            "/openapi.json": (200, {"paths": {path: {} for path in PATHS}}),
            "/server_info?config_format=json": (
                200,
                {"vllm_config": {"weight_transfer_config": {"backend": "delta_snapshot"}}},
            ),
        }
        yield stub


def test_good_server_is_found_good_and_is_only_asked(server: StubServer):
    _, checks = checks_of("--server", server.url)
    assert checks["server"]["detail"] == f"{server.url} answers, vLLM 0.32.0"
    assert checks["server routes"]["ok"]
    assert checks["server backend"]["detail"] == "delta_snapshot, weights run-1@7"
    assert {method for method, _, _ in server.asked} == {"GET"}


def test_server_without_dev_mode_is_in_the_way(server: StubServer):
    server.routes["/openapi.json"] = (200, {"paths": {"/v1/completions": {}}})
    del server.routes["/weight_info"], server.routes["/server_info?config_format=json"]
    code, checks = checks_of("--server", server.url)
    assert (code, checks["server routes"]["ok"]) == (1, False)
    assert "VLLM_SERVER_DEV_MODE=1" in checks["server routes"]["hint"]
    del server.routes["/openapi.json"]  # --disable-fastapi-docs
    code, checks = checks_of("--server", server.url)
    assert (code, checks["server routes"]["ok"]) == (1, False)
    assert "VLLM_SERVER_DEV_MODE=1" in checks["server routes"]["detail"]


@pytest.mark.parametrize("config", [None, {"backend": "nccl"}])
def test_server_with_another_backend_is_in_the_way(server: StubServer, config: object):
    server.routes["/server_info?config_format=json"] = (200, {"vllm_config": {"weight_transfer_config": config}})
    code, checks = checks_of("--server", server.url)
    assert (code, checks["server backend"]["ok"]) == (1, False)
    assert '--weight-transfer-config \'{"backend": "delta_snapshot"}\'' in checks["server backend"]["hint"]


@pytest.mark.parametrize("url", ["{nowhere}", "ftp://host"])
def test_server_that_does_not_answer_is_in_the_way(nowhere: str, url: str):
    code, checks = checks_of("--server", url.format(nowhere=nowhere))
    assert (code, checks["server"]["ok"]) == (1, False)
    assert "server routes" not in checks


def test_doctor_leaves_nothing_in_a_run(run: TinyRun):
    before = snapshot_of(run.sync_dir)
    names = os.listdir(run.sync_dir)
    checks_of("--sync-dir", run.sync_dir)
    assert snapshot_of(run.sync_dir) == before
    assert sorted(os.listdir(run.sync_dir)) == sorted(names)
