"""MLA, whose attention computes with copies of `kv_b_proj` that it makes after loading: what is a view of weights needs
nothing; what was computed from a quantized weight is computed again with each update, checked, and undone with it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.breaking import break_writing
from tests.support.engines import Engine, engine
from tests.support.tiny_models import make_model, train_step
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.drive import repair_llm, sync_llm, verify_llm
from vllm_delta_snapshot.engine.plan.derived import DerivedPlan
from vllm_delta_snapshot.engine.plan.moving import refuse_moving
from vllm_delta_snapshot.errors import TensorRefused, VerifyError
from vllm_delta_snapshot.runs.materialize import materialize
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import open_store

OPTIONS: dict[str, Any] = {"quantization": "fp8_per_channel", "attention_backend": "CPU_MLA"}
ATTENTION = "model.layers.0.self_attn.mla_attn.mla_attn"

pytest.importorskip("vllm.v1.attention.backends.mla.cpu_mla", reason="this vLLM has no MLA on CPUs")


def test_quantized_mla_is_after_updates_what_a_fresh_engine_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, sync_dir, final = tmp_path / "base", tmp_path / "run", tmp_path / "final"
    model = make_model("deepseek_dense", base)
    publisher = DeltaPublisher(model, sync_dir=str(sync_dir), base=base, asynchronous=False)
    with engine(base, **OPTIONS) as live:
        before, addresses = live.checksums(), _addresses(live)
        live.init(sync_dir=str(sync_dir))
        assert live.checksums() == before
        assert set(live.backend._fitness.derived.paths[ATTENTION]) == {f"{ATTENTION}.W_UV", f"{ATTENTION}.W_UK_T"}
        base_tokens = live.tokens()
        for number in (1, 2):
            train_step(model, number)
            sync_llm(live.llm, publisher.publish().version, stage_timeout_s=60, run_id=publisher.run_id)
        tokens, checksums = live.tokens(), live.checksums()
        assert checksums[f"{ATTENTION}.W_UV"] != before[f"{ATTENTION}.W_UV"]
        assert _addresses(live) == addresses
        verify_llm(live.llm)
        _stale_copies_are_found_and_mended(live, checksums)

        train_step(model, 3)
        version = publisher.publish().version
        with monkeypatch.context() as patched:
            patched.setattr(DerivedPlan, "recompute", _fails_half_way(DerivedPlan.recompute))
            with pytest.raises(RuntimeError, match="the kernel broke"):
                sync_llm(live.llm, version, stage_timeout_s=60, run_id=publisher.run_id)
        assert (live.tokens(), live.checksums(), _addresses(live)) == (tokens, checksums, addresses)
        verify_llm(live.llm)
        _is_refused_while_experts_may_move(live, version, sync_dir)

    materialize(RunFolder(open_store(str(sync_dir))), Checkpoint(base), 2, final)
    with engine(final, **OPTIONS) as fresh:
        assert fresh.checksums() == checksums
        assert fresh.tokens() == tokens
    assert tokens != base_tokens


def test_worker_that_fails_before_a_reload_with_collectives_leaves_none_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales of row-parallel layers are reduced over the workers while these are reloaded."""
    monkeypatch.setitem(os.environ, "VLLM_CPU_OMP_THREADS_BIND", "0|1")
    base, sync_dir = tmp_path / "base", tmp_path / "run"
    model = make_model("deepseek_dense", base)
    publisher = DeltaPublisher(model, sync_dir=str(sync_dir), base=base, asynchronous=False)
    with engine(base, **OPTIONS, distributed_executor_backend="mp", tensor_parallel_size=2) as live:
        live.init(sync_dir=str(sync_dir))
        before = live.all_checksums()
        train_step(model, 1)
        version = publisher.publish().version
        live.llm.llm_engine.collective_rpc(break_writing, args=(1, 0))
        with pytest.raises(Exception, match="interrupted"):
            sync_llm(live.llm, version, stage_timeout_s=60, run_id=publisher.run_id)
        with contextlib.suppress(Exception):
            live.llm.finish_weight_update()
        assert live.all_checksums() == before
        live.llm.llm_engine.collective_rpc(break_writing, args=(-1, 0))
        sync_llm(live.llm, version, stage_timeout_s=60, run_id=publisher.run_id)
        verify_llm(live.llm)
        after = live.all_checksums()
        assert all(after[rank][f"{ATTENTION}.W_UV"] != before[rank][f"{ATTENTION}.W_UV"] for rank in (0, 1))


def test_mla_that_keeps_packed_copies_only_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On processors with AMX vLLM chooses a backend that packs `kv_b_proj` and frees it; so it does where told so."""
    if not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("vLLM's libraries for processors without AVX512_BF16 have no packing for AMX")
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: True)
    make_model("deepseek_dense", tmp_path / "base")
    with engine(tmp_path / "base") as live:
        before = live.checksums()
        attention = live.model.get_submodule(ATTENTION)
        assert type(attention.impl).__name__ == "AMXMLAImpl"
        with pytest.raises(TensorRefused, match=r"kv_b_proj \(weight was freed .* --attention-backend CPU_MLA"):
            live.init()
        assert live.checksums() == before


def _stale_copies_are_found_and_mended(live: Engine, checksums: dict[str, str]) -> None:
    """Only the derived tensor is wrong: all weights are the version's."""
    copy = live.model.get_submodule(ATTENTION).W_UV.data.view(torch.int16)
    copy[0, 0, 3] ^= 1
    with pytest.raises(VerifyError, match=r"mla_attn.*W_UV: other values than its weights make"):
        verify_llm(live.llm)
    repair_llm(live.llm)
    assert live.checksums() == checksums
    verify_llm(live.llm)


def _is_refused_while_experts_may_move(live: Engine, version: int, sync_dir: Path) -> None:
    """vLLM allows EPLB on GPUs only; what asks for it is the same configuration here."""
    before = live.checksums()
    config = live.worker.vllm_config
    refuse_moving(config)
    config.parallel_config.enable_eplb = True
    try:
        with pytest.raises(TensorRefused, match="EPLB"):
            repair_llm(live.llm)
        with pytest.raises(TensorRefused, match="EPLB"):
            sync_llm(live.llm, version, stage_timeout_s=60, run_id=live.run_id)
        with pytest.raises(TensorRefused, match="without --enable-eplb"):
            live.init(sync_dir=str(sync_dir))
    finally:
        config.parallel_config.enable_eplb = False
    assert live.checksums() == before


def _addresses(live: Engine) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in live.model.named_parameters()}


def _fails_half_way(recompute: Any) -> Any:
    def recompute_some(self: DerivedPlan, layers: Any, config: Any) -> None:
        recompute(self, list(layers)[:1], config)
        raise RuntimeError("the kernel broke")

    return recompute_some
