"""Several workers: tensor, expert and pipeline parallel engines take updates exactly, by scattering and by vLLM's
loader, and go back exactly."""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.support.breaking import break_writing, refuse_scattering
from tests.support.digests import unchanged
from tests.support.engines import Engine, engine, run_id_in
from tests.support.tiny_models import WEIGHTS_ONLY, make_model, train_step
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.drive import sync_llm, verify_llm
from vllm_delta_snapshot.runs.materialize import materialize
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import open_store

TENSOR: dict[str, Any] = {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}
EXPERT: dict[str, Any] = TENSOR | {"enable_expert_parallel": True}
PIPELINE: dict[str, Any] = {"distributed_executor_backend": "mp", "pipeline_parallel_size": 2}


@pytest.fixture(autouse=True)
def _core_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "VLLM_CPU_OMP_THREADS_BIND", "0|1")


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("qwen3_moe", EXPERT),
        ("llama_tied", PIPELINE),
        ("gptoss", TENSOR),
    ],
    ids=["expert", "pipeline", "rearranged"],
)
def test_workers_take_updates_exactly_and_go_back(architecture: str, options: dict[str, Any], tmp_path: Path) -> None:
    # vLLM 0.32 cannot generate with pipeline parallelism on CPUs; the weights are compared.
    generates = architecture not in WEIGHTS_ONLY and "pipeline_parallel_size" not in options
    base, run, final = tmp_path / "base", tmp_path / "run", tmp_path / "final"
    model = make_model(architecture, base)
    DeltaPublisher(model, sync_dir=str(run), base=base, asynchronous=False)
    with engine(base, **options) as live:
        live.init(sync_dir=str(run))
        verify_llm(live.llm)
        base_sums, base_tokens = live.all_checksums(), live.tokens() if generates else []
        for number in (1, 2, 3):
            train_step(model, number)
            # vLLM's loader, below, takes absolute values only; the others are differences.
            encoding = "absolute" if number == 1 else "auto"
            publisher = DeltaPublisher(model, sync_dir=str(run), base=base, encoding=encoding, asynchronous=False)
            publisher.publish()
            if number == 3:
                _all_undo_what_one_interrupts(live, number, publisher.run_id)
            elif number != 2:
                sync_llm(live.llm, number, stage_timeout_s=60, run_id=publisher.run_id)
                first_sums = live.all_checksums()
        verify_llm(live.llm)
        sums, tokens = live.all_checksums(), live.tokens() if generates else []
        assert len(sums) == 2
        sync_llm(live.llm, 0, stage_timeout_s=60, allow_rollback=True, run_id=publisher.run_id)
        verify_llm(live.llm)
        assert live.all_checksums() == base_sums
        assert (live.tokens() if generates else []) == base_tokens
        _take_the_same_by_vllms_loader(live, run, {1: first_sums})
        _end_without_the_collector(live)

    materialize(RunFolder(open_store(str(run))), Checkpoint(base), 3, final)
    with engine(final, **options) as fresh:
        assert fresh.all_checksums() == sums
        assert (fresh.tokens() if generates else []) == tokens
    assert all(sums[rank] != base_sums[rank] for rank in (0, 1))
    assert tokens != base_tokens or not generates


def test_tensor_parallel_workers_take_the_same_by_scattering_and_by_vllms_loader(tmp_path: Path) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    model = make_model("llama_tied", base)
    publisher = DeltaPublisher(model, sync_dir=str(run), base=base, encoding="absolute", asynchronous=False)
    with engine(base, **TENSOR) as live:
        live.init(sync_dir=str(run))
        base_sums, scattered = live.all_checksums(), {}
        for number in (1, 2):
            train_step(model, number)
            sync_llm(live.llm, publisher.publish().version, stage_timeout_s=60, run_id=publisher.run_id)
            scattered[number] = live.all_checksums()
        sync_llm(live.llm, 0, stage_timeout_s=60, allow_rollback=True, run_id=publisher.run_id)
        assert live.all_checksums() == base_sums
        _take_the_same_by_vllms_loader(live, run, scattered)
    assert [unchanged(*sums) for sums in zip(base_sums, scattered[1], strict=True)] == [[], []]
    assert [unchanged(*sums) for sums in zip(scattered[1], scattered[2], strict=True)] == [[], []]


def _all_undo_what_one_interrupts(live: Engine, version: int, run_id: str) -> None:
    """Break off the update on the second worker after ever more storages, until it goes through."""
    before = live.all_checksums()
    count = 0
    while True:
        live.llm.llm_engine.collective_rpc(break_writing, args=(1, count))
        try:
            sync_llm(live.llm, version, stage_timeout_s=60, run_id=run_id)
        except Exception as error:  # noqa: BLE001 - in a worker it is vLLM that wraps it
            assert "interrupted" in str(error)  # noqa: PT017 - the loop ends when nothing is raised any more
        else:
            break
        _close_session(live)
        assert live.all_checksums() == before
        count += 3
    live.llm.llm_engine.collective_rpc(break_writing, args=(-1, 0))
    assert count > 3
    assert live.all_checksums() != before


def _take_the_same_by_vllms_loader(live: Engine, run: Path, scattered: dict[int, list[dict[str, str]]]) -> None:
    """Go the way again that scattering went: every worker must come to hold the same at each of these versions."""
    live.init(sync_dir=str(run), apply="loader")
    live.llm.llm_engine.collective_rpc(refuse_scattering)
    for version, sums in scattered.items():
        sync_llm(live.llm, version, stage_timeout_s=60, run_id=run_id_in(run))
        assert live.all_checksums() == sums
    verify_llm(live.llm)


def _end_without_the_collector(live: Engine) -> None:
    """Stop the workers: no failed update may have kept their queues, which the collector may hang over."""
    executor = live.llm.llm_engine.model_executor
    queues = [weakref.ref(queue) for queue in executor.response_mqs]
    gc.disable()
    try:
        executor.shutdown()
        assert [queue() for queue in queues] == [None, None]
    finally:
        gc.enable()


def _close_session(live: Engine) -> None:
    # vLLM ends the session of a worker that fails and leaves the others' open; one finish clears both, and may fail.
    with contextlib.suppress(Exception):
        live.llm.finish_weight_update()
