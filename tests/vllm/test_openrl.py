"""A folder as OpenRL writes it, made by hand from its description, is applied to a served engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.engines import engine
from tests.support.tiny_models import make_model
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.errors import CorruptFile, RunMismatch, UnsupportedFormat


def _write_openrl(folder: Path, base: Path, names: list[str], version: int = 2) -> dict[str, torch.Tensor]:
    """Write a delta of every 50th element; return the whole checkpoint after it."""
    tensors = load_file(base / "model.safetensors")
    packed, shapes = {}, []
    for place, name in enumerate(names):
        flat = tensors[name].reshape(-1)
        indices = torch.arange(0, flat.numel(), 50, dtype=torch.int32)
        flat[indices.long()] = flat[indices.long()] * 2 + 1
        packed |= {f"{place}.indices": indices, f"{place}.values": flat[indices.long()].clone()}
        shapes.append(list(tensors[name].shape))
    folder.mkdir()
    save_file(packed, folder / "delta.safetensors", metadata={"layer_names": json.dumps(names)})
    changed = sum(part.numel() for key, part in packed.items() if key.endswith("indices"))
    total = sum(tensor.numel() for tensor in tensors.values())
    metadata = {
        "base_model": "base",
        "created_at": "2026-01-01T00:00:00",
        "format": "sparse_delta",
        "format_version": version,
        "kind": "sampler",
        "model_id": "m",
        "changed_elements": changed,
        "total_elements": total,
        "layer_names": names,
        "layer_shapes": shapes,
        "density_pct": round(100 * changed / total, 3),
        "timestamp": 0.5,
        "something_new": True,
    }
    (folder / "metadata.json").write_text(json.dumps(metadata))
    return tensors


NAMES = ["model.embed_tokens.weight", "model.layers.1.self_attn.v_proj.weight", "model.norm.weight"]


def test_openrl_folder_is_applied_exactly(tmp_path: Path) -> None:
    base, after = tmp_path / "base", tmp_path / "after"
    make_model("qwen3", base)
    tensors = _write_openrl(tmp_path / "delta", base, NAMES)
    make_model("qwen3", after)
    save_file(tensors, after / "model.safetensors", metadata={"format": "pt"})
    _write_openrl(tmp_path / "old", base, NAMES, version=1)
    _write_openrl(tmp_path / "torn", base, NAMES)
    torn = tmp_path / "torn" / "delta.safetensors"
    torn.write_bytes(torn.read_bytes()[:-3])
    with engine(base) as live:
        live.init()
        before = live.checksums()
        for folder, kind in (("old", UnsupportedFormat), ("torn", CorruptFile)):
            live.llm.start_weight_update()
            with pytest.raises(kind):
                live.llm.update_weights({"update_info": {"target_weights_path": str(tmp_path / folder)}})
        assert live.checksums() == before
        live.llm.start_weight_update()
        live.llm.update_weights({"update_info": {"target_weights_path": str(tmp_path / "delta")}})
        live.llm.finish_weight_update("openrl-1")
        checksums = live.checksums()
        live.llm.reset_prefix_cache()
        tokens = live.tokens()
        _refused_while_following(live, base, tmp_path)
    with engine(after) as fresh:
        assert (fresh.checksums(), fresh.tokens()) == (checksums, tokens)
    assert checksums != before


def _refused_while_following(live, base: Path, tmp_path: Path) -> None:
    model = make_model("qwen3", tmp_path / "again")
    DeltaPublisher(model, sync_dir=str(tmp_path / "run"), base=base)
    # The engine left the base by the folder above, so it cannot follow a run from the base.
    with pytest.raises(RunMismatch, match=r"a version of no run.*Restart the engine"):
        live.init(sync_dir=str(tmp_path / "run"))


def test_openrl_folder_is_refused_by_an_engine_that_follows_a_run(tmp_path: Path) -> None:
    base = tmp_path / "base"
    model = make_model("qwen3", base)
    DeltaPublisher(model, sync_dir=str(tmp_path / "run"), base=base)
    _write_openrl(tmp_path / "delta", base, NAMES)
    with engine(base) as live:
        live.init(sync_dir=str(tmp_path / "run"))
        before = live.checksums()
        live.llm.start_weight_update()
        with pytest.raises(RunMismatch, match="follows a run"):
            live.llm.update_weights({"update_info": {"target_weights_path": str(tmp_path / "delta")}})
        assert live.checksums() == before
