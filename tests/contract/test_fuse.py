"""A folder behind a FUSE layer keeps the contract; what shared file systems do wrong there loses nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract.store_contract import StoreContract
from tests.support.bucket_runs import BucketHost, BucketRun, make_bucket_run
from tests.support.mounts import FuseMount, fuse_mount, power_cut
from tests.support.runs import assert_same_state
from tests.support.waiting import eventually
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.errors import (
    DeltaSnapshotError,
    ExclusiveCreateUnsupported,
    StoreError,
    StoreUnavailable,
    error_of_fields,
)
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import Store, open_store
from vllm_delta_snapshot.store.posix import PosixStore

Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuseMount]:
    with fuse_mount(tmp_path_factory.mktemp("fuse")) as mount:
        yield mount


@pytest.fixture
def mount(mounted: FuseMount) -> Iterator[FuseMount]:
    mounted.set()
    yield mounted
    mounted.set()


@pytest.fixture
def uri(mount: FuseMount, request: pytest.FixtureRequest) -> str:
    return str(mount.path / f"{abs(hash(request.node.nodeid)):x}")


class TestFuse(StoreContract):
    @pytest.fixture
    def store(self, uri: str) -> Store:
        return PosixStore(uri)


@pytest.fixture
def run(uri: str, tmp_path: Path) -> BucketRun:
    return make_bucket_run(uri, tmp_path)


def told(record: Record, what: str, error: DeltaSnapshotError | None) -> None:
    saw = "nothing" if error is None else f"`{type(error).__name__}`: {error.what}"
    record("fault", f"{what}|folder (FUSE)|{saw}")


@pytest.mark.parametrize("call", ["read", "open", "getattr", "readdir"])
@pytest.mark.parametrize("number", ["ESTALE", "EIO"])
def test_staging_gets_through_calls_that_fail_now_and_then(
    run: BucketRun, mount: FuseMount, tmp_path: Path, call: str, number: str, record_property: Record
):
    host = BucketHost(run, tmp_path / "stage")
    version = run.publish()
    mount.set(fail={call: [number, 2, "versions" if call == "readdir" else "delta"]})
    assert host.step() is None
    assert_same_state(host.take(version), run.trainer.state())
    host.close()
    told(record_property, f"stage: {call} fails twice with {number}", None)


def test_staging_that_fails_goes_on_when_the_file_system_is_well_again(
    run: BucketRun, mount: FuseMount, tmp_path: Path, record_property: Record
):
    host = BucketHost(run, tmp_path / "stage")
    version = run.publish()
    mount.set(fail={"read": ["EIO", 1000, "delta"]})
    problem = host.step()
    assert problem is not None
    error = error_of_fields(problem)
    assert type(error) is StoreUnavailable
    mount.set()
    assert host.step() is None
    assert_same_state(host.take(version), run.trainer.state())
    host.close()
    told(record_property, "stage: read fails with EIO until somebody mends it", error)


def test_name_that_is_listed_before_it_can_be_opened_is_waited_for(
    run: BucketRun, mount: FuseMount, tmp_path: Path, record_property: Record
):
    host = BucketHost(run, tmp_path / "stage")
    mount.set(hide_lookup_s=0.1)
    version = run.publish()
    assert host.step() is None
    assert_same_state(host.take(version), run.trainer.state())
    host.close()
    told(record_property, "stage: names are listed before they can be opened", None)


def test_names_that_stay_hidden_for_seconds_are_found_in_the_end(
    run: BucketRun, mount: FuseMount, tmp_path: Path, record_property: Record
):
    host = BucketHost(run, tmp_path / "stage")
    mount.set(hide_s=1.0)
    version = run.publish()
    eventually(lambda: host.step() is None and host.is_staged(version))
    assert_same_state(host.take(version), run.trainer.state())
    host.close()
    told(record_property, "publish and stage: new names are hidden for a second", None)


def test_trainer_that_restarts_before_the_newest_name_shows_overwrites_nothing(
    run: BucketRun, mount: FuseMount, record_property: Record
):
    mount.set(hide_s=1000, where="00000002.json")
    run.publish()
    blind = DeltaPublisher(run.trainer, sync_dir=run.uri, base=run.base, asynchronous=False)
    assert blind.version == 1
    with pytest.raises(StoreError) as caught:
        blind.publish()
    mount.set()
    assert RunFolder(open_store(run.uri)).versions() == [1, 2]
    assert run.publish() == 3
    told(record_property, "publish: the newest version is hidden from a second trainer", caught.value)


def test_folder_without_hard_links_is_refused(mount: FuseMount, uri: str, tmp_path: Path, record_property: Record):
    mount.set(links=False)
    with pytest.raises(ExclusiveCreateUnsupported) as caught:
        make_bucket_run(uri, tmp_path)
    told(record_property, "publish: no hard links", caught.value)


@pytest.mark.parametrize("call", ["link", "fsync", "write", "create"])
def test_publication_into_a_folder_that_fails_once_is_carried_by_the_next(
    run: BucketRun, mount: FuseMount, tmp_path: Path, call: str, record_property: Record
):
    mount.set(fail={call: ["EIO", 1, ""]})
    error = None
    try:
        run.publish()
    except StoreError as caught:
        error = caught
    newest = run.publish()
    assert_same_state(run.materialized(newest, tmp_path / "out"), run.trainer.state())
    told(record_property, f"publish: {call} fails once with EIO", error)


def test_full_folder_fails_at_once_and_the_next_publication_carries_everything(
    run: BucketRun, mount: FuseMount, tmp_path: Path, record_property: Record
):
    mount.set(room=0)
    with pytest.raises(StoreError, match="Free space") as caught:
        run.publish()
    mount.set()
    newest = run.publish()
    assert_same_state(run.materialized(newest, tmp_path / "out"), run.trainer.state())
    told(record_property, "publish: no space left", caught.value)


def test_power_cut_after_a_publication_loses_nothing_of_it(tmp_path: Path, record_property: Record):
    with power_cut(tmp_path / "disk") as disk:
        run = make_bucket_run(str(disk.path / "run"), tmp_path, 2)
        disk.cut()
        assert RunFolder(open_store(run.uri)).versions() == [1, 2]
        assert_same_state(run.materialized(2, tmp_path / "out"), run.trainer.state())
        assert run.publish() == 3
    record_property("fault", "publish: the power is cut right after the commit|folder (ext4)|nothing")


def test_power_cut_before_the_commit_leaves_the_version_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Record
):
    class PowerGone(Exception):
        """The machine is off."""

    with power_cut(tmp_path / "disk") as disk:
        run = make_bucket_run(str(disk.path / "run"), tmp_path)

        def off(*args: object) -> None:
            raise PowerGone

        with monkeypatch.context() as patched:
            patched.setattr("os.link", off)
            with pytest.raises(PowerGone):
                run.publish()
        disk.cut()
        assert RunFolder(open_store(run.uri)).versions() == [1]
        run.open()
        assert run.publish() == 2
        assert_same_state(run.materialized(2, tmp_path / "out"), run.trainer.state())
    record_property(
        "fault",
        "publish: the power is cut right before the commit|folder (ext4)|the version is not there",
    )
