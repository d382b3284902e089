"""What networks and busy stores do, in front of real servers: nothing is lost, and nothing wrong is applied.

One run lives through all of it, on each server: a trainer publishes into the bucket, a stager brings the weights out of
it, and after every fault they are compared bit for bit.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.bucket_runs import BucketHost, BucketRun, make_bucket_run
from tests.support.fault_proxy import Fault, FaultProxy, Harm, fault_proxy
from tests.support.object_stores import SERVERS
from tests.support.runs import assert_same_state
from vllm_delta_snapshot.audit.verify_run import verify_run
from vllm_delta_snapshot.cli.app import app
from vllm_delta_snapshot.errors import (
    CorruptFile,
    DeltaSnapshotError,
    ObjectNotFound,
    StoreError,
    StoreUnavailable,
    error_of_fields,
)
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import Store, StoreConfig, open_store

pytestmark = pytest.mark.servers

ALWAYS = 10_000
UPLOAD = r"^(PUT|POST) [^\0]*delta\.safetensors"
COMMIT = r"^(PUT|POST) [^\0]*versions/0"
DOWNLOAD = r"^GET (?!/storage/).*delta\.safetensors"
METADATA = r"^GET (?!/storage/).*metadata\.json"
RECORD = r"^GET (?!/storage/).*versions/0"

NAMES = {UPLOAD: "upload", COMMIT: "commit", DOWNLOAD: "download", METADATA: "metadata", RECORD: "record", ".": "all"}

Record = Callable[[str, object], None]


@dataclass
class Life:
    """A run, the host that follows it, and the proxy between them and the store."""

    proxy: FaultProxy
    run: BucketRun
    host: BucketHost

    def check(self) -> None:
        """Bring the host to the newest version without faults, and compare."""
        self.proxy.inject()
        assert self.host.step() is None
        assert_same_state(self.host.take(len(self.run.history) - 1), self.run.trainer.state())


@pytest.fixture(scope="module", params=["ministack", "fake-gcs"])
def life(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    folder = tmp_path_factory.mktemp("life")
    fields = {"CONNECT_TIMEOUT_S": "5", "READ_TIMEOUT_S": "0.5", "ATTEMPTS": "3"}
    with (
        SERVERS[request.param](folder / "log") as server,
        fault_proxy(server) as proxy,
        pytest.MonkeyPatch.context() as patched,
    ):
        environment = {f"DELTA_SNAPSHOT_STORE_{name}": value for name, value in fields.items()}
        for name, value in (proxy.server.environment | environment).items():
            patched.setenv(name, value)
        run = make_bucket_run(f"{server.scheme}://{proxy.server.make_bucket()}/runs/one", folder)
        host = BucketHost(run, folder / "stage")
        yield Life(proxy, run, host)
        host.close()


@pytest.fixture(autouse=True)
def _in_health(life: Life) -> Iterator[None]:
    life.proxy.inject()
    yield
    life.proxy.inject()


def refused(where: str, times: int = 1, **fields: object) -> Fault:
    return replace(Fault(Harm.REFUSE, where, times), **fields)


def name_of(value: object) -> str | None:
    if not isinstance(value, Fault):
        return None
    status = f"-{value.status}" if value.harm is Harm.REFUSE else ""
    return f"{value.harm.name}{status}-{NAMES[value.where]}-{'always' if value.times == ALWAYS else value.times}"


@pytest.mark.parametrize(
    "fault",
    [
        Fault(Harm.LOSE_REPLY, COMMIT),
        Fault(Harm.LOSE_REPLY, UPLOAD),
        Fault(Harm.CUT_REQUEST, COMMIT),
        Fault(Harm.CUT_REQUEST, UPLOAD),
        Fault(Harm.STALL, COMMIT),
        Fault(Harm.STALL, UPLOAD),
        refused(".", 2),
        refused(COMMIT, headers=(("Retry-After", "1"),)),
        refused(COMMIT, status=500, code="InternalError"),
    ],
    ids=name_of,
)
def test_publication_gets_through_what_passes(life: Life, fault: Fault, record_property: Record):
    before = len(life.run.history)
    life.proxy.inject(fault)
    assert life.run.publish() == before
    assert life.proxy.done == fault.times
    life.check()
    told(record_property, life, "publish", fault, None)


@pytest.mark.parametrize(
    "fault",
    [
        refused(".", ALWAYS),
        Fault(Harm.LOSE_REPLY, r"versions/0", ALWAYS),
        Fault(Harm.CUT_REQUEST, UPLOAD, ALWAYS),
        refused(COMMIT, ALWAYS, status=403, code="AccessDenied"),
        refused(UPLOAD, ALWAYS, status=507, code="XMinioStorageFull"),
    ],
    ids=["busy", "lost", "cut", "denied", "full"],
)
def test_publication_that_fails_loses_nothing_and_the_next_one_succeeds(
    life: Life, fault: Fault, record_property: Record
):
    before = len(life.run.history)
    if fault.harm is Harm.LOSE_REPLY:  # of the record that is created, and of every look at it; not of the one before
        fault = dataclasses.replace(fault, where=f"versions/{before:08d}")
    life.proxy.inject(fault)
    with pytest.raises(StoreError) as caught:
        life.run.publish()
    if fault.status in (403, 507):  # no second try, no pause
        assert (life.proxy.done, type(caught.value)) == (1, StoreError)
        assert caught.value.hint
    else:
        assert type(caught.value) is StoreUnavailable
    life.proxy.inject()
    was_committed = fault.harm is Harm.LOSE_REPLY
    assert life.run.publish() == before + was_committed
    life.check()
    told(record_property, life, "publish", fault, caught.value)


@pytest.mark.parametrize(
    "fault",
    [
        *(Fault(harm, DOWNLOAD) for harm in Harm if harm not in (Harm.CUT_REQUEST, Harm.REFUSE)),
        refused(".", 2),
        Fault(Harm.CUT_REPLY, METADATA),
        Fault(Harm.CORRUPT, METADATA),
        Fault(Harm.SHORTEN, RECORD),
    ],
    ids=name_of,
)
def test_staging_gets_through_what_passes(life: Life, fault: Fault, record_property: Record):
    version = life.run.publish()
    life.proxy.inject(fault)
    assert life.host.step() is None
    assert life.proxy.done == fault.times
    assert_same_state(life.host.take(version), life.run.trainer.state())
    told(record_property, life, "stage", fault, None)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (refused(".", ALWAYS), "StoreUnavailable"),
        (Fault(Harm.CUT_REPLY, DOWNLOAD, ALWAYS), "StoreUnavailable"),
        (Fault(Harm.SHORTEN, DOWNLOAD, ALWAYS), "StoreUnavailable"),
        (Fault(Harm.CORRUPT, DOWNLOAD, ALWAYS), "CorruptFile"),
        (Fault(Harm.CORRUPT, METADATA, ALWAYS), "CorruptFile"),
        (refused(DOWNLOAD, ALWAYS, status=403, code="AccessDenied"), "StoreError"),
    ],
    ids=name_of,
)
def test_staging_that_fails_says_why_and_goes_on_by_itself(
    life: Life, fault: Fault, kind: str, record_property: Record
):
    version = life.run.publish()
    life.proxy.inject(fault)
    problem = life.host.step()
    assert problem is not None
    error = error_of_fields(problem)
    if not (life.proxy.server.scheme == "gs" and fault.where is METADATA):  # GCS's own checksum is wrong before ours
        assert type(error).__name__ == kind
    if fault.status == 403:
        assert (life.proxy.done, bool(error.hint)) == (1, True)
    assert not life.host.is_staged(version)
    life.check()
    told(record_property, life, "stage", fault, error)


def test_pauses_between_attempts_are_drawn_by_chance(life: Life):
    store = open_store(life.run.uri)
    pauses = []
    for _ in range(8):  # the vendors draw from 50 ms on: that eight lie within 5 ms of each other is one in a million
        life.proxy.inject(refused("run.json"))
        store.size("run.json")
        first, second = life.proxy.times_of("run.json")
        pauses.append(second - first)
    assert max(pauses) - min(pauses) > 0.005


def test_upload_in_parts_survives_lost_answers_and_cut_connections(life: Life, record_property: Record):
    store = open_store(life.run.uri, config=StoreConfig.load(part_bytes=5 << 20, concurrency=2, read_timeout_s=10))
    data = random.Random(0).randbytes(5_500_000)
    if life.proxy.server.scheme == "s3":
        begin, part, end = r"^POST .*[?&]uploads", r"^PUT .*partNumber=2", r"^POST .*uploadId="
    else:
        begin, part, end = r"^POST [^\0]*tmp-parts/", r"^POST [^\0]*tmp-parts/[^\0]*1\"", r"^POST .*/compose"
    cases = [
        (Fault(Harm.CUT_REQUEST, part),),
        (refused(begin), refused(part)),
        (Fault(Harm.LOSE_REPLY, part),),
        (Fault(Harm.LOSE_REPLY, end),),
    ]
    for number, faults in enumerate(cases):
        life.proxy.inject(*faults)
        assert store.put(f"large/{number}", [memoryview(data)]) == len(data)
        assert life.proxy.done == len(faults)
        into = bytearray(len(data))
        assert store.read_range(f"large/{number}", 0, memoryview(into)) == len(data)
        assert into == data
        told(record_property, life, "upload in parts", faults[0], None)


def test_credentials_of_the_environment_show_up_nowhere(
    life: Life, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    if life.proxy.server.scheme != "s3":
        pytest.skip("the fake GCS is reached without credentials")
    secrets = {
        "AWS_ACCESS_KEY_ID": "AKIAHUNTERTWO",
        "AWS_SECRET_ACCESS_KEY": "hunter2/secret",
        "AWS_SESSION_TOKEN": "hunter3",
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    for name in ("vllm_delta_snapshot", "trainer_hooks"):
        caplog.set_level(logging.DEBUG, name)
    bucket = life.proxy.server.make_bucket()
    run = make_bucket_run(f"s3://{bucket}/secret/run", tmp_path)
    said = []
    for faults in (
        (),
        (refused(".", ALWAYS, status=403, code="SignatureDoesNotMatch"),),
        (Fault(Harm.LOSE_REPLY, ".", ALWAYS),),
    ):
        life.proxy.inject(*faults)
        for args in (["inspect", run.uri], ["log", run.uri], ["verify", run.uri], ["doctor", "--sync-dir", run.uri]):
            for form in ([], ["--json"]):
                done = CliRunner().invoke(app, [*args, *form])
                said += [done.output, done.stderr, "".join(traceback.format_exception(done.exception))]
        if faults:
            with pytest.raises(StoreError) as caught:
                run.publish()
            said += ["".join(traceback.format_exception(caught.value)), str(caught.value.to_fields())]
    life.proxy.inject()
    run.publish()
    said += objects_of(open_store(f"s3://{bucket}"))
    shown = "\n".join([*said, *(record.getMessage() for record in caplog.records if "botocore" not in record.name)])
    assert "run.json" in shown
    assert [name for name, value in secrets.items() if value in shown] == []


def objects_of(store: Store, folder: str = "") -> list[str]:
    """Return all objects under a folder as text."""
    found = []
    for name in store.list(folder):
        key = f"{folder}/{name}".lstrip("/")
        try:
            found.append(store.read(key, max_bytes=1 << 24).decode(errors="replace"))
        except ObjectNotFound:
            found += objects_of(store, key)
    return found


@pytest.mark.parametrize("harm", ["one bit flipped", "cut off", "deleted"])
def test_payload_damaged_at_rest_is_refused_and_taken_once_it_is_restored(
    life: Life, harm: str, record_property: Record
):
    version = life.run.publish()
    store = open_store(life.run.uri)
    record = RunFolder(store).read_version(version)
    key = f"{record.folder}/{RunFolder(store).read_metadata(record).files[0].name}"
    good = store.read(key, max_bytes=1 << 24)
    bad = {"one bit flipped": good[:-1] + bytes([good[-1] ^ 1]), "cut off": good[:-1]}.get(harm)
    store.delete(key)
    if bad is not None:
        store.put(key, [memoryview(bad)])
    fields = life.host.step()
    assert fields is not None
    error = error_of_fields(fields)
    assert isinstance(error, CorruptFile)
    assert key in str(error.file)
    assert not life.host.is_staged(version)
    store.delete(key)
    store.put(key, [memoryview(good)])
    life.check()
    store_name = {"s3": "S3", "gs": "GCS"}[life.proxy.server.scheme]
    record_property("fault", f"payload at rest: {harm}|{store_name}|`CorruptFile`: {error.what}")


def test_run_that_lived_through_all_of_it_verifies_and_is_resumed(life: Life):
    assert verify_run(RunFolder(open_store(life.run.uri))).is_ok
    assert life.run.open().version == len(life.run.history) - 1
    life.run.publish()
    life.check()


def told(record: Record, life: Life, doing: str, fault: Fault, error: DeltaSnapshotError | None) -> None:
    """Write down a row of the table of faults."""
    what = fault.harm.value
    if fault.harm is Harm.REFUSE:
        what = f"the answer is status {fault.status}" + (" with Retry-After" if fault.headers else "")
    at = NAMES.get(fault.where, "commit" if "versions" in fault.where else "part")
    often = {1: "once", ALWAYS: "always"}.get(fault.times, f"{fault.times} times")
    saw = "nothing" if error is None else f"`{type(error).__name__}`: {error.what}"
    store = {"s3": "S3", "gs": "GCS"}[life.proxy.server.scheme]
    record("fault", f"{doing} ({at}): {what}, {often}|{store}|{saw}")
