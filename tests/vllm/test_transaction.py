"""All or nothing: a failed update is undone bit for bit, and one that cannot be undone is never served."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines import Engine, engine
from tests.support.tensors import bits_of
from tests.support.tiny_models import make_model, train_step
from trainer_hooks import DeltaPublisher
from trainer_hooks.source.items import source_of
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.drive import sync_llm
from vllm_delta_snapshot.engine.plan.live import scatter
from vllm_delta_snapshot.engine.plan.load_plan import fingerprint_of
from vllm_delta_snapshot.engine.write import apply, transaction
from vllm_delta_snapshot.engine.write.lanes import LiveLane
from vllm_delta_snapshot.engine.write.updates import Update
from vllm_delta_snapshot.errors import ApplyError, VerifyError, WeightsUncertain
from vllm_delta_snapshot.runs.materialize import materialize
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import open_store


def _write_half(lane: LiveLane) -> bool:
    half = lane.index.numel() // 2
    scatter(lane.flat, lane.index[:half], lane.new[:half])
    return lane.holds_new()


def _write_halves(lanes: Sequence[LiveLane]) -> list[bool]:
    return [_write_half(lane) for lane in lanes]


def _half_then_fail(model: torch.nn.Module, lanes: Sequence[LiveLane], update: Update, way: str) -> None:
    del model, update, way
    for lane in lanes:
        _write_half(lane)
    raise RuntimeError("the loader broke")


def _cannot_write(lanes: Sequence[LiveLane]) -> bool:
    raise RuntimeError("the device is gone")


def test_engine_survives_failed_updates_and_takes_special_values_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, sync_dir = tmp_path / "base", tmp_path / "run"
    model = make_model("qwen3", base)
    publisher = DeltaPublisher(model, sync_dir=str(sync_dir), base=base, asynchronous=False)
    train_step(model, 1)
    publisher.publish()
    with engine(base) as live:
        live.init(sync_dir=str(sync_dir))
        old = (live.checksums(), live.tokens())
        with monkeypatch.context() as patched:
            patched.setattr(transaction, "apply", _half_then_fail)
            with pytest.raises(RuntimeError, match="the loader broke"):
                sync_llm(live.llm, 1, stage_timeout_s=20, run_id=publisher.run_id)
            assert (live.checksums(), live.tokens()) == old
        with monkeypatch.context() as patched:
            patched.setattr(apply, "write_lanes", _write_halves)
            with pytest.raises(VerifyError, match="does not have the published bits"):
                sync_llm(live.llm, 1, run_id=publisher.run_id)
            assert (live.checksums(), live.tokens()) == old
        sync_llm(live.llm, 1, run_id=publisher.run_id)
        assert live.checksums() != old[0]
        _follow_parameters_that_were_recreated(live, model, publisher)
        _refuse_an_update_that_moves_weights(live, model, publisher, monkeypatch)
        _refuse_moved_weights_where_graphs_are_captured(live, monkeypatch)
        for way in ("loader", "scatter"):
            live.init(sync_dir=str(sync_dir), apply=way)
            _take_special_values(live, model, publisher, base, tmp_path / way)
        _prepared_update_needs_no_store(live, model, publisher, sync_dir)
        _refuse_for_ever_when_undo_fails(live, model, publisher, monkeypatch)


def _follow_parameters_that_were_recreated(live: Engine, model: Any, publisher: DeltaPublisher) -> None:
    """New memory for a weight, before and after an update was prepared: never a write into the old memory."""
    name = "model.layers.0.mlp.down_proj.weight"
    weight = live.model.get_parameter(name)
    weight.data = weight.data.clone()
    train_step(model, 5)
    version = publisher.publish().version
    live.backend._handoff.wait(live.backend._at.version, version, timeout_s=20)
    live.llm.start_weight_update()
    live.llm.update_weights({"update_info": {"version": version, "run": live.run_id, "action": "prepare"}})
    weight.data = weight.data.clone()
    old = live.checksums()
    with pytest.raises(ApplyError, match="changed since this update was prepared"):
        live.llm.update_weights({"update_info": {"version": version, "run": live.run_id}})
    assert live.checksums() == old
    sync_llm(live.llm, version, run_id=publisher.run_id)
    trained = bits_of(model.get_parameter(name).to(torch.bfloat16).reshape(-1))
    assert bits_of(weight.reshape(-1)).tolist() == trained.tolist()


def _refuse_an_update_that_moves_weights(
    live: Engine, model: Any, publisher: DeltaPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right bits in new memory are not enough: a graph would read the old."""
    train_step(model, 6)
    version = publisher.publish().version
    weight = live.model.get_parameter("model.norm.weight")
    kept, old, plain = weight.data, live.checksums(), transaction.apply

    def apply_elsewhere(*arguments: Any) -> None:
        plain(*arguments)
        weight.data = weight.data.clone()

    with monkeypatch.context() as patched:
        patched.setattr(transaction, "apply", apply_elsewhere)
        with pytest.raises(WeightsUncertain, match=r"could not put its old weights back.*put weights elsewhere"):
            sync_llm(live.llm, version, stage_timeout_s=20, run_id=publisher.run_id)
    with pytest.raises(WeightsUncertain):
        live.llm.start_weight_update()
    weight.data, live.backend._is_uncertain = kept, False
    assert live.checksums() == old
    sync_llm(live.llm, version, run_id=publisher.run_id)


def _refuse_moved_weights_where_graphs_are_captured(live: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are none on a CPU; with them what was just followed would be followed by no graph."""
    from vllm.config import CUDAGraphMode

    moved = r"elsewhere after CUDA graphs had been captured.*model\.layers\.0\.mlp\.down_proj\.weight\. .*restart"
    with monkeypatch.context() as patched:
        patched.setattr(live.worker.vllm_config.compilation_config, "cudagraph_mode", CUDAGraphMode.FULL_AND_PIECEWISE)
        with pytest.raises(WeightsUncertain, match=moved):
            live.llm.start_weight_update()
        with pytest.raises(WeightsUncertain, match=moved):
            live.init()
        patched.setattr(live.backend, "_as_loaded", fingerprint_of(live.model))
        live.llm.start_weight_update()
        live.llm.finish_weight_update()


def _take_special_values(live: Engine, model: Any, publisher: DeltaPublisher, base: Path, tmp_path: Path) -> None:
    """-0.0, infinities, NaNs with payloads, subnormals: in plain, fused and tied places."""
    special = torch.tensor([0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x0001, 0x807F], dtype=torch.int32)
    bits = special.to(torch.int16).view(torch.bfloat16)
    weights = {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    for name in ("model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"):
        weights[name].reshape(-1)[3:10] = bits
    weights["lm_head.weight"].reshape(-1)[0] = -0.0
    publisher._source = source_of(weights)
    version = publisher.publish().version
    sync_llm(live.llm, version, stage_timeout_s=20, run_id=publisher.run_id)
    qkv = bits_of(live.model.get_parameter("model.layers.0.self_attn.qkv_proj.weight").reshape(-1))
    query = 4 * 32 * 128
    assert qkv[query + 3 : query + 10].tolist() == [0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x0001, 0x807F]
    materialize(RunFolder(open_store(str(tmp_path.parent / "run"))), Checkpoint(base), version, tmp_path)
    live_down = bits_of(live.model.get_parameter("model.layers.1.mlp.down_proj.weight").reshape(-1))
    assert live_down.tolist() == Checkpoint(tmp_path).bits("model.layers.1.mlp.down_proj.weight").tolist()
    # Back to numbers: the overwritten NaNs are compared by their bits, so they are no drift.
    publisher._source = source_of(model)
    sync_llm(live.llm, publisher.publish().version, stage_timeout_s=20, run_id=publisher.run_id)


def _prepared_update_needs_no_store(live: Engine, model: Any, publisher: DeltaPublisher, sync_dir: Path) -> None:
    """What was staged and prepared is applied with the store out of reach."""
    train_step(model, 7)
    version = publisher.publish().version
    backend = live.backend
    backend._handoff.wait(backend._at.version, version, timeout_s=20)
    live.llm.start_weight_update()
    live.llm.update_weights({"update_info": {"version": version, "run": live.run_id, "action": "prepare"}})
    old = live.checksums()
    hidden = sync_dir.with_name("hidden")
    shutil.move(sync_dir, hidden)
    try:
        live.llm.update_weights({"update_info": {"version": version, "run": live.run_id}})
        live.llm.finish_weight_update(f"{publisher.run_id}@{version}")
    finally:
        shutil.move(hidden, sync_dir)
    assert live.checksums() != old
    assert live.llm.get_weight_version() == f"{publisher.run_id}@{version}"


def _refuse_for_ever_when_undo_fails(
    live: Engine, model: Any, publisher: DeltaPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_step(model, 8)
    version = publisher.publish().version
    label = live.llm.get_weight_version()
    with monkeypatch.context() as patched:
        patched.setattr(transaction, "apply", _half_then_fail)
        patched.setattr(transaction, "undo_lanes", _cannot_write)
        with pytest.raises(WeightsUncertain, match="restart it"):
            sync_llm(live.llm, version, stage_timeout_s=20, run_id=publisher.run_id)
    for call in (
        live.llm.start_weight_update,
        lambda: live.init(sync_dir="/nowhere"),
        live.backend.finish_weight_update,
    ):
        with pytest.raises(WeightsUncertain):
            call()
    assert live.llm.get_weight_version() == label
    assert issubclass(WeightsUncertain, ApplyError)
