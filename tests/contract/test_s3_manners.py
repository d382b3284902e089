"""What S3 answers is taken as S3 means it, and what people set up for boto3 holds: real servers, real sockets."""

from __future__ import annotations

import contextlib
import email.utils
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fault_proxy import Fault, FaultProxy, Harm, fault_proxy
from tests.support.object_stores import ministack
from vllm_delta_snapshot.cli.doctor.storage import store_checks
from vllm_delta_snapshot.errors import ObjectExists, ObjectNotFound, StoreError, StoreUnavailable
from vllm_delta_snapshot.store import Store, StoreConfig, open_store
from vllm_delta_snapshot.store.s3 import S3Store

pytestmark = pytest.mark.servers

PART = 5 << 20


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultProxy]:
    with ministack(tmp_path_factory.mktemp("s3") / "log") as server, fault_proxy(server) as proxy:
        yield proxy


@pytest.fixture
def store(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    for name, value in proxy.server.environment.items():
        monkeypatch.setenv(name, value)
    proxy.inject()
    store = open_store(f"s3://{proxy.server.make_bucket()}/run", config=StoreConfig.load(part_bytes=PART))
    store.create("there", b"1234")
    yield store
    proxy.inject()


def read(store: Store) -> bytes:
    return store.read("there", max_bytes=10)


def put_parts(store: Store) -> None:
    store.put("large", [memoryview(bytes(2 * PART + 1))])
    assert store.size("large") == 2 * PART + 1


REQUESTS: dict[str, tuple[str, Callable[[Store], object]]] = {
    "create": ("^PUT .*/new", lambda store: store.create("new", b"1")),
    "put": ("^PUT .*/new", lambda store: store.put("new", [memoryview(b"1")])),
    "begin of an upload": ("^POST .*uploads", put_parts),
    "part": ("^PUT .*partNumber=2", put_parts),
    "end of an upload": ("^POST .*uploadId=", put_parts),
    "read": ("^GET .*/there", read),
    "size": ("^HEAD .*/there", lambda store: store.size("there")),
    "range": ("^GET .*/there", lambda store: store.read_range("there", 0, memoryview(bytearray(4)))),
    "list": ("^GET .*list-type=2", lambda store: store.list("")),
    "delete": ("^DELETE .*/there", lambda store: store.delete("there")),
}


@pytest.mark.parametrize(
    ("what", "code"),
    # The answer to HEAD has no body, and so no code that says what a 409 is.
    [("create", "ConditionalRequestConflict"), *((what, "OperationAborted") for what in REQUESTS if what != "size")],
)
def test_conflict_is_asked_again_as_s3_asks(what: str, code: str, proxy: FaultProxy, store: Store) -> None:
    where, act = REQUESTS[what]
    proxy.inject(Fault(Harm.REFUSE, where, 2, status=409, code=code))
    act(store)
    assert proxy.done == 2


def test_conflict_that_stays_ends_after_the_attempts_that_were_set(proxy: FaultProxy, store: Store) -> None:
    proxy.inject(Fault(Harm.REFUSE, "^PUT .*/new", 100, status=409, code="OperationAborted"))
    with pytest.raises(StoreUnavailable):
        store.create("new", b"1")
    assert proxy.done == StoreConfig().attempts
    proxy.inject()
    with pytest.raises(ObjectNotFound):
        store.size("new")


@pytest.mark.parametrize("what", ["create", "read", "list"])
@pytest.mark.parametrize("code", ["RequestTimeTooSkewed", "RequestExpired"])
def test_wrong_clock_is_called_one_and_by_how_much(what: str, code: str, proxy: FaultProxy, store: Store) -> None:
    where, act = REQUESTS[what]
    date = email.utils.formatdate(time.time() + 3600, usegmt=True)
    proxy.inject(Fault(Harm.REFUSE, where, 100, status=403, code=code, headers=(("Date", date),)))
    with pytest.raises(StoreError, match="the clock of this machine is wrong") as caught:
        act(store)
    assert "s behind the store" in str(caught.value)
    assert "Set the clock" in str(caught.value)
    assert "credentials" not in str(caught.value)


@pytest.mark.parametrize("what", ["create", "put", "part"])
def test_404_to_a_write_is_no_missing_object(what: str, proxy: FaultProxy, store: Store) -> None:
    where, act = REQUESTS[what]
    proxy.inject(Fault(Harm.REFUSE, where, 100, status=404, code="NoSuchKey"))
    with pytest.raises(StoreUnavailable, match="did not take a write"):
        act(store)


def test_expired_token_is_no_missing_right(proxy: FaultProxy, store: Store) -> None:
    proxy.inject(Fault(Harm.REFUSE, ".", 100, status=400, code="ExpiredToken"))
    with pytest.raises(StoreError, match=r"have expired.*Renew"):
        read(store)


def test_archived_object_says_so_and_how_to_restore_it(proxy: FaultProxy, store: Store) -> None:
    proxy.inject(Fault(Harm.REFUSE, "^GET .*/there", 100, status=403, code="InvalidObjectState"))
    with pytest.raises(StoreError, match=r"archived.*aws s3api restore-object --bucket .* --key run/there"):
        read(store)


@pytest.mark.parametrize(
    ("what", "right", "other"),
    [
        ("read", "right to read it (s3:GetObject", "write"),
        ("range", "right to read it (s3:GetObject", "write"),
        ("list", "right to list the bucket (s3:ListBucket", "write"),
        ("create", "right to write it (s3:PutObject", "read it"),
        ("part", "right to write it (s3:PutObject", "read it"),
        ("delete", "right to delete it (s3:DeleteObject", "read it"),
    ],
)
def test_missing_right_is_the_one_that_the_request_needs(
    what: str, right: str, other: str, proxy: FaultProxy, store: Store
) -> None:
    where, act = REQUESTS[what]
    proxy.inject(Fault(Harm.REFUSE, where, 100, status=403, code="AccessDenied"))
    with pytest.raises(StoreError, match="S3 refuses") as caught:
        act(store)
    assert right in str(caught.value)
    assert other not in str(caught.value.hint)


# --- what only looks like success


@pytest.mark.parametrize("what", [what for what in REQUESTS if what not in ("begin of an upload", "part")])
def test_page_to_log_in_at_is_no_answer(what: str, proxy: FaultProxy, store: Store) -> None:
    where, act = REQUESTS[what]
    proxy.inject(Fault(Harm.PAGE, where, 1000))
    with pytest.raises(StoreUnavailable, match="what answered is not S3"):
        act(store)
    proxy.inject()
    with pytest.raises(ObjectNotFound):
        store.size("new")


@pytest.mark.parametrize(
    ("what", "found"),
    [("create", "without an ETag"), ("put", "without an ETag"), ("list", "no listing")],
)
def test_answer_that_says_nothing_is_no_success(what: str, found: str, proxy: FaultProxy, store: Store) -> None:
    where, act = REQUESTS[what]
    proxy.inject(Fault(Harm.REFUSE, where, 1000, status=200, body="<Fine/>"))
    with pytest.raises(StoreUnavailable, match=found):
        act(store)


def read_tail(store: Store) -> bytes:
    into = bytearray(2)
    assert store.read_range("there", 2, memoryview(into)) == 2
    return bytes(into)


def test_whole_object_is_not_taken_for_a_part(proxy: FaultProxy, store: Store) -> None:
    proxy.inject(Fault(Harm.WHOLE, "^GET", 1))
    assert read_tail(store) == b"34"
    assert proxy.done == 1
    proxy.inject(Fault(Harm.WHOLE, "^GET", 1000))
    with pytest.raises(StoreUnavailable, match="another range than was asked for"):
        read_tail(store)


def test_whole_object_is_not_taken_for_a_longer_range_of_it(proxy: FaultProxy, store: Store) -> None:
    into = bytearray(4)  # as long as the object, of which two bytes are wanted
    proxy.inject(Fault(Harm.WHOLE, "^GET", 1))
    assert store.read_range("there", 2, memoryview(into)) == 2
    assert into[:2] == b"34"


@pytest.mark.parametrize("what", ["read", "range"])
def test_bytes_compressed_on_their_way_are_not_taken(what: str, proxy: FaultProxy, store: Store) -> None:
    where, act = REQUESTS[what]
    proxy.inject(Fault(Harm.GZIP, where, 1000))
    with pytest.raises(StoreUnavailable, match=r"encoded \(gzip\)"):
        act(store)


def test_error_in_an_answer_that_says_200_is_one(proxy: FaultProxy, store: Store) -> None:
    where, act = REQUESTS["end of an upload"]
    proxy.inject(Fault(Harm.REFUSE, where, 1, status=200, code="InternalError"))
    act(store)
    assert proxy.done == 1
    store.delete("large")
    proxy.inject(Fault(Harm.REFUSE, where, 1000, status=200, code="InternalError"))
    with pytest.raises(StoreUnavailable):
        act(store)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("<IsTruncated>true</IsTruncated>", "ends before its end"),
        ("<IsTruncated>true</IsTruncated><NextContinuationToken>x</NextContinuationToken>", "token"),
        ("<IsTruncated>false</IsTruncated><Contents><Key>other/1</Key></Contents>", "of another folder"),
    ],
)
def test_listing_that_is_not_whole_is_not_taken(body: str, message: str, proxy: FaultProxy, store: Store) -> None:
    body = f"<ListBucketResult><Name>b</Name>{body}</ListBucketResult>"
    proxy.inject(Fault(Harm.REFUSE, "^GET .*list-type=2", 100, status=200, body=body))
    with pytest.raises(StoreUnavailable, match=message):
        store.list("")


# --- conditional writes whose answer is lost


def test_create_whose_answer_was_lost_is_known_as_own(proxy: FaultProxy, store: Store) -> None:
    proxy.inject(Fault(Harm.LOSE_REPLY, "^PUT .*/new"))
    store.create("new", b"mine")
    assert len(proxy.times_of("^PUT .*/new")) == 2
    assert store.read("new", max_bytes=10) == b"mine"


@pytest.mark.parametrize("theirs", [b"else", b"longer"])
def test_create_that_was_tried_twice_and_lost_is_not_own(theirs: bytes, proxy: FaultProxy, store: Store) -> None:
    store.create("new", theirs)
    proxy.inject(Fault(Harm.REFUSE, "^PUT .*/new"))
    with pytest.raises(ObjectExists):
        store.create("new", b"mine")
    assert proxy.done == 1


def test_create_that_comes_second_with_the_same_bytes_is_second(store: Store) -> None:
    with pytest.raises(ObjectExists):
        store.create("there", b"1234")


def test_probe_whose_answer_was_lost_finds_no_rival(proxy: FaultProxy, store: Store) -> None:
    proxy.inject(Fault(Harm.LOSE_REPLY, "^PUT"))
    store.check_exclusive_create()
    assert proxy.done == 1


# --- what was set up for boto3


@contextlib.contextmanager
def client_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aws_config: str, environment: dict[str, str], ours: dict[str, Any]
) -> Iterator[Any]:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_MAX_ATTEMPTS", "AWS_RETRY_MODE", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "config").write_text(aws_config)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    store = open_store("s3://bucket/run", config=StoreConfig(**ours))
    assert isinstance(store, S3Store)
    yield store._client


OWN = {"endpoint_url": "http://ours.example.com"}


@pytest.mark.parametrize(
    ("aws_config", "environment", "ours", "expected"),
    [
        ("", {}, {}, "when_supported"),  # boto3's own default
        ("", {}, OWN, "when_required"),
        ("", {"AWS_ENDPOINT_URL": "http://aws.example.com"}, {}, "when_supported"),
        ("", {"AWS_REQUEST_CHECKSUM_CALCULATION": "when_required"}, {}, "when_required"),
        ("", {"AWS_REQUEST_CHECKSUM_CALCULATION": "when_supported"}, OWN, "when_supported"),
        ("[default]\nrequest_checksum_calculation = when_required\n", {}, {}, "when_required"),
        ("[default]\nrequest_checksum_calculation = when_supported\n", {}, OWN, "when_supported"),
        ("", {"AWS_REQUEST_CHECKSUM_CALCULATION": "when_required"}, {"checksums": "when_supported"}, "when_supported"),
    ],
)
def test_checksums_are_as_aws_settings_say_unless_ours_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aws_config: str, environment: dict[str, str], ours, expected: str
) -> None:
    with client_with(tmp_path, monkeypatch, aws_config, environment, ours) as client:
        assert client.meta.config.request_checksum_calculation == expected


@pytest.mark.parametrize(
    ("aws_config", "environment", "ours", "expected"),
    [
        ("", {}, {}, ("standard", 5)),
        ("", {"AWS_MAX_ATTEMPTS": "9"}, {}, (None, 9)),
        ("", {"AWS_RETRY_MODE": "adaptive"}, {}, ("adaptive", None)),
        ("[default]\nmax_attempts = 7\nretry_mode = standard\n", {}, {}, ("standard", 7)),
        ("", {"AWS_MAX_ATTEMPTS": "9"}, {"attempts": 2}, ("standard", 2)),
    ],
)
def test_retries_are_as_aws_settings_say_unless_ours_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aws_config: str, environment: dict[str, str], ours, expected
) -> None:
    with client_with(tmp_path, monkeypatch, aws_config, environment, ours) as client:
        mode, attempts = expected
        assert mode in (None, client.meta.config.retries["mode"])
        assert attempts in (None, client.meta.config.retries.get("total_max_attempts"))


@pytest.mark.parametrize(
    ("aws_config", "environment", "ours", "expected"),
    [
        ("", {}, OWN, "http://ours.example.com/bucket/run/x"),
        ("", {"AWS_ENDPOINT_URL": "http://aws.example.com"}, OWN, "http://ours.example.com/bucket/run/x"),
        ("[default]\ns3 =\n  addressing_style = virtual\n", {}, OWN, "http://bucket.ours.example.com/run/x"),
        ("[default]\ns3 =\n  addressing_style = path\n", {}, {}, "https://s3.amazonaws.com/bucket/run/x"),
        (
            "[default]\ns3 =\n  addressing_style = path\n",
            {},
            OWN | {"path_style": False},
            "http://bucket.ours.example.com/run/x",
        ),
        (
            "[default]\nservices = mine\n[services mine]\ns3 =\n  endpoint_url = http://file.example.com\n",
            {},
            {"path_style": True},
            "http://file.example.com/bucket/run/x",
        ),
        (
            "",
            {"AWS_ENDPOINT_URL_S3": "http://env.example.com"},
            {"path_style": True},
            "http://env.example.com/bucket/run/x",
        ),
    ],
)
def test_endpoint_and_addressing_are_as_aws_settings_say_unless_ours_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aws_config: str, environment: dict[str, str], ours, expected: str
) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with client_with(tmp_path, monkeypatch, aws_config, environment, ours) as client:
        url = client.generate_presigned_url("get_object", Params={"Bucket": "bucket", "Key": "run/x"})
        assert url.partition("?")[0] == expected


# --- doctor


def test_doctor_shows_what_was_set_up_and_fails_on_a_clock_that_is_wrong(
    proxy: FaultProxy, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "3")
    found = {check.name: check for check in store_checks(store.uri)}
    assert f"endpoint {proxy.server.url}" in found["store set-up"].detail
    assert "with 3 tries" in found["store set-up"].detail
    assert found["clock"].is_ok
    proxy.inject(Fault(Harm.REFUSE, ".", 100, status=403, code="RequestTimeTooSkewed"))
    found = {check.name: check for check in store_checks(store.uri)}
    assert not found["clock"].is_ok
    assert "clock of this machine is wrong" in found["clock"].detail + found["clock"].hint
