"""Engines that cannot be updated in place say so at init, with names; their weights are never touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engines import engine
from tests.support.tiny_models import make_model, quantize_int8
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.engine.plan.load_plan import record_load_plan
from vllm_delta_snapshot.engine.vllm_patches import cpu
from vllm_delta_snapshot.engine.write.fitness import check_fitness
from vllm_delta_snapshot.engine.write.full_check import digest_live
from vllm_delta_snapshot.engine.write.verify import sum_over_workers
from vllm_delta_snapshot.errors import BaseMismatch, TensorRefused
from vllm_delta_snapshot.format.digest import tensor_digest


def test_quantized_layers_are_refused_by_name(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path / "base")
    with engine(tmp_path / "base", quantization="fp8_per_channel") as live:
        before = live.checksums()
        with pytest.raises(TensorRefused, match=r"model\.layers\.0\.self_attn\.qkv_proj \(quantization method"):
            live.init()
        assert live.checksums() == before


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_packed_layers_are_refused_by_name(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(architecture, tmp_path / "base")
    monkeypatch.setattr(cpu, "_is_ours", lambda: False)
    with (
        engine(tmp_path / "base") as live,
        pytest.raises(TensorRefused, match=r"model\.layers\.0\.self_attn\.qkv_proj \(computes from a packed copy\)"),
    ):
        live.init()


@pytest.mark.parametrize("are_weights_as_loaded", [True, False])
def test_weights_that_onednn_packed_are_refused_by_name(are_weights_as_loaded: bool, tmp_path: Path) -> None:
    """They are no tensors: an undo would leave the new ones, and no check would see it."""
    make_model("llama_tied", tmp_path / "base")
    quantize_int8(tmp_path / "base")
    with engine(tmp_path / "base") as live:
        before = live.tokens()
        fitness = check_fitness(
            live.model,
            tmp_path / "base",
            (),
            are_weights_as_loaded=are_weights_as_loaded,
            has_mirror=True,
            config=live.worker.vllm_config,
            refuses=False,
        )
        choice = fitness.choices["model.layers.0.mlp.down_proj.weight"]
        assert choice.way == "refused"
        assert "weights that oneDNN packed" in choice.reason
        assert live.tokens() == before


def test_shuffled_experts_are_found_by_their_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU backend packs experts in place: same shape, other order. Only the comparison of bits can tell."""
    make_model("qwen3_moe", tmp_path / "base")
    with engine(tmp_path / "base") as live:
        # Its linear layers stay plain: packed ones give themselves away before any bit is compared.
        packed = live.model.get_submodule("model.layers.0.mlp.experts.routed_experts")
        monkeypatch.setattr(cpu, "_is_ours", lambda: False)
        packed.quant_method.moe_kernel.fused_experts.process_weights_after_loading(packed)
        before = live.checksums()
        with pytest.raises(BaseMismatch, match=r"tensor model\.layers\.0\.mlp\.experts\.0\.\w+_proj\.weight"):
            live.init()
        assert live.checksums() == before


def test_weights_of_something_else_are_refused(tmp_path: Path) -> None:
    make_model("llama_tied", tmp_path / "base")
    make_model("llama_tied", tmp_path / "other", seed=1)
    with engine(tmp_path / "base") as live:
        live.init()
        with pytest.raises(BaseMismatch, match="live weights are not those of the checkpoint"):
            live.init(checkpoint=str(tmp_path / "other"))


@pytest.mark.parametrize("architecture", ["gemma3", "qwen3_moe"])
def test_every_element_of_the_checkpoint_has_its_place(architecture: str, tmp_path: Path) -> None:
    """Not a sample: the live weights, read through the plan, have the digest of the whole checkpoint."""
    make_model(architecture, tmp_path / "base")
    checkpoint = Checkpoint(tmp_path / "base")
    with engine(tmp_path / "base") as live:
        before = live.checksums()
        plan = record_load_plan(live.model, checkpoint.specs)
        assert live.checksums() == before
        found = sum_over_workers([digest_live(plan, checkpoint.specs)])
    assert found == {spec.name: tensor_digest(spec, bits) for spec, bits in checkpoint.items()}
