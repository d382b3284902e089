"""How a store is reached: argument before environment before file, and what boto3 then does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.support.object_stores import S3_ENVIRONMENT
from vllm_delta_snapshot.errors import CorruptFile
from vllm_delta_snapshot.store import StoreConfig, open_store
from vllm_delta_snapshot.store.s3 import S3Store

PREFIX = "DELTA_SNAPSHOT_STORE_"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in StoreConfig.model_fields:
        monkeypatch.delenv(PREFIX + name.upper(), raising=False)
    for name, value in S3_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "store.json"
    path.write_text(json.dumps({"region": "from-file", "attempts": 7, "concurrency": 3}))
    monkeypatch.setenv(f"{PREFIX}CONFIG", str(path))
    return path


def test_argument_comes_before_environment_before_file_before_default(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(f"{PREFIX}REGION", "from-environment")
    monkeypatch.setenv(f"{PREFIX}ATTEMPTS", "6")
    config = StoreConfig.load(region="from-argument", attempts=None)
    assert (config.region, config.attempts, config.concurrency) == ("from-argument", 6, 3)
    assert config.part_bytes == StoreConfig().part_bytes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"attempts": 0}', "attempts"),
        ('{"endpoint": "http://x"}', "endpoint"),
        ("[]", "no JSON object"),
        ("{", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_wrong_file_is_named(file: Path, text: str | None, says: str):
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    with pytest.raises(CorruptFile, match=says) as caught:
        StoreConfig.load()
    assert caught.value.file == str(file)


def test_wrong_environment_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(f"{PREFIX}CONCURRENCY", "many")
    with pytest.raises(CorruptFile, match="concurrency") as caught:
        StoreConfig.load()
    assert f"{PREFIX}CONCURRENCY" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        pytest.param({}, "https://bucket.s3.amazonaws.com/run/x", id="Amazon"),
        pytest.param({"path_style": True}, "https://s3.amazonaws.com/bucket/run/x", id="Amazon, in the path"),
        pytest.param(
            {"region": "eu-central-1"}, "https://bucket.s3.eu-central-1.amazonaws.com/run/x", id="another region"
        ),
        pytest.param({"endpoint_url": "http://minio:9000"}, "http://minio:9000/bucket/run/x", id="endpoint"),
        pytest.param(
            {"endpoint_url": "https://r2.example.com", "path_style": False},
            "https://bucket.r2.example.com/run/x",
            id="endpoint, in the host",
        ),
    ],
)
def test_bucket_is_where_the_settings_say(given: dict[str, object], url: str):
    assert request_for(given).url == url


@pytest.mark.parametrize("anonymous", [True, False])
def test_credentials_are_sent_unless_told_otherwise(anonymous: bool):
    sent = request_for({"anonymous": anonymous, "endpoint_url": "http://x"})
    assert ("Authorization" in sent.headers) != anonymous


def test_region_of_an_endpoint_may_be_left_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    assert request_for({"endpoint_url": "http://minio:9000"}).url == "http://minio:9000/bucket/run/x"


class Sent(Exception):
    """A request on its way out."""


def request_for(given: dict[str, object]) -> Any:
    """Return the request that boto3 would send for an object; nothing is sent."""
    store = open_store("s3://bucket/run", config=StoreConfig.load(**given))
    assert isinstance(store, S3Store)

    def stop(request: Any, **_: object) -> NoReturn:
        raise Sent(request)

    store._client.meta.events.register("before-send.s3", stop)
    with pytest.raises(Sent) as caught:
        store.size("x")
    return caught.value.args[0]
