# SPDX-License-Identifier: Apache-2.0
"""What compiled code may know of weights beside where they lie: nothing, or the engine is refused.

vLLM compiles models by default. Code that reads weights by their parameters at each call sees every update. A compiler
that folds them into what it compiles has copies that no update reaches: the weights would be right, and the answers
old. Inductor does so when it freezes, which vLLM's CPU backend turns on with ``max_autotune``.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, Final

from vllm_delta_snapshot.engine.cpu import is_ours
from vllm_delta_snapshot.engine.cpu_linear import linear_for
from vllm_delta_snapshot.errors import CompatibilityError

__all__ = ["keep_caches_apart", "refuse_folded_weights"]

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
