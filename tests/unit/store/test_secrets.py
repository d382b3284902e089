"""Credentials in addresses are refused before anything is done with them, and no message repeats them."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.checkpoints import snapshot_of, write_checkpoint
from tests.support.runs import TinyTrainer
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.cli.app import app
from vllm_delta_snapshot.drive.client import ServerClient, ServerError
from vllm_delta_snapshot.errors import CompatibilityError, CorruptFile, DeltaSnapshotError, StoreError
from vllm_delta_snapshot.store import StoreConfig, open_store
from vllm_delta_snapshot.store.secrets import has_credentials

SECRET = "hunter2hunter2"
ADDRESSES = [
    f"s3://AKIAEXAMPLE:{SECRET}@bucket/runs/one",
    f"s3://AKIAEXAMPLE:{SECRET}@bucket/runs/one@3",
    f"s3://{SECRET}@bucket/runs/one",
    f"gs://user:{SECRET}@bucket/runs/one",
    f"s3://bucket/runs/one?X-Amz-Credential=AKIA&X-Amz-Signature={SECRET}",
    f"gs://bucket/runs/one?GoogleAccessId=a&Signature={SECRET}",
    f"s3://bucket/one?versionId=1&AWSAccessKeyId={SECRET}&Expires=1",
    f"https://bucket.example/runs/one?X-Amz-Signature={SECRET}",
    f"https://user:{SECRET}@store.example/one",
    f"file://user:{SECRET}@host/one",
]
VERBS: dict[str, Callable[[str], list[str]]] = {
    "inspect": lambda uri: ["inspect", uri],
    "log": lambda uri: ["log", uri],
    "verify": lambda uri: ["verify", uri],
    "sync": lambda uri: ["sync", uri, "--server", "http://127.0.0.1:9"],
    "sync --server": lambda uri: ["sync", "/nowhere", "--server", uri],
    "follow": lambda uri: ["follow", "--sync-dir", uri, "--server", "http://127.0.0.1:9"],
    "follow --server": lambda uri: ["follow", "--sync-dir", "/nowhere", "--server", uri],
    "repair --server": lambda uri: ["repair", "--server", uri],
    "doctor": lambda uri: ["doctor", "--sync-dir", uri],
    "materialize": lambda uri: ["materialize", uri, "out"],
    "export": lambda uri: ["export", uri, "out"],
}


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("verb", VERBS)
def test_verb_that_is_given_credentials_in_an_address_shows_them_nowhere(
    verb: str, as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.DEBUG)
    for address in ADDRESSES:
        done = CliRunner().invoke(app, [*VERBS[verb](address), *(["--json"] if as_json else [])])
        assert done.exit_code != 0
        # Typer's own messages about usage would mean that the verb itself was never asked.
        assert "Usage:" not in done.output
        assert SECRET not in done.output + done.stderr
        assert SECRET not in "".join(traceback.format_exception(done.exception))
    assert SECRET not in caplog.text
    assert snapshot_of(tmp_path) == {}


@pytest.mark.parametrize("address", ADDRESSES)
def test_publisher_refuses_an_address_with_credentials(address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    trainer = TinyTrainer()
    base = write_checkpoint(tmp_path / "base", trainer.weights)
    with pytest.raises((StoreError, CompatibilityError)) as caught:
        DeltaPublisher(trainer, sync_dir=address, base=base)
    assert SECRET not in shown(caught.value) + caplog.text


@pytest.mark.parametrize("how", ["argument", "environment", "file"])
@pytest.mark.parametrize("url", [f"http://user:{SECRET}@127.0.0.1:9", f"http://h/?X-Amz-Signature={SECRET}"])
def test_endpoint_with_credentials_is_refused(url: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given = {}
    if how == "argument":
        given = {"endpoint_url": url}
    elif how == "environment":
        monkeypatch.setenv("DELTA_SNAPSHOT_STORE_ENDPOINT_URL", url)
    else:
        (tmp_path / "config.json").write_text(f'{{"endpoint_url": "{url}"}}')
        monkeypatch.setenv("DELTA_SNAPSHOT_STORE_CONFIG", str(tmp_path / "config.json"))
    with pytest.raises(StoreError, match="endpoint_url holds credentials") as caught:
        StoreConfig.load(**given)
    assert SECRET not in shown(caught.value)


@pytest.mark.parametrize("fields", [f'{{"secret_key": "{SECRET}"}}', f'{{"endpoint_url": ["{SECRET}"]}}'])
def test_wrong_configuration_is_named_and_its_values_are_not(
    fields: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "config.json").write_text(fields)
    monkeypatch.setenv("DELTA_SNAPSHOT_STORE_CONFIG", str(tmp_path / "config.json"))
    with pytest.raises(CorruptFile) as caught:
        StoreConfig.load()
    assert SECRET not in shown(caught.value)


@pytest.mark.parametrize(
    "url", [f"http://user:{SECRET}@host:8000", f"user:{SECRET}@host:8000", f"http://h/?token={SECRET}"]
)
def test_server_with_credentials_in_its_url_is_refused(url: str):
    with pytest.raises(ServerError) as caught:
        ServerClient(url)
    assert SECRET not in shown(caught.value)


@pytest.mark.parametrize(
    "address",
    ["/a@b/c?token=1", "s3://bucket/a@b", "s3://bucket@3", "s3://bucket/run@12", "gs://b/signature", "s3://b/x?y=1"],
)
def test_address_without_credentials_is_none_with_them(address: str):
    assert not has_credentials(address)


def test_address_in_a_folder_is_opened_as_it_is(tmp_path: Path):
    assert open_store(str(tmp_path / "a@b")).uri == f"{tmp_path}/a@b"


def shown(error: DeltaSnapshotError) -> str:
    """Return all that a log or an answer could show of an error: the traceback with its causes, and the fields."""
    return "".join(traceback.format_exception(error)) + str(error.to_fields())
