"""What GCS answers is taken as GCS means it, and what people set up for its library holds: real servers and sockets."""

from __future__ import annotations

import email.utils
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.fault_proxy import Fault, FaultProxy, Harm, fault_proxy
from tests.support.object_stores import ObjectServer, fake_gcs
from vllm_delta_snapshot.errors import ObjectExists, ObjectNotFound, StoreError, StoreUnavailable
from vllm_delta_snapshot.store import Store, StoreConfig, open_store
from vllm_delta_snapshot.store.gcs import GcsStore
from vllm_delta_snapshot.store.gcs_answers import error_of_credentials

pytestmark = pytest.mark.servers

PART = 5 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with fake_gcs(tmp_path_factory.mktemp("gcs") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def proxy(server: ObjectServer) -> Iterator[FaultProxy]:
    with fault_proxy(server) as proxy:
        yield proxy


@pytest.fixture
def store(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsStore]:
    for name, value in proxy.server.environment.items():
        monkeypatch.setenv(name, value)
    proxy.inject()
    # Tries are made for two seconds and a half.
    config = StoreConfig.load(part_bytes=PART, read_timeout_s=4, connect_timeout_s=1, attempts=2)
    store = open_store(f"gs://{proxy.server.make_bucket()}/run", config=config)
    assert isinstance(store, GcsStore)
    store.create("there", b"1234")
    yield store
    proxy.inject()


def put_parts(store: Store) -> None:
    store.put("large", [memoryview(bytes(2 * PART + 1))])
    assert store.size("large") == 2 * PART + 1


def read_tail(store: Store) -> bytes:
    into = bytearray(2)
    assert store.read_range("there", 2, memoryview(into)) == 2
    return bytes(into)


REQUESTS: dict[str, tuple[str, Callable[[Store], object]]] = {
    "create": ("^POST /upload/", lambda store: store.create("new", b"1")),
    "put": ("^POST /upload/", lambda store: store.put("new", [memoryview(b"1")])),
    "part": (r"(?s)^POST /upload/.*000001", put_parts),
    "end of an upload": ("^POST .*/compose", put_parts),
    "read": ("^GET .*alt=media", lambda store: store.read("there", max_bytes=10)),
    "size": ("^GET .*/o/run/there", lambda store: store.size("there")),
    "range": ("^GET .*alt=media", read_tail),
    "list": ("^GET .*/o?.*prefix=", lambda store: store.list("")),
    "delete": ("^DELETE .*/there", lambda store: store.delete("there")),
}


@pytest.mark.parametrize("status", [409, 429])
@pytest.mark.parametrize("what", REQUESTS)
def test_conflict_and_too_many_are_asked_again(what: str, status: int, proxy: FaultProxy, store: Store) -> None:
    where, act = REQUESTS[what]
    proxy.inject(Fault(Harm.REFUSE, where, 1, status=status, code="conflict"))
    act(store)
    assert proxy.done == 1


@pytest.mark.parametrize("what", ["create", "read", "list"])
def test_conflict_that_stays_may_pass_another_time(what: str, proxy: FaultProxy, store: Store) -> None:
    where, act = REQUESTS[what]
    proxy.inject(Fault(Harm.REFUSE, where, 1000, status=409, code="conflict"))
    with pytest.raises(StoreUnavailable, match="GCS is busy"):
        act(store)
    assert proxy.done > 1


def test_create_whose_answer_was_lost_is_known_as_own(proxy: FaultProxy, store: Store) -> None:
    proxy.inject(Fault(Harm.LOSE_REPLY, "^POST /upload/"))
    store.create("new", b"mine")
    assert len(proxy.times_of("^POST /upload/")) == 2
    assert store.read("new", max_bytes=10) == b"mine"


@pytest.mark.parametrize("theirs", [b"else", b"longer"])
def test_create_that_was_tried_twice_and_lost_is_not_own(theirs: bytes, proxy: FaultProxy, store: Store) -> None:
    store.create("new", theirs)
    proxy.inject(Fault(Harm.REFUSE, "^POST /upload/"))
    with pytest.raises(ObjectExists):
        store.create("new", b"mine")
    assert proxy.done == 1


def test_create_that_comes_second_with_the_same_bytes_is_second(store: Store) -> None:
    with pytest.raises(ObjectExists):
        store.create("there", b"1234")


def test_probe_whose_answer_was_lost_finds_no_rival(proxy: FaultProxy, store: Store) -> None:
    proxy.inject(Fault(Harm.LOSE_REPLY, "^POST /upload/"))
    store.check_exclusive_create()
    assert proxy.done == 1


@pytest.mark.parametrize("what", ["create", "put", "part", "end of an upload"])
def test_404_to_a_write_is_no_missing_object(what: str, proxy: FaultProxy, store: Store) -> None:
    where, act = REQUESTS[what]
    proxy.inject(Fault(Harm.REFUSE, where, 1000, status=404, said="No such object: x", code="notFound"))
    with pytest.raises(StoreUnavailable, match="did not take a write"):
        act(store)
    with pytest.raises(ObjectNotFound):
        store.size("new")


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize(
    ("what", "right"),
    [
        ("read", "right to read it (storage.objects.get"),
        ("range", "right to read it (storage.objects.get"),
        ("list", "right to list the bucket (storage.objects.list"),
        ("create", "right to write it (storage.objects.create"),
        ("part", "right to write it (storage.objects.create"),
        ("delete", "right to delete it (storage.objects.delete"),
    ],
)
def test_missing_right_is_the_one_that_the_request_needs(
    what: str, right: str, status: int, proxy: FaultProxy, store: Store
) -> None:
    where, act = REQUESTS[what]
    proxy.inject(Fault(Harm.REFUSE, where, 100, status=status, code="forbidden"))
    # One that sends no credentials is told so when it is asked for better ones.
    expected = right if status == 403 else "leave DELTA_SNAPSHOT_STORE_ANONYMOUS out"
    with pytest.raises(StoreError, match=re.escape(expected)) as caught:
        act(store)
    assert not isinstance(caught.value, StoreUnavailable)


def test_right_that_gcs_names_is_the_one_that_is_told(proxy: FaultProxy, store: Store) -> None:
    said = "someone does not have storage.objects.delete access to the Google Cloud Storage object."
    proxy.inject(Fault(Harm.REFUSE, "^POST", 100, status=403, said=said))
    with pytest.raises(StoreError, match=r"right to delete it \(storage.objects.delete"):
        store.create("new", b"1")


@pytest.mark.parametrize(
    ("status", "said", "what", "message"),
    [
        (403, "Object 'x' is subject to bucket's retention policy and cannot be deleted", "delete", "keeps it"),
        (403, "Object 'x' is under active Event-Based hold and cannot be deleted", "delete", "keeps it"),
        (403, "The billing account for the owning project is disabled in state absent", "read", "nobody pays"),
        (400, "Bucket is a requester pays bucket but no user project provided.", "list", "nobody pays"),
        (400, "The target object is encrypted by a customer-supplied encryption key.", "read", "key that encrypts"),
    ],
)
def test_refusal_of_another_kind_is_no_missing_right(
    status: int, said: str, what: str, message: str, proxy: FaultProxy, store: Store
) -> None:
    where, act = REQUESTS[what]
    proxy.inject(Fault(Harm.REFUSE, where, 100, status=status, said=said, code="forbidden"))
    with pytest.raises(StoreError, match=message) as caught:
        act(store)
    assert "need the right" not in str(caught.value)
    assert not isinstance(caught.value, StoreUnavailable)


def test_rate_that_is_exceeded_may_pass_though_it_is_a_403(proxy: FaultProxy, store: Store) -> None:
    proxy.inject(Fault(Harm.REFUSE, "^GET", 100, status=403, code="userRateLimitExceeded"))
    with pytest.raises(StoreUnavailable, match="busy"):
        store.size("there")


# --- credentials and the clock


class Token:
    """Credentials that have a token, and get no other."""

    def __new__(cls) -> Token:
        from google.oauth2.credentials import Credentials

        return Credentials(token="t")  # type: ignore[return-value]


@pytest.mark.parametrize(("hours", "is_skewed"), [(-2, True), (2, True), (0, False)])
def test_401_of_a_wrong_clock_is_told_from_expired_credentials(
    hours: int, is_skewed: bool, proxy: FaultProxy, store: GcsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from google.auth.transport.requests import AuthorizedSession

    from vllm_delta_snapshot.store.gcs_answers import check_answer

    session = AuthorizedSession(Token(), max_refresh_attempts=0)
    session.hooks["response"].append(check_answer)
    monkeypatch.setattr(store._client, "_http_internal", session)
    date = email.utils.formatdate(time.time() + hours * 3600, usegmt=True)
    proxy.inject(Fault(Harm.REFUSE, ".", 100, status=401, said="Invalid Credentials", headers=(("Date", date),)))
    with pytest.raises(StoreError) as caught:
        store.size("there")
    assert ("the clock of this machine is wrong" in str(caught.value)) == is_skewed
    if is_skewed:
        assert ("ahead of" if hours < 0 else "behind") in str(caught.value)
    else:
        assert "Renew them (gcloud auth application-default login" in str(caught.value)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("invalid_grant: Invalid JWT: Token must be a short-lived token and in a reasonable timeframe.", "clock"),
        ("Reauthentication is needed. Please run `gcloud auth application-default login`", "cannot be renewed"),
    ],
)
def test_credentials_that_cannot_be_renewed_say_why(said: str, message: str) -> None:
    from google.auth.exceptions import RefreshError

    assert message in error_of_credentials(RefreshError(said), "gs://bucket/x").what


# --- what only looks like success


@pytest.mark.parametrize("what", [what for what in REQUESTS if what not in ("part", "put")])
def test_page_to_log_in_at_is_no_answer(what: str, proxy: FaultProxy, store: Store) -> None:
    where, act = REQUESTS[what]
    proxy.inject(Fault(Harm.PAGE, where, 1000))
    with pytest.raises(StoreUnavailable, match="what answered is not GCS") as caught:
        act(store)
    assert "page of HTML" in str(caught.value)
    proxy.inject()
    with pytest.raises(ObjectNotFound):
        store.size("new")


def test_whole_object_is_not_taken_for_a_part(proxy: FaultProxy, store: Store) -> None:
    proxy.inject(Fault(Harm.WHOLE, "alt=media", 1))
    assert read_tail(store) == b"34"
    assert proxy.done == 1
    proxy.inject(Fault(Harm.WHOLE, "alt=media", 1000))
    with pytest.raises(StoreUnavailable, match="bytes from 0 on, where those from 2 on"):
        read_tail(store)


@pytest.mark.parametrize("what", ["read", "range"])
def test_bytes_compressed_on_their_way_are_not_taken(what: str, proxy: FaultProxy, store: Store) -> None:
    where, act = REQUESTS[what]
    proxy.inject(Fault(Harm.GZIP, where, 1000))
    with pytest.raises(StoreUnavailable, match=r"encoded \(gzip\) between GCS and here"):
        act(store)


def test_object_stored_compressed_is_named(proxy: FaultProxy, store: GcsStore) -> None:
    blob = store._bucket.blob("run/packed")
    blob.content_encoding = "gzip"
    blob.upload_from_string(b"\x1f\x8b not really")
    with pytest.raises(StoreError, match="stored compressed"):
        store.read("packed", max_bytes=100)


def test_object_replaced_between_its_size_and_its_bytes_is_not_taken(proxy: FaultProxy, store: Store) -> None:
    # fake-gcs-server looks at no such condition; that it is sent, and what its answer means, is what is tested.
    proxy.inject(
        Fault(Harm.REFUSE, "^GET .*alt=media.*ifGenerationMatch=[1-9]", 100, status=412, code="conditionNotMet")
    )
    with pytest.raises(StoreUnavailable, match="replaced while it was read"):
        store.read("there", max_bytes=10)


def test_listing_that_goes_round_in_circles_ends(proxy: FaultProxy, store: Store) -> None:
    body = '{"items": [], "nextPageToken": "again"}'
    proxy.inject(Fault(Harm.REFUSE, "^GET .*prefix=", 100, status=200, body=body))
    with pytest.raises(StoreUnavailable, match="repeats a page"):
        store.list("")
    assert proxy.done == 2


def test_listing_of_another_folder_is_not_taken(proxy: FaultProxy, store: Store) -> None:
    body = '{"items": [{"name": "other/00000001.json", "size": "1"}]}'
    proxy.inject(Fault(Harm.REFUSE, "^GET .*prefix=", 100, status=200, body=body))
    with pytest.raises(StoreUnavailable, match="a listing is of another folder"):
        store.list("versions")


# --- what was set up for the library


def test_emulator_of_the_library_s_own_setting_is_used(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in server.environment:
        monkeypatch.delenv(name, raising=False)
    bucket = server.make_bucket()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "emulated")
    store = open_store(f"gs://{bucket}/run")
    store.create("x", b"1")
    assert store.list("") == ["x"]
    assert abs(store.now() - time.time()) < 60
