"""S3 and GCS keep the contract of every store, on real servers over real sockets."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.contract.store_contract import StoreContract
from tests.support.checkpoints import write_checkpoint
from tests.support.object_stores import SERVERS, ObjectServer, free_port, rclone
from tests.support.runs import TinyRun, TinyTrainer, assert_same_state
from tests.support.tensors import apply_by_hand
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.audit.verify_run import verify_run
from vllm_delta_snapshot.changes.decode import decode
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.cli.app import app
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.errors import (
    ExclusiveCreateUnsupported,
    ObjectNotFound,
    RunMismatch,
    StoreError,
    StoreUnavailable,
)
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.host.area import StageArea, StagerConfig
from vllm_delta_snapshot.host.attachment import Attachment
from vllm_delta_snapshot.host.stager import Stager
from vllm_delta_snapshot.interop.openrl import read_folder_metadata
from vllm_delta_snapshot.runs.acks import Acknowledger
from vllm_delta_snapshot.runs.materialize import materialize
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import Store, StoreConfig, open_store
from vllm_delta_snapshot.store.base import SweepsUploads
from vllm_delta_snapshot.store.s3 import S3Store

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module", params=list(SERVERS))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with SERVERS[request.param](tmp_path_factory.mktemp("server") / "log") as started:
        yield started


@pytest.fixture(scope="module")
def bucket(server: ObjectServer) -> str:
    return server.make_bucket()


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"runs/{abs(hash(request.node.nodeid)):x}"


@pytest.fixture
def store(server: ObjectServer, bucket: str, prefix: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return open_store(f"{server.scheme}://{bucket}/{prefix}")


@pytest.fixture
def _one_winner(request: pytest.FixtureRequest) -> None:
    if "[moto]" in request.node.name:
        pytest.skip("moto compares and writes in two steps: of writers at the same moment several may win")


class TestObjectStores(StoreContract):
    @pytest.mark.usefixtures("_one_winner")
    def test_threads_that_create_the_same_objects_have_one_winner_each(self, store: Store):
        super().test_threads_that_create_the_same_objects_have_one_winner_each(store)

    @pytest.mark.usefixtures("_one_winner")
    def test_processes_that_create_the_same_objects_have_one_winner_each(self, store: Store):
        super().test_processes_that_create_the_same_objects_have_one_winner_each(store)

    def test_large_object_goes_up_in_parts_and_comes_back_in_ranges(
        self, server: ObjectServer, bucket: str, prefix: str, store: Store
    ):
        large = open_store(f"{server.scheme}://{bucket}/{prefix}", config=small_parts())
        data = random.Random(0).randbytes(12_000_001)
        chunks = [memoryview(data)[first : first + 700_000] for first in range(0, len(data), 700_000)]
        assert large.put("a/large", chunks) == len(data)
        assert store.size("a/large") == len(data)
        into = bytearray(len(data))
        with ThreadPoolExecutor(4) as pool:
            starts = range(0, len(data), 1 << 20)
            counts = pool.map(lambda at: store.read_range("a/large", at, memoryview(into)[at : at + (1 << 20)]), starts)
            assert sum(counts) == len(data)
        assert into == data

    def test_upload_whose_source_fails_leaves_nothing(
        self, server: ObjectServer, bucket: str, prefix: str, store: Store
    ):
        large = open_store(f"{server.scheme}://{bucket}/{prefix}", config=small_parts())

        def chunks() -> Iterator[memoryview]:
            yield memoryview(bytes(11 << 20))
            raise KeyError("the source")

        with pytest.raises(KeyError):
            large.put("a/large", chunks())
        assert store.list("a") == []
        assert isinstance(store, SweepsUploads)
        assert store.sweep(older_than_s=-60) == 0

    def test_upload_that_was_cut_off_is_swept_once_it_is_old(self, store: Store):
        if not isinstance(store, S3Store):
            return  # test_store_refusals.py has that of GCS
        for key in ("deltas/one", "deltas/two"):
            store._client.create_multipart_upload(Bucket=store._bucket, Key=store._prefix.of(key))
        store._client.create_multipart_upload(Bucket=store._bucket, Key="another-run/three")
        uploads = store._client.list_multipart_uploads(Bucket=store._bucket)["Uploads"]
        if all(datetime.now(UTC) - upload["Initiated"] < timedelta(hours=1) for upload in uploads):  # moto: never
            assert store.sweep(older_than_s=3600) == 0
        assert store.sweep(older_than_s=-60) == 2
        assert store.sweep(older_than_s=-60) == 0

    def test_run_is_published_followed_verified_resumed_and_materialized(
        self, server: ObjectServer, bucket: str, prefix: str, store: Store, tmp_path: Path
    ):
        trainer = TinyTrainer()
        base = write_checkpoint(tmp_path / "base", trainer.weights)
        publisher = DeltaPublisher(trainer, sync_dir=store.uri, base=base, asynchronous=False)
        run = TinyRun(base, tmp_path, trainer, publisher, [trainer.state()])
        for number in (1, 2, 3):
            trainer.step(number)
            if number == 3:  # a trainer that was restarted
                run.publisher = DeltaPublisher(trainer, sync_dir=store.uri, base=base, asynchronous=False)
            assert run.publisher.publish().version == number
            run.history.append(trainer.state())
        folder = RunFolder(open_store(store.uri))
        verified = verify_run(folder)
        assert (verified.is_ok, verified.versions, verified.leftovers) == (True, 3, [])
        materialize(folder, Checkpoint(base), 3, tmp_path / "three")
        assert_same_state(state_of(tmp_path / "three"), run.history[3])
        for args in (
            ("inspect", store.uri),
            ("inspect", f"{store.uri}@2"),
            ("log", store.uri),
            ("verify", store.uri),
            ("materialize", f"{store.uri}@1", str(tmp_path / "one")),
            ("doctor", "--sync-dir", store.uri),
        ):
            done = CliRunner().invoke(app, [*args, "--json"])
            assert done.exit_code == 0 or args[0] == "doctor", done.output  # whether vLLM is here is not asked
            answer = json.loads(done.stdout)
            if args[0] == "doctor":
                assert {check["name"]: check["ok"] for check in answer["checks"]}["exclusive create"]
            else:
                assert answer["ok"]
        assert_same_state(state_of(tmp_path / "one"), run.history[1])
        area = StageArea.of(tmp_path / "stage", StagerConfig(sync_dir=store.uri, checkpoint=str(base)))
        worker = Attachment(area)
        stager = Stager(area)
        stager.start()
        stager.step()
        metadata = read_folder_metadata(area.staged_folder(0, 3))
        assert isinstance(metadata, DeltaMetadata)
        state = dict(run.history[0])
        for change in decode(metadata, area.staged_folder(0, 3), folder.read_run().specs()):
            state[change.spec.name] = apply_by_hand(state[change.spec.name], change)
        assert_same_state(state, run.history[3])
        worker.close()
        Acknowledger(store, run.publisher.run_id, "node-1").write(3, pause_s=0.1)
        assert run.publisher.wait_applied(["node-1"], timeout_s=30)["node-1"].version == 3

    def test_folder_of_another_run_is_refused_and_its_owner_named(self, store: Store, tmp_path: Path):
        trainers = TinyTrainer(), TinyTrainer()
        trainers[1].step(5)
        bases = [write_checkpoint(tmp_path / str(at), trainer.weights) for at, trainer in enumerate(trainers)]
        owner = DeltaPublisher(trainers[0], sync_dir=store.uri, base=bases[0])
        before = store.read("run.json", max_bytes=1 << 20)
        with pytest.raises(RunMismatch, match=owner.run_id) as caught:
            DeltaPublisher(trainers[1], sync_dir=store.uri, base=bases[1])
        assert str(bases[0]) in str(caught.value)
        assert store.list("") == ["run.json"]
        assert store.read("run.json", max_bytes=1 << 20) == before

    def test_missing_bucket_is_an_error_that_says_so(self, server: ObjectServer, store: Store):
        other = open_store(f"{server.scheme}://no-such-bucket-{uuid.uuid4().hex[:8]}/x")
        for verb in (lambda: other.create("x", b""), lambda: other.read("x", max_bytes=1), lambda: other.list("")):
            with pytest.raises(StoreError, match="there is no such bucket") as caught:
                verb()
            assert not isinstance(caught.value, ObjectNotFound)

    def test_server_that_is_gone_is_unavailable(self, server: ObjectServer, monkeypatch: pytest.MonkeyPatch):
        config = StoreConfig.load(
            endpoint_url=f"http://127.0.0.1:{free_port()}",
            attempts=1,
            anonymous=True,
            connect_timeout_s=0.5,
            read_timeout_s=0.5,
        )
        gone = open_store(f"{server.scheme}://bucket/x", config=config)
        for verb in (lambda: gone.size("x"), lambda: gone.create("x", b""), lambda: gone.list("")):
            with pytest.raises(StoreUnavailable):
                verb()


def test_store_that_knows_no_conditions_is_found_out_before_anything_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "data" / "bucket").mkdir(parents=True)
    trainer = TinyTrainer()
    base = write_checkpoint(tmp_path / "base", trainer.weights)
    with rclone(tmp_path / "log", tmp_path / "data") as dumb:
        for name, value in dumb.environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ExclusiveCreateUnsupported, match="single_writer=True"):
            DeltaPublisher(trainer, sync_dir="s3://bucket/run", base=base, asynchronous=False)
        assert open_store("s3://bucket/run").list("") == []
        publisher = DeltaPublisher(
            trainer, sync_dir="s3://bucket/run", base=base, single_writer=True, asynchronous=False
        )
        trainer.step(1)
        assert publisher.publish().version == 1
        assert verify_run(RunFolder(open_store("s3://bucket/run"))).is_ok


def small_parts() -> StoreConfig:
    return StoreConfig.load(part_bytes=5 << 20, concurrency=2)


def state_of(folder: Path) -> dict[str, Bits]:
    checkpoint = Checkpoint(folder)
    return {name: checkpoint.bits(name) for name in checkpoint.specs}
