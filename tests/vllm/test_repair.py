"""An engine whose weights something else has changed is brought back, whole, and goes on: whatever form its weights
have, and on several workers."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.digests import drift
from tests.support.engines import engine
from tests.support.tiny_models import make_model, train_step
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.drive import repair_llm, sync_llm, verify_llm
from vllm_delta_snapshot.errors import BaseMismatch, RunMismatch, VerifyError, WeightsUncertain

TENSOR: dict[str, Any] = {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("gptoss", {}),
        ("qwen3", {"quantization": "fp8_per_channel"}),
        ("qwen3", {"dtype": "float32"}),
        ("qwen3", {"dtype": "float16"}),
    ],
    ids=["rearranged", "reloaded", "widened", "narrowed"],
)
def test_drifted_engine_is_repaired_and_takes_the_next_version(
    architecture: str, options: dict[str, Any], tmp_path: Path
) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    model = make_model(architecture, base)
    publisher = DeltaPublisher(model, sync_dir=str(run), base=base, asynchronous=False)
    with engine(base, **options) as live:
        live.init(sync_dir=str(run))
        train_step(model, 1)
        sync_llm(live.llm, publisher.publish().version, stage_timeout_s=60, run_id=publisher.run_id)
        right = live.checksums()
        drift(live.worker)
        assert live.checksums() != right
        repair_llm(live.llm)
        assert live.checksums() == right
        verify_llm(live.llm)
        repair_llm(live.llm)  # nothing to do
        assert live.checksums() == right
        train_step(model, 2)
        sync_llm(live.llm, publisher.publish().version, stage_timeout_s=60, run_id=publisher.run_id)
        verify_llm(live.llm)
        assert live.checksums() != right


def test_update_of_a_drifted_engine_repairs_it_unless_told_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    model = make_model("llama_tied", base)
    publisher = DeltaPublisher(model, sync_dir=str(run), base=base, asynchronous=False)
    with engine(base) as live:
        live.init()
        with pytest.raises(RunMismatch, match="follows no run"):
            repair_llm(live.llm)
        live.init(sync_dir=str(run))
        train_step(model, 1)
        version = publisher.publish().version
        drift(live.worker)
        drifted = live.checksums()
        with pytest.raises(BaseMismatch, match="delta-snapshot repair"):
            sync_llm(live.llm, version, stage_timeout_s=60, repair=False, run_id=publisher.run_id)
        assert live.checksums() == drifted
        with pytest.raises(VerifyError, match="delta-snapshot repair"):
            verify_llm(live.llm)
        assert sync_llm(live.llm, version, stage_timeout_s=60, run_id=publisher.run_id).is_repaired
        verify_llm(live.llm, version, run_id=publisher.run_id)
        # A repair that does not hold leaves the engine uncertain.
        drift(live.worker)
        monkeypatch.setattr("vllm_delta_snapshot.engine.write.repair._write_whole", lambda *_: None)
        with pytest.raises(WeightsUncertain, match="still differ after a repair"):
            repair_llm(live.llm)
        with pytest.raises(WeightsUncertain):
            verify_llm(live.llm)


def test_drift_of_one_of_two_workers_is_repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "VLLM_CPU_OMP_THREADS_BIND", "0|1")
    base, run = tmp_path / "base", tmp_path / "run"
    model = make_model("llama_tied", base)
    publisher = DeltaPublisher(model, sync_dir=str(run), base=base, asynchronous=False)
    with engine(base, **TENSOR) as live:
        live.init(sync_dir=str(run))
        train_step(model, 1)
        sync_llm(live.llm, publisher.publish().version, stage_timeout_s=60, run_id=publisher.run_id)
        right = live.all_checksums()
        live.llm.llm_engine.collective_rpc(functools.partial(drift, rank=1))
        wrong = live.all_checksums()
        assert wrong[0] == right[0]
        assert wrong[1] != right[1]
        # The norms are replicas: the full check names them, as it names parts.
        with pytest.raises(Exception, match="worker 1 has other values than worker 0"):
            verify_llm(live.llm)
        repair_llm(live.llm)
        assert live.all_checksums() == right
        verify_llm(live.llm)
