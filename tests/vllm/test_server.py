"""The main job over HTTP: a real server takes versions while it streams, in every mode of pausing."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tests.support import damage
from tests.support.digests import parameters_in
from tests.support.engines import PROMPTS, engine
from tests.support.server import CheckedServer, greedy, server, stream
from tests.support.tiny_models import make_model, train_step
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.cli.app import app
from vllm_delta_snapshot.drive import ServerClient, ServerError, sync_server, verify_server
from vllm_delta_snapshot.drive.labels import confirm_label
from vllm_delta_snapshot.drive.sync import _wait_prepared
from vllm_delta_snapshot.errors import BaseMismatch, CompatibilityError, CorruptFile, OutOfOrder
from vllm_delta_snapshot.runs.materialize import materialize
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import open_store

LONG = 400


class Setup:
    """A trainer, its run, and a server that follows it."""

    def __init__(self, folder: Path) -> None:
        self.base, self.sync_dir, self.log = folder / "base", folder / "run", folder / "server.log"
        self.model = make_model("qwen3", self.base)
        self.publisher = DeltaPublisher(self.model, sync_dir=str(self.sync_dir), base=self.base, asynchronous=False)
        self.client: CheckedServer

    def label(self, version: int) -> str:
        """Return the label of a version."""
        return f"{self.publisher.run_id}@{version}"

    def publish(self) -> int:
        """Train a step and publish it."""
        train_step(self.model, self.publisher.version + 1)
        return self.publisher.publish().version


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    folder = tmp_path_factory.mktemp("server")
    made = Setup(folder)
    with server(made.base, made.log, DELTA_SNAPSHOT_STAGE_DIR=str(folder / "stage")) as client:
        made.client = client
        client.init(sync_dir=str(made.sync_dir))
        yield made


def test_server_takes_a_version_and_its_label(setup: Setup) -> None:
    before = (setup.client.checksums(), greedy(setup.client, list(PROMPTS[0]), 16))
    version = setup.publish()
    report = sync_server(setup.client, version, run_id=setup.publisher.run_id)
    assert report.version == version
    assert report.is_cache_reset
    assert setup.client.weight_version() == f"{setup.publisher.run_id}@{version}"
    assert not setup.client.is_paused()
    after = (setup.client.checksums(), greedy(setup.client, list(PROMPTS[0]), 16))
    assert after[0] != before[0]
    assert after[1] != before[1]


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_running_requests_get_all_their_tokens_across_an_update(setup: Setup, mode) -> None:
    version = setup.publish()
    events = stream(setup.client, list(PROMPTS[1]), LONG)
    tokens, _ = next(events)
    sync_server(setup.client, version, pause_mode=mode, run_id=setup.publisher.run_id)
    reasons = []
    for more, reason in events:
        tokens = tokens + more
        reasons.append(reason)
    assert len(tokens) == LONG
    assert reasons[-1] == "length"
    assert setup.client.weight_version() == setup.label(version)


def test_pause_by_abort_ends_running_requests(setup: Setup) -> None:
    # On a busy machine a request can come to its end before the pause; of a few, one is met running.
    reasons = []
    while "abort" not in reasons and len(reasons) < 8:
        version = setup.publish()
        _wait_prepared(setup.client, "prepare", {"version": version, "run": setup.publisher.run_id}, 60)
        events = stream(setup.client, list(PROMPTS[1]), LONG)
        next(events)
        sync_server(setup.client, version, pause_mode="abort", run_id=setup.publisher.run_id)
        reasons.append([reason for _, reason in events][-1])
    assert reasons[-1] == "abort"
    assert set(reasons[:-1]) <= {"length"}
    assert len(greedy(setup.client, list(PROMPTS[0]), 4)) == 4


def test_no_cached_prefix_of_old_weights_is_used(setup: Setup) -> None:
    prompt = [int(token) for token in range(3, 300)]
    greedy(setup.client, prompt, 8)  # fills the prefix cache with old keys and values
    version = setup.publish()
    events = stream(setup.client, prompt, LONG // 4)  # holds the cache while the version changes
    next(events)
    assert sync_server(setup.client, version, run_id=setup.publisher.run_id).is_cache_reset
    cached = greedy(setup.client, prompt, 8)
    for _ in events:
        pass
    assert setup.client.reset_caches(running_requests=True)
    assert greedy(setup.client, prompt, 8) == cached


def test_repeated_version_changes_nothing(setup: Setup) -> None:
    before = setup.client.checksums()
    sync_server(setup.client, setup.publisher.version, run_id=setup.publisher.run_id)
    assert setup.client.checksums() == before


def test_damaged_version_is_refused_and_the_server_goes_on(setup: Setup) -> None:
    label = setup.client.weight_version()
    before = setup.client.checksums()
    with pytest.raises(ServerError, match="the engine is past that version"):
        sync_server(setup.client, 1, run_id=setup.publisher.run_id)
    version = setup.publish()
    (folder,) = (setup.sync_dir / "deltas").glob(f"{version:08d}-*")
    good = shutil.copytree(folder, setup.sync_dir.with_name("good"))
    damage.flip_first_byte(folder / "delta.safetensors")
    # The stager may have been faster than the damage; then the version it took is exact.
    with contextlib.suppress(ServerError):
        sync_server(setup.client, version, run_id=setup.publisher.run_id)
        label, before = setup.label(version), setup.client.checksums()
    assert (setup.client.weight_version(), setup.client.checksums()) == (label, before)
    assert not setup.client.is_paused()
    assert len(greedy(setup.client, list(PROMPTS[0]), 4)) == 4
    shutil.copy(good / "delta.safetensors", folder / "delta.safetensors")
    _until_taken(setup, version)


def _until_taken(setup: Setup, version: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            sync_server(setup.client, version, run_id=setup.publisher.run_id)
        except ServerError as error:
            if error.kind is not CorruptFile or time.monotonic() > deadline:
                raise
            time.sleep(0.1)  # polling: the stager looks again every two seconds
        else:
            return


def test_vllms_own_weight_checker_agrees_where_it_exists(setup: Setup) -> None:
    try:
        theirs = ServerClient.checksums(setup.client)
    except ServerError as error:
        if error.status == 404:
            pytest.skip("this vLLM has no /weight_checker (new in 0.32)")
        raise
    ours = parameters_in(setup.client.checksums())
    assert {name.rpartition(":")[2]: digest for name, digest in theirs.items()} == ours


def test_weights_that_drifted_are_repaired_by_the_next_update_and_by_command(setup: Setup) -> None:
    right = setup.client.checksums()
    tokens = greedy(setup.client, list(PROMPTS[0]), 16)
    setup.client.drift()
    assert setup.client.checksums() != right
    done = CliRunner().invoke(app, ["repair", "--server", setup.client.url, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["ok"] is True
    assert setup.client.checksums() == right
    assert greedy(setup.client, list(PROMPTS[0]), 16) == tokens
    setup.client.drift()
    version = setup.publish()
    with pytest.raises(ServerError, match=r"changed by something else|does not lead from the live weights") as caught:
        sync_server(setup.client, version, repair=False, run_id=setup.publisher.run_id)
    assert caught.value.kind is BaseMismatch
    sync_server(setup.client, version, run_id=setup.publisher.run_id)
    verify_server(setup.client, version)
    assert not setup.client.is_paused()


def test_version_that_never_comes_times_out_without_a_pause(setup: Setup) -> None:
    with pytest.raises(ServerError, match="NotStaged"):
        sync_server(setup.client, setup.publisher.version + 5, stage_timeout_s=0.5, run_id=setup.publisher.run_id)
    assert not setup.client.is_paused()
    # An answer, not an error: no process of the server logged a traceback of it.
    assert "NotStaged" not in setup.log.read_text(errors="replace")


def test_label_is_what_the_engine_serves_whichever_driver_writes_last(setup: Setup) -> None:
    first, second = setup.publish(), setup.publish()
    run_id = setup.publisher.run_id
    asked = {"version": first, "run": run_id}
    _wait_prepared(setup.client, "prepare", asked, 60)
    setup.client.start_update()
    setup.client.update(**asked, action="apply")
    sync_server(setup.client, second, run_id=run_id)  # another driver, which takes the session over
    setup.client.set_weight_version(setup.label(first))  # and the first one comes to its end
    elsewhere = confirm_label(setup.client, asked, setup.label(first))
    assert elsewhere is not None
    assert elsewhere.kind is OutOfOrder
    assert f"serves {setup.label(second)}" in str(elsewhere)
    assert setup.client.weight_version() == setup.label(second)
    verify_server(setup.client)
    setup.client.set_weight_version(setup.label(first))  # somebody's mistake
    with pytest.raises(ServerError, match=f"serves {setup.label(second)}"):
        verify_server(setup.client)
    sync_server(setup.client, second, run_id=run_id)
    assert setup.client.weight_version() == setup.label(second)


class _BreaksOff(ServerClient):
    """A driver whose update fails when it is to be written."""

    def update(self, **update_info: object) -> None:
        if update_info.get("action") == "apply":
            raise ServerError("broken off")
        super().update(**update_info)


def test_nobody_resumes_weights_that_a_dead_driver_left_under_another_label(setup: Setup) -> None:
    first, second = setup.publish(), setup.publish()
    run_id = setup.publisher.run_id
    sync_server(setup.client, first, run_id=run_id)
    asked = {"version": second, "run": run_id}
    _wait_prepared(setup.client, "prepare", asked, 60)
    setup.client.pause("keep")
    setup.client.start_update()
    setup.client.update(**asked, action="apply")  # and here its driver dies
    assert setup.client.weight_version() == setup.label(first)
    third = setup.publish()
    with pytest.raises(ServerError, match="broken off"):
        sync_server(_BreaksOff(setup.client.url), third, run_id=run_id)
    assert not setup.client.is_paused()
    assert setup.client.weight_version() == setup.label(second)
    verify_server(setup.client)
    setup.client.set_weight_version(setup.label(first))
    with pytest.raises(ServerError, match="past that version"):
        sync_server(setup.client, first, run_id=run_id)
    assert setup.client.weight_version() == setup.label(second)
    sync_server(setup.client, third, run_id=run_id)


def test_what_a_driver_before_runs_were_named_sends_is_refused_and_says_what_to_upgrade(setup: Setup) -> None:
    before = (setup.client.weight_version(), setup.client.checksums())
    with pytest.raises(ServerError, match="Upgrade vllm-delta-snapshot where the driver runs") as caught:
        _wait_prepared(setup.client, "prepare", {"version": setup.publisher.version, "allow_rollback": False}, 5)
    assert caught.value.kind is CompatibilityError
    assert (setup.client.weight_version(), setup.client.checksums()) == before


def test_server_of_one_run_is_not_labelled_with_another_and_goes_over_when_told(setup: Setup, tmp_path: Path) -> None:
    other = AutoModelForCausalLM.from_pretrained(setup.base, dtype=torch.float32)
    sync_dir = str(tmp_path / "other")
    publisher = DeltaPublisher(other, sync_dir=sync_dir, base=setup.base, asynchronous=False)
    while publisher.version < setup.publisher.version:  # the same number in both runs
        train_step(other, 500 + publisher.version)
        publisher.publish()
    url, own = setup.client.url, setup.client.weight_version()
    weights = setup.client.checksums()
    refused = CliRunner().invoke(app, ["sync", sync_dir, "--server", url, "--json"])
    assert refused.exit_code == 1
    assert "RunMismatch" in refused.stdout
    assert f"serves {own}" in refused.stdout
    examined = CliRunner().invoke(app, ["doctor", "--sync-dir", sync_dir, "--server", url, "--json"])
    found = {check["name"]: check for check in json.loads(examined.stdout)["checks"]}
    assert not found["server run"]["ok"]
    assert "--switch-run" in found["server run"]["hint"]
    assert (setup.client.weight_version(), setup.client.checksums()) == (own, weights)

    moved = CliRunner().invoke(app, ["sync", sync_dir, "--server", url, "--switch-run", "--json"])
    assert moved.exit_code == 0, moved.output
    assert json.loads(moved.stdout)["servers"][0]["update"]["is_switched"] is True
    assert setup.client.weight_version() == f"{publisher.run_id}@{publisher.version}"
    assert CliRunner().invoke(app, ["verify", "--server", url]).exit_code == 0
    examined = CliRunner().invoke(app, ["doctor", "--sync-dir", sync_dir, "--server", url, "--json"])
    assert {c["name"]: c["ok"] for c in json.loads(examined.stdout)["checks"]}["server run"]
    assert setup.client.checksums() != weights

    back = CliRunner().invoke(app, ["sync", str(setup.sync_dir), "--server", url, "--switch-run"])
    assert back.exit_code == 0, back.output
    assert (setup.client.weight_version(), setup.client.checksums()) == (own, weights)


def test_server_ends_with_the_weights_of_a_fresh_engine(setup: Setup, tmp_path: Path) -> None:
    version = setup.publish()
    sync_server(setup.client, version, stage_timeout_s=60, run_id=setup.publisher.run_id)
    checksums = setup.client.checksums()
    tokens = [greedy(setup.client, list(prompt), 24) for prompt in PROMPTS]
    final = tmp_path / "final"
    materialize(RunFolder(open_store(str(setup.sync_dir))), Checkpoint(setup.base), version, final)
    with engine(final) as fresh:
        assert fresh.checksums() == checksums
        assert fresh.tokens() == tokens
