"""Engines as vLLM starts them by default, compiled: after updates they answer as a fresh one, to the last bit.

Every version changes every tensor, so one weight that compiled code had kept would show in the log-probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cli import Outcome
from tests.support.compilers import ALL_COMPILED, CAN_COMPILE
from tests.support.digests import unchanged
from tests.support.engines import PROMPTS, Engine, engine
from tests.support.server import CheckedServer, ServerProcess, servers
from tests.support.tiny_models import ARCHITECTURES, WEIGHTS_ONLY, make_model, train_step
from trainer_hooks import DeltaPublisher
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.drive import sync_llm, verify_llm
from vllm_delta_snapshot.errors import CompatibilityError
from vllm_delta_snapshot.runs.materialize import materialize
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import open_store

pytestmark = pytest.mark.skipif(not CAN_COMPILE, reason="vLLM compiles with a C++ compiler: there is none")

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


def _recreate(model: Any, name: str) -> None:
    """Put a weight of a module into another parameter, elsewhere: compiled code must look for it anew."""
    module = model.model.get_submodule(name)
    kept = module.weight
    module.weight = torch.nn.Parameter(kept.detach().clone(), requires_grad=False)
    module.weight.__dict__.update(kept.__dict__)
    kept.data.fill_(float("nan"))


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
            if number == 3:
                _recreate(live.model, "norm")
            if number != 2:  # the second is missed, and merged into the third
                sync_llm(live.llm, number, run_id=publisher.run_id)
        after = live.checksums(), live.answers()
        verify_llm(live.llm)
        sync_llm(live.llm, 0, allow_rollback=True, run_id=publisher.run_id)
        assert (live.checksums(), live.answers()) == before
        sync_llm(live.llm, 3, run_id=publisher.run_id)
        assert (live.checksums(), live.answers()) == after

    materialize(RunFolder(open_store(str(sync_dir))), Checkpoint(base), 3, final)
    with engine(final, **options) as fresh:
        assert _is_compiled(fresh)
        assert (fresh.checksums(), fresh.answers()) == after
    assert unchanged(before[0], after[0]) == []
    assert before[1] != after[1]


def test_engine_whose_compiler_froze_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights change and its answers do not: nothing but the refusal stands between that and a wrong sample."""
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


def test_compiled_server_of_two_workers_is_brought_to_a_version_and_back_by_the_commands(tmp_path: Path) -> None:
    base, sync_dir, final = tmp_path / "base", tmp_path / "run", tmp_path / "final"
    model = make_model("qwen3", base)
    with DeltaPublisher(model, sync_dir=str(sync_dir), base=base) as publisher:
        for number in (1, 2):
            train_step(model, number)
            publisher.publish(step=number)
    materialize(RunFolder(open_store(str(sync_dir))), Checkpoint(base), 2, final)
    options = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp")
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "DELTA_SNAPSHOT_STAGE_DIR": str(tmp_path / "stage")}
    live, fresh = (
        ServerProcess(folder, tmp_path / f"{folder.name}.log", *options, is_compiled=True, **environment)
        for folder in (base, final)
    )
    with servers(live):
        before = live.client.checksums(), _answers(live.client)
        Outcome("sync", sync_dir, "--server", live.client.url, "--version", 1).assert_ok()
        Outcome("sync", sync_dir, "--server", live.client.url).assert_ok()
        after = live.client.checksums(), _answers(live.client)
        Outcome("verify", "--server", live.client.url).assert_ok()
        Outcome("sync", sync_dir, "--server", live.client.url, "--version", 0, "--allow-rollback").assert_ok()
        assert (live.client.checksums(), _answers(live.client)) == before
    with servers(fresh):
        assert (fresh.client.checksums(), _answers(fresh.client)) == after
    assert "Warming up model for the compilation" in live.log.read_text(errors="replace")
    assert unchanged(before[0], after[0]) == []
    assert before[1] != after[1]


def _answers(client: CheckedServer) -> list[Any]:
    """Return greedy tokens for the fixed prompts, each with its log-probability."""
    found = []
    for prompt in PROMPTS:
        body = {"model": "m", "prompt": list(prompt), "max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
        body |= {"logprobs": 1, "return_tokens_as_token_ids": True, "detokenize": False, "return_token_ids": True}
        choice = client.request("POST", "/v1/completions", body)["choices"][0]
        found.append((choice["token_ids"], choice["logprobs"]["token_logprobs"]))
    return found
