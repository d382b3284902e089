"""Quantized layers are reloaded whole from the host's mirror: the engine is then what a fresh one would be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engines import Engine, engine
from tests.support.tiny_models import make_model, train_step
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.drive import sync_llm, verify_llm
from vllm_delta_snapshot.engine.write import transaction
from vllm_delta_snapshot.errors import ApplyError, TensorRefused
from vllm_delta_snapshot.runs.materialize import materialize
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import open_store

QUANTIZATION = "fp8_per_channel"


def test_quantized_engine_is_after_several_deltas_what_a_fresh_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, sync_dir, final = tmp_path / "base", tmp_path / "run", tmp_path / "final"
    model = make_model("qwen3", base)
    publisher = DeltaPublisher(model, sync_dir=str(sync_dir), base=base, asynchronous=False)
    with engine(base, quantization=QUANTIZATION) as live:
        before = live.checksums()
        live.init(sync_dir=str(sync_dir))
        assert live.checksums() == before
        ways = {choice.way for choice in live.backend._fitness.choices.values()}
        assert ways == {"scatter", "reload"}
        base_tokens = live.tokens()
        for number in (1, 2, 3):
            train_step(model, number)
            publisher.publish()
            if number != 2:  # the second is missed, and merged into the third
                sync_llm(live.llm, number, stage_timeout_s=60, run_id=publisher.run_id)
        tokens, checksums = live.tokens(), live.checksums()

        train_step(model, 4)
        publisher.publish()
        _check_between_prepare_and_apply_takes_nothing_wrong(live, checksums)
        with monkeypatch.context() as patched:
            patched.setattr(transaction, "reload_layers", _fails_half_way(transaction.reload_layers))
            with pytest.raises(RuntimeError, match="the loader broke"):
                sync_llm(live.llm, 4, stage_timeout_s=60, run_id=publisher.run_id)
        assert (live.tokens(), live.checksums()) == (tokens, checksums)
        sync_llm(live.llm, 4, stage_timeout_s=60, run_id=publisher.run_id)
        assert live.checksums() != checksums
        live.llm.start_weight_update()
        live.llm.update_weights({"update_info": {"version": 3, "run": live.run_id, "allow_rollback": True}})
        live.llm.finish_weight_update("3")
        assert (live.tokens(), live.checksums()) == (tokens, checksums)
        mirror = live.backend._handoff._area.mirror
        assert Checkpoint(mirror).state_digest == RunFolder(open_store(str(sync_dir))).read_version(3).state_digest

    materialize(RunFolder(open_store(str(sync_dir))), Checkpoint(base), 3, final)
    with engine(final, quantization=QUANTIZATION) as fresh:
        assert fresh.checksums() == checksums
        assert fresh.tokens() == tokens
    assert tokens != base_tokens

    # The mirror is a warm start: the engine joins at its version, and goes on from there.
    with engine(mirror, quantization=QUANTIZATION) as warm:
        assert warm.checksums() == checksums
        warm.init(sync_dir=str(sync_dir))
        assert warm.backend._at.version == 3
        sync_llm(warm.llm, 4, stage_timeout_s=60, run_id=publisher.run_id)
        newest = warm.checksums()
    final_4 = tmp_path / "final-4"
    materialize(RunFolder(open_store(str(sync_dir))), Checkpoint(base), 4, final_4)
    with engine(final_4, quantization=QUANTIZATION) as fresh:
        assert fresh.checksums() == newest


def test_quantized_engine_without_a_run_is_refused_by_name(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path / "base")
    with engine(tmp_path / "base", quantization=QUANTIZATION) as live:
        before = live.checksums()
        with pytest.raises(TensorRefused, match=r"layers\.0\.self_attn\.qkv_proj .*can only be reloaded from a mirror"):
            live.init()
        assert live.checksums() == before


def _check_between_prepare_and_apply_takes_nothing_wrong(live: Engine, checksums: dict[str, str]) -> None:
    """The check needs the mirror at the engine's version, while a prepared update holds it at the next."""
    live.backend._handoff.wait(3, 4, timeout_s=60)
    live.llm.start_weight_update()
    live.llm.update_weights({"update_info": {"version": 4, "run": live.run_id, "action": "prepare"}})
    live.llm.finish_weight_update()
    prepared = live.backend._prepared
    verify_llm(live.llm)
    assert live.backend._prepared is None
    with pytest.raises(ApplyError, match="the mirror is not at the version of the update"):
        prepared.commit(live.model, "scatter", live.worker.vllm_config)
    assert live.checksums() == checksums


def _fails_half_way(reload_layers: object) -> object:
    def reload_some(model: object, plan: object, layers: list[str], *rest: object) -> None:
        reload_layers(model, plan, layers[: len(layers) // 2], *rest)  # type: ignore[operator]
        raise RuntimeError("the loader broke")

    return reload_some
