"""An engine and its trainer that share nothing but a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engines import engine
from tests.support.object_stores import SERVERS
from tests.support.tiny_models import make_model, train_step
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.drive import sync_llm, verify_llm


@pytest.mark.parametrize("name", ["ministack", "fake-gcs"])
def test_engine_follows_a_run_in_a_bucket(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "base"
    model = make_model("llama_tied", base)
    monkeypatch.setenv("DELTA_SNAPSHOT_STAGE_DIR", str(tmp_path / "stage"))
    with SERVERS[name](tmp_path / "log") as server, engine(base) as live:
        for variable, value in server.environment.items():
            monkeypatch.setenv(variable, value)
        sync_dir = f"{server.scheme}://{server.make_bucket()}/runs/one"
        publisher = DeltaPublisher(model, sync_dir=sync_dir, base=base)
        live.init(sync_dir=sync_dir)
        before = live.checksums()
        for number in (1, 2):
            train_step(model, number)
            sync_llm(live.llm, publisher.publish().version, stage_timeout_s=60, run_id=publisher.run_id)
        verify_llm(live.llm, 2, run_id=publisher.run_id)
        assert live.checksums() != before
