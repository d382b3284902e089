"""Engines as vLLM starts them by default, compiled: after updates they answer as a fresh one, to the last bit.

Every version changes every tensor, so one weight that compiled code had kept would show in the log-probabilities.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.digests import unchanged
from tests.support.engines import ALL_COMPILED, Engine, engine
from tests.support.tiny_models import ARCHITECTURES, WEIGHTS_ONLY, make_model, train_step
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.drive import sync_llm, verify_llm
from vllm_delta_snapshot.errors import CompatibilityError
from vllm_delta_snapshot.materialize import materialize
from vllm_delta_snapshot.run_folder import RunFolder
from vllm_delta_snapshot.store import open_store

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="vLLM compiles with a C++ compiler: c++ is missing")

_FEW: dict[str, dict[str, Any]] = {
    "qwen2_bias": {},
    "qwen3_moe": {},
    "llama_tied": {"quantization": "fp8_per_channel"},
}
_MORE: dict[str, dict[str, Any]] = {name: {} for name in ARCHITECTURES if name not in WEIGHTS_ONLY | _FEW.keys()}
_CASES = _FEW | (_MORE if ALL_COMPILED else {})


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile into a folder of these tests, in which a fresh engine may find what the first one left."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("cache")))
        patched.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # vLLM sets it; put back afterwards
        patched.delenv("TORCHINDUCTOR_CACHE_DIR")
        yield


def _is_compiled(live: Engine) -> bool:
    inner = live.model.model
    return bool(inner.compiled) and not inner.do_not_compile


def _is_kept_apart(live: Engine) -> bool:
    """Say whether vLLM will not take what it compiled here for an engine that packs its weights, nor the reverse."""
    from vllm.compilation.caching import aot_compile_hash_factors

    config = live.worker.vllm_config
    plain, transfer = aot_compile_hash_factors(config), config.weight_transfer_config
    config.weight_transfer_config = None
    packed = aot_compile_hash_factors(config)
    config.weight_transfer_config = transfer
    return plain != packed


@pytest.mark.parametrize("architecture", _CASES)
def test_compiled_engine_answers_after_updates_as_a_fresh_one(architecture: str, tmp_path: Path) -> None:
    base, sync_dir, final = tmp_path / "base", tmp_path / "run", tmp_path / "final"
    options = {"enforce_eager": False} | _CASES[architecture]
    model = make_model(architecture, base)
    publisher = DeltaPublisher(model, sync_dir=str(sync_dir), base=base, asynchronous=False)
    with engine(base, **options) as live:
        assert _is_compiled(live)
        assert _is_kept_apart(live)
        before = live.checksums(), live.answers()
        live.init(sync_dir=str(sync_dir))
        assert (live.checksums(), live.answers()) == before
        for number in (1, 2, 3):
            train_step(model, number)
            publisher.publish(step=number)
            if number != 2:  # the second is missed, and merged into the third
                sync_llm(live.llm, number)
        after = live.checksums(), live.answers()
        verify_llm(live.llm)
        sync_llm(live.llm, 0, allow_rollback=True)
        assert (live.checksums(), live.answers()) == before
        sync_llm(live.llm, 3)
        assert (live.checksums(), live.answers()) == after

    materialize(RunFolder(open_store(str(sync_dir))), Checkpoint(base), 3, final)
    with engine(final, **options) as fresh:
        assert _is_compiled(fresh)
        assert (fresh.checksums(), fresh.answers()) == after
    assert unchanged(before[0], after[0]) == []
    assert before[1] != after[1]


def test_engine_whose_compiler_froze_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights change and its answers do not: nothing but the refusal stands between that and a wrong sample."""
    import torch

    make_model("qwen3", tmp_path / "base")
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", "0")  # with it, freezing fails before anything is served
    settings = {"inductor_compile_config": {"max_autotune": True}}
    with engine(tmp_path / "base", enforce_eager=False, compilation_config=settings) as live:
        before = live.answers()
        weight = live.model.get_parameter("model.layers.1.mlp.down_proj.weight")
        with torch.no_grad():
            weight.neg_()
        live.llm.reset_prefix_cache()
        assert live.answers() == before
        with pytest.raises(CompatibilityError, match=r"folded into compiled code.*max_autotune.*--enforce-eager"):
            live.init()
        del live.worker.vllm_config.compilation_config.inductor_compile_config["max_autotune"]
        with pytest.raises(CompatibilityError, match="weights frozen into torch"):
            live.init()
