"""What a store refuses is an error at once that says what to do: with each adapter, on real servers."""

from __future__ import annotations

import hashlib
import http.server
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.support.cli import Outcome
from tests.support.object_stores import S3_ENVIRONMENT, ObjectServer, fake_gcs, ministack, moto
from vllm_delta_snapshot.errors import CompatibilityError, ObjectExists, ObjectNotFound, StoreError, StoreUnavailable
from vllm_delta_snapshot.store import Store, StoreConfig, open_store
from vllm_delta_snapshot.store.gcs import GcsStore
from vllm_delta_snapshot.store.gcs_io import Crc32c
from vllm_delta_snapshot.store.gcs_upload import FOLDER, Composer
from vllm_delta_snapshot.store.s3 import S3Store

pytestmark = pytest.mark.servers

VERBS: dict[str, Callable[[Store], object]] = {
    "create": lambda store: store.create("x", b"1"),
    "put": lambda store: store.put("x", [memoryview(b"1")]),
    "read": lambda store: store.read("x", max_bytes=10),
    "size": lambda store: store.size("x"),
    "read_range": lambda store: store.read_range("x", 0, memoryview(bytearray(4))),
    "list": lambda store: store.list(""),
    "delete": lambda store: store.delete("x"),
    "probe": lambda store: store.check_exclusive_create(),
}


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with ministack(tmp_path_factory.mktemp("s3") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with fake_gcs(tmp_path_factory.mktemp("gcs") / "log") as server:
        yield server


@pytest.fixture
def google(gcs: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> GcsStore:
    set_all(monkeypatch, gcs.environment)
    store = open_store(f"gs://{gcs.make_bucket()}/runs/one", config=StoreConfig.load(part_bytes=5 << 20, concurrency=3))
    assert isinstance(store, GcsStore)
    return store


class Refusing(http.server.BaseHTTPRequestHandler):
    """Answers everything as GCS answers one who may not: no server of GCS that runs here knows rights."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[str]] = []

    def answer(self) -> None:
        self.asked.append(f"{self.command} {self.path}")
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        said = "someone@example.com does not have storage.objects.get access to the Google Cloud Storage object."
        body = json.dumps({"error": {"code": 403, "message": said, "errors": [{"reason": "forbidden"}]}}).encode()
        self.send_response(403)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


for verb_of_http in ("GET", "POST", "PUT", "DELETE"):
    setattr(Refusing, f"do_{verb_of_http}", Refusing.answer)


@pytest.fixture
def refusing_gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(Refusing, "asked", [])
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield open_store(
        "gs://bucket/x", config=StoreConfig(endpoint_url=f"http://127.0.0.1:{server.server_port}", anonymous=True)
    )
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("verb", VERBS)
def test_gcs_that_refuses_is_asked_once_and_quoted(refusing_gcs: Store, verb: str):
    with pytest.raises(StoreError, match="GCS refuses") as caught:
        VERBS[verb](refusing_gcs)
    assert not isinstance(caught.value, (ObjectNotFound, ObjectExists, StoreUnavailable))
    assert "credentials" in str(caught.value)
    # `read` asks for the size first, the probe tidies up.
    assert len(Refusing.asked) == (2 if verb == "probe" else 1)


def test_s3_that_refuses_is_asked_once_and_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # moto lets two requests pass, whether it is up and the one for the bucket, and then wants to know who asks.
    monkeypatch.setenv("INITIAL_NO_AUTH_ACTION_COUNT", "2")
    with moto(tmp_path / "log") as server:
        set_all(monkeypatch, server.environment)
        store = open_store(f"s3://{server.make_bucket()}/x")
        assert isinstance(store, S3Store)
        sent = sent_by(store)
        for name, verb in VERBS.items():
            sent.clear()
            with pytest.raises(StoreError, match="S3 refuses") as caught:
                verb(store)
            assert not isinstance(caught.value, (ObjectNotFound, ObjectExists, StoreUnavailable)), name
            assert "credentials" in str(caught.value)
            assert len(sent) == (2 if name == "probe" else 1), name
            assert S3_ENVIRONMENT["AWS_SECRET_ACCESS_KEY"] not in str(caught.value).replace("/test", "")


@pytest.mark.parametrize("scheme", ["s3", "gs"])
@pytest.mark.parametrize("verb", ["create", "put", "read", "list", "probe"])
def test_missing_bucket_is_named(
    s3: ObjectServer, gcs: ObjectServer, scheme: str, verb: str, monkeypatch: pytest.MonkeyPatch
):
    set_all(monkeypatch, (s3 if scheme == "s3" else gcs).environment)
    store = open_store(f"{scheme}://there-is-none/x")
    with pytest.raises(StoreError, match="there is no such bucket") as caught:
        VERBS[verb](store)
    assert not isinstance(caught.value, (ObjectNotFound, StoreUnavailable))
    assert caught.value.found == "there-is-none"
    assert "Make it" in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "module", "extra"),
    [("s3", "boto3", "[s3]"), ("gs", "google.auth.credentials", "[gcs]")],
    ids=["s3", "gs"],
)
def test_missing_library_is_an_error_with_the_command(
    scheme: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(CompatibilityError) as caught:
        open_store(f"{scheme}://bucket/x")
    assert caught.value.hint == f"pip install 'vllm-delta-snapshot{extra}'"


@pytest.mark.parametrize(
    ("checksums", "has_them"),
    [("auto", False), ("when_required", False), ("when_supported", True)],
)
def test_checksum_modes_on_the_wire(s3: ObjectServer, checksums: str, has_them: bool, monkeypatch: pytest.MonkeyPatch):
    set_all(monkeypatch, s3.environment)
    config = StoreConfig.load(checksums=checksums, part_bytes=5 << 20, concurrency=2)
    store = open_store(f"s3://{s3.make_bucket()}/x", config=config)
    assert isinstance(store, S3Store)
    sent = sent_by(store)
    data = bytes(6 << 20)
    store.put("small", [memoryview(b"small")])
    store.put("large", [memoryview(data)])
    assert store.read_range("large", 1 << 20, memoryview(bytearray(8))) == 8
    assert store.read("small", max_bytes=10) == b"small"
    bodies = [request for request in sent if request.method == "PUT"]
    assert len(bodies) == 3
    for request in bodies:
        names = {name.lower() for name in request.headers}
        assert any(name.startswith("x-amz-checksum-") for name in names) == has_them
        if not has_them:  # then the signature itself holds the body
            request.body.seek(0)
            body = request.body.read()
            assert request.headers["X-Amz-Content-SHA256"] in (
                hashlib.sha256(body).hexdigest(),
                hashlib.sha256(body).hexdigest().encode(),
            )
    asked = [request for request in sent if request.method == "GET"]
    assert asked
    assert all(("x-amz-checksum-mode" in {name.lower() for name in get.headers}) == has_them for get in asked)


def test_gcs_composes_more_parts_than_one_request_takes(google: GcsStore):
    composer = Composer(google._bucket, "parts/", 4, {})
    parts = [bytes([number]) * 1000 for number in range(70)]
    assert composer.put("runs/one/many", parts) == 70_000
    assert google.read("many", max_bytes=100_000) == b"".join(parts)
    assert names_in(google) == ["runs/one/many"]


def test_gcs_upload_takes_no_more_parts_than_may_be_on_their_way(google: GcsStore):
    def parts() -> Iterator[bytes]:
        for number in range(12):
            assert len(names_in(google)) >= number - 3  # what was taken before has arrived
            yield b"part"

    assert Composer(google._bucket, "parts/", 3, {}).put("many", parts()) == 48


def test_gcs_object_that_is_not_what_was_sent_is_told_from_one_that_is(google: GcsStore):
    google.create("x", b"right")
    for data, is_right in ((b"right", True), (b"wrong", False), (b"righ", False)):
        checksum = Crc32c()
        list(checksum.of([data[:2], data[2:]]))
        assert google._is_as_written("x", checksum) == is_right


def test_gcs_parts_that_were_left_are_hidden_and_swept_once_they_are_old(google: GcsStore):
    for name in (f"runs/one/{FOLDER}/a/000000", f"runs/one/{FOLDER}/b/000001", f"runs/two/{FOLDER}/c/000000"):
        google._bucket.blob(name).upload_from_string(b"part")
    google.create("run.json", b"{}")
    assert google.list("") == ["run.json"]
    assert google.sweep(older_than_s=3600) == 0
    assert google.sweep(older_than_s=-60) == 2
    assert names_in(google) == ["runs/one/run.json", f"runs/two/{FOLDER}/c/000000"]


def test_gcs_upload_goes_in_one_where_parts_cannot_be_deleted(
    google: GcsStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    from google.api_core.exceptions import Forbidden
    from google.cloud.storage import Blob

    def refuse(*_: object, **__: object) -> None:  # as a bucket with a retention policy does
        raise Forbidden("retention policy")

    data = bytes(range(256)) * (11 << 12)
    monkeypatch.setattr(Blob, "delete", refuse)
    assert google.put("first", [memoryview(data)]) == len(data)
    assert "until they are swept" in caplog.text
    left = [name for name in names_in(google) if FOLDER in name]
    assert len(left) == 3
    assert google.put("second", [memoryview(data)]) == len(data)
    assert [name for name in names_in(google) if FOLDER in name] == left
    assert google.read("second", max_bytes=len(data)) == data


def test_gcs_put_whose_reply_was_lost_is_known_by_its_bytes(google: GcsStore, monkeypatch: pytest.MonkeyPatch):
    once = google._put_in_one

    def twice(name: str, source: Any, size: int) -> None:  # as the library does when no reply comes
        once(name, source, size)
        source.seek(0)
        once(name, source, size)

    monkeypatch.setattr(google, "_put_in_one", twice)
    assert google.put("x", [memoryview(b"mine")]) == 4
    assert google.read("x", max_bytes=10) == b"mine"


def test_gcs_put_while_another_writer_takes_the_name_is_refused(google: GcsStore):
    def chunks() -> Iterator[memoryview]:
        google.create("x", b"other")
        yield memoryview(b"mine!")

    with pytest.raises(ObjectExists):
        google.put("x", chunks())
    assert google.read("x", max_bytes=10) == b"other"


def set_all(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def sent_by(store: S3Store) -> list[Any]:
    """Return a list that grows by every request that goes out, tries that are made again among them."""
    sent: list[Any] = []

    def note(request: Any, **_: object) -> None:
        sent.append(request)

    store._client.meta.events.register("before-send.s3", note)
    return sent


def names_in(store: GcsStore) -> list[str]:
    return [blob.name for blob in store._client.list_blobs(store._bucket)]


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_doctor_says_that_there_is_no_such_bucket_and_what_the_clock_is_where_there_is_one(
    scheme: str, s3: ObjectServer, gcs: ObjectServer, monkeypatch: pytest.MonkeyPatch
):
    server = s3 if scheme == "s3" else gcs
    set_all(monkeypatch, server.environment)

    def checks_of(bucket: str) -> tuple[int, dict[str, dict[str, Any]]]:
        outcome = Outcome("doctor", "--sync-dir", f"{scheme}://{bucket}/run", "--json")
        return outcome.code, {check["name"]: check for check in outcome.json["checks"]}

    code, checks = checks_of("no-such-bucket")
    assert code == 1
    assert "there is no such bucket" in checks["run"]["detail"]
    _, checks = checks_of(server.make_bucket())
    assert "no run here" in checks["run"]["detail"]
    assert checks["exclusive create"]["detail"] == "works (a trainer may publish from here)"
    assert checks["clock"]["detail"].startswith("within ")
