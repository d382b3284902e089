# SPDX-License-Identifier: Apache-2.0
"""What compiled code and captured graphs may know of weights: where they lie, and nothing else.

vLLM compiles models by default. Code that reads weights by their parameters at each call sees every update. A compiler
that folds them into what it compiles has copies that no update reaches: the weights would be right, and the answers
old. Inductor does so when it freezes, which vLLM's CPU backend has it do with ``max_autotune``. That is refused.

CUDA graphs read the addresses that weights had when they were captured. Updates keep them; if something else has put
weights elsewhere since the model was loaded, the graphs read memory that is nobody's, and the engine must not serve.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, Final

import torch

from vllm_delta_snapshot.engine.plan.load_plan import Fingerprint, fingerprint_of
from vllm_delta_snapshot.engine.vllm_patches.cpu import is_ours
from vllm_delta_snapshot.engine.vllm_patches.cpu_linear import linear_for
from vllm_delta_snapshot.errors import CompatibilityError, WeightsUncertain

__all__ = ["keep_caches_apart", "refuse_folded_weights", "refuse_moved_weights"]

_MARK: Final = "_delta_snapshot_apart"
_KNOWN: Final = frozenset({"", "eager", "aot_eager", "inductor", "cudagraphs"})
_FROZEN: Final = "_frozen_param"


def refuse_folded_weights(config: Any) -> None:
    """Refuse an engine whose compiler folds weights, or is not known not to. Reads no weight; nothing for eager ones.

    Args:
        config: vLLM's configuration of the engine.

    Raises:
        CompatibilityError: says which setting it is.
    """
    compilation = getattr(config, "compilation_config", None)
    if compilation is None or not int(getattr(compilation, "mode", None) or 0):
        return
    backend = compilation.backend
    reason = _why_folded(compilation, is_cpu=config.device_config.device_type == "cpu")
    if reason is None and not (isinstance(backend, str) and backend in _KNOWN):
        reason = f"compiler {backend!r}, of which that is not known"
    if reason is not None:
        raise CompatibilityError(
            "this engine may answer by weights that were folded into compiled code, where no update reaches them",
            found=reason,
            hint="Start it without that setting, or with --enforce-eager.",
        )


def refuse_moved_weights(config: Any, model: torch.nn.Module, as_loaded: Fingerprint) -> None:
    """Refuse an engine with captured graphs whose weights lie elsewhere than when they were captured. Reads no weight.

    Args:
        config: vLLM's configuration of the engine.
        model: the live model.
        as_loaded: where its tensors lay when it had been loaded, before any graph was captured.

    Raises:
        WeightsUncertain: the graphs read weights that no update reaches; names those that moved.
    """
    if not _captures(getattr(config, "compilation_config", None)):
        return
    now = fingerprint_of(model)
    if now == as_loaded:
        return
    there = frozenset(now)
    moved = [name for name, *rest in as_loaded if (name, *rest) not in there] or [name for name, *_ in now]
    raise WeightsUncertain(
        "weights were put elsewhere after CUDA graphs had been captured, which go on reading the old place",
        tensor=", ".join(moved[:5]),
        hint="Do not resume this engine: restart it, or start it with --enforce-eager.",
    )


def keep_caches_apart(module: ModuleType) -> None:
    """Act on ``vllm.compilation.caching``: code compiled for packed weights is not for plain ones. Does nothing twice.

    vLLM keeps compiled code on disk by what an engine is; of its weight transfer, and so of its packing, it asks not.
    """
    caching: Any = module
    plain = caching.aot_compile_hash_factors
    if getattr(plain, _MARK, False):
        return

    def aot_compile_hash_factors(config: Any) -> list[str]:
        factors: list[str] = plain(config)
        if is_ours(config) and config.device_config.device_type == "cpu":
            factors.append(f"delta_snapshot: plain weights, {linear_for(config.model_config.dtype).__name__}")
        return factors

    setattr(aot_compile_hash_factors, _MARK, True)
    caching.aot_compile_hash_factors = aot_compile_hash_factors


def _captures(compilation: Any) -> bool:
    if compilation is None:
        return False
    mode = getattr(compilation, "cudagraph_mode", None)
    return getattr(mode, "name", "NONE") != "NONE" or compilation.backend == "cudagraphs"


def _why_folded(compilation: Any, *, is_cpu: bool) -> str | None:
    inductor = compilation.inductor_compile_config
    if inductor.get("freezing"):
        return "inductor_compile_config: freezing"
    if inductor.get("max_autotune") and is_cpu:
        return "inductor_compile_config: max_autotune, with which vLLM's CPU backend has inductor freeze"
    # Only modules that are there: importing them takes seconds, and an engine that compiled has them.
    settings: Any = sys.modules.get("torch._inductor.config")
    if settings is not None and settings.freezing:
        return "inductor's freezing (TORCHINDUCTOR_FREEZING)"
    cache: Any = sys.modules.get("torch._inductor.codecache")
    for code in [] if cache is None else cache.PyCodeCache.modules:
        if any(name.startswith(_FROZEN) for name in vars(code)):
            return f"weights frozen into {code.__name__}"
    return None
