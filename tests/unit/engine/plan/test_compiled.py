"""Which compilers an engine may have: those that are known to read weights where they lie, at each call."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_delta_snapshot.engine.plan.compiled import keep_caches_apart, refuse_folded_weights
from vllm_delta_snapshot.errors import CompatibilityError


def _config(mode: int | None, backend: Any = "inductor", device: str = "cpu", **inductor: Any) -> Any:
    return SimpleNamespace(
        compilation_config=SimpleNamespace(mode=mode, backend=backend, inductor_compile_config=inductor),
        device_config=SimpleNamespace(device_type=device),
        weight_transfer_config=SimpleNamespace(backend="delta_snapshot"),
        model_config=SimpleNamespace(dtype=None),
    )


@pytest.mark.parametrize(
    "config",
    [
        None,
        SimpleNamespace(),
        _config(None, "openvino"),
        _config(0, "openvino", freezing=True),
        _config(2, "eager"),
        _config(2),
        _config(3, "", "cuda", max_autotune=True),  # with which inductor freezes nothing there
        _config(3, "inductor", freezing=False, max_autotune=False),
    ],
)
def test_engines_that_fold_nothing_are_taken(config: Any) -> None:
    refuse_folded_weights(config)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (_config(2, freezing=True), "inductor_compile_config: freezing"),
        (_config(3, "inductor", "cuda", freezing=True), "inductor_compile_config: freezing"),
        (_config(2, max_autotune=True), "max_autotune"),
        (_config(1, "openvino"), "compiler 'openvino', of which that is not known"),
        (_config(1, print), "compiler <built-in function print>"),
    ],
)
def test_engines_that_may_fold_weights_are_refused_by_name(config: Any, said: str) -> None:
    with pytest.raises(CompatibilityError, match=r"weights that were folded.*--enforce-eager") as caught:
        refuse_folded_weights(config)
    assert said in str(caught.value)


def test_freezing_by_torchs_own_settings_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._inductor.config", SimpleNamespace(freezing=True))  # type: ignore[arg-type]
    with pytest.raises(CompatibilityError, match="TORCHINDUCTOR_FREEZING"):
        refuse_folded_weights(_config(2))


def test_code_compiled_for_packed_weights_is_kept_apart() -> None:
    import torch

    caching: Any = ModuleType("caching")
    caching.aot_compile_hash_factors = lambda _: ["whatever vLLM asks"]
    keep_caches_apart(caching)
    keep_caches_apart(caching)
    ours = _config(2)
    ours.model_config.dtype = torch.float32
    assert caching.aot_compile_hash_factors(ours) == ["whatever vLLM asks", "delta_snapshot: plain weights, linear"]
    packed, elsewhere = _config(2), _config(2, device="cuda")
    packed.weight_transfer_config = None
    for other in (packed, elsewhere):
        assert caching.aot_compile_hash_factors(other) == ["whatever vLLM asks"]
