"""Bases as people have them: draft heads, `inv_freq`, a tied head stored as a copy. Started, updated, verified; and
where an engine would not be what the trainer has, refused with words that say why."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config import ModelConfig

from tests.support.engines import engine
from tests.support.tiny_models import OPTIONS, make_model, train_step
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.drive import sync_llm, verify_llm
from vllm_delta_snapshot.engine.table import apply_table
from vllm_delta_snapshot.errors import SourceError, TensorRefused
from vllm_delta_snapshot.runs.materialize import materialize
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import open_store

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FREQ = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.rand(16) for layer in range(2)}


def extend(base: Path, tensors: Mapping[str, torch.Tensor], **config: object) -> None:
    """Add tensors to a checkpoint, and say things in its config.json."""
    path = base / "model.safetensors"
    save_file({**load_file(path), **{name: t.clone() for name, t in tensors.items()}}, path, metadata={"format": "pt"})
    said = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(said | config))


def make_base(architecture: str, base: Path) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Write a base with tensors that transformers does not load; return the model, and these."""
    model = make_model(architecture, base)
    stored = load_file(base / "model.safetensors")
    if architecture == "llama_tied":
        extra = {HEAD: stored[EMBED], **FREQ}
        extend(base, extra)
        return model, extra
    draft = "model.layers.2"  # the base has two layers; the third is the draft head, with copies of its own
    extra = {
        f"{draft}.embed_tokens.weight": stored[EMBED],
        f"{draft}.shared_head.head.weight": stored[HEAD],
        f"{draft}.eh_proj.weight": torch.rand(128, 256).to(torch.bfloat16),
        **FREQ,
    }
    extend(base, extra, num_nextn_predict_layers=1)
    return model, extra


@pytest.mark.parametrize("architecture", ["llama_tied", "deepseek"])
def test_base_with_tensors_that_nobody_loads_is_served_exactly(architecture: str, tmp_path: Path) -> None:
    base, sync_dir, final = tmp_path / "base", tmp_path / "run", tmp_path / "final"
    model, extra = make_base(architecture, base)
    options: dict[str, Any] = OPTIONS.get(architecture, {})
    where: dict[str, Any] = {"sync_dir": str(sync_dir), "base": base, "asynchronous": False}
    with pytest.raises(SourceError, match="unsourced=") as caught:
        DeltaPublisher(model, **where)
    patterns = json.loads(str(caught.value.hint).partition("unsourced=")[2].partition("]")[0] + "]")
    publisher = DeltaPublisher(model, **where, unsourced=patterns)
    with engine(base, **options) as live:
        live.init(sync_dir=str(sync_dir))
        ways = {name: choice.way for name, choice in live.backend._fitness.choices.items()}
        assert {name for name, way in ways.items() if way != "scatter"} == set(extra)
        assert {ways[name] for name in extra} == {"unread"}
        base_sums = live.checksums()
        for number in (1, 2):
            train_step(model, number)
            sync_llm(live.llm, publisher.publish().version, stage_timeout_s=60, run_id=publisher.run_id)
            verify_llm(live.llm)
        publisher.close()
        materialize(RunFolder(open_store(str(sync_dir))), Checkpoint(base), 2, final)
        # A source that trains what the engine never reads: to it, that is no change.
        weights = load_file(final / "model.safetensors")
        weights |= {name: tensor + 1 for name, tensor in extra.items() if name != HEAD}
        with DeltaPublisher(weights, **where) as publisher:
            before = live.checksums()
            sync_llm(live.llm, publisher.publish().version, stage_timeout_s=60, run_id=publisher.run_id)
            assert live.checksums() == before != base_sums
        verify_llm(live.llm)
        tokens, checksums = live.tokens(), live.checksums()

    kept, made = Checkpoint(base), Checkpoint(final)
    for name in extra:
        wanted = made.bits(EMBED) if name == HEAD else kept.bits(name)
        assert made.bits(name).tolist() == wanted.tolist()
    with engine(final, **options) as fresh:
        assert fresh.checksums() == checksums
        assert fresh.tokens() == tokens


def test_two_workers_agree_on_what_neither_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "VLLM_CPU_OMP_THREADS_BIND", "0|1")
    base, sync_dir, final = tmp_path / "base", tmp_path / "run", tmp_path / "final"
    model, _ = make_base("llama_tied", base)
    two: dict[str, Any] = {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}
    with (
        DeltaPublisher(model, sync_dir=str(sync_dir), base=base, unsourced=["*.inv_freq"]) as publisher,
        engine(base, **two) as live,
    ):
        live.init(sync_dir=str(sync_dir))
        train_step(model, 1)
        version = publisher.publish().wait().version
        sync_llm(live.llm, version, stage_timeout_s=60, run_id=publisher.run_id)
        verify_llm(live.llm)
        checksums = live.all_checksums()
    materialize(RunFolder(open_store(str(sync_dir))), Checkpoint(base), 1, final)
    with engine(final, **two) as fresh:
        assert fresh.all_checksums() == checksums


@pytest.mark.skipif(
    not hasattr(ModelConfig, "maybe_untie_word_embeddings"), reason="this vLLM takes the embedding for both"
)
def test_head_that_differs_though_it_is_said_to_be_tied_is_served_as_it_is_loaded(tmp_path: Path) -> None:
    base, sync_dir, final = tmp_path / "base", tmp_path / "run", tmp_path / "final"
    make_model("llama_tied", base)
    extend(base, {HEAD: load_file(base / "model.safetensors")[EMBED] * 2})
    weights = load_file(base / "model.safetensors")
    with (
        DeltaPublisher(weights, sync_dir=str(sync_dir), base=base, asynchronous=False) as publisher,
        engine(base) as live,
    ):
        live.init(sync_dir=str(sync_dir))
        weights[HEAD][3:50] += 1
        weights[EMBED][5:60] -= 1
        sync_llm(live.llm, publisher.publish().version, stage_timeout_s=60, run_id=publisher.run_id)
        verify_llm(live.llm)
        tokens, checksums = live.tokens(), live.checksums()
    materialize(RunFolder(open_store(str(sync_dir))), Checkpoint(base), 1, final)
    with engine(final) as fresh:
        assert (fresh.tokens(), fresh.checksums()) == (tokens, checksums)


def test_head_that_nothing_says_to_be_tied_is_refused_until_it_is_named(tmp_path: Path) -> None:
    base = tmp_path / "base"
    make_model("llama_tied", base)
    extend(base, {HEAD: load_file(base / "model.safetensors")[EMBED]})
    with engine(base) as live:
        extend(base, {}, tie_word_embeddings=None)  # vLLM knows by now; who reads the checkpoint later does not
        before = live.checksums()
        with pytest.raises(TensorRefused, match=r"config\.json does not say that the two are tied") as caught:
            live.init()
        assert f"takes {EMBED} for it" in str(caught.value)
        assert '{"skip": ["lm_head.*"]}' in str(caught.value)
        assert live.checksums() == before
        live.init(skip=["lm_head.*"])
        assert live.backend._fitness.choices[HEAD].way == "skip"


def test_doctor_shows_what_is_never_read(tmp_path: Path) -> None:
    make_base("llama_tied", tmp_path / "base")
    choices = apply_table(str(tmp_path / "base"), {})
    assert choices[HEAD].reason == f"a copy of {EMBED}, which the model takes for both"
    assert {choices[name].reason for name in FREQ} == {"the model's loader never reads it"}
