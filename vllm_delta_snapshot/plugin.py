# SPDX-License-Identifier: Apache-2.0
"""The entry point of vLLM's `general_plugins`: `register()` and nothing else.

vLLM calls it in every process of an engine (API server, engine core, workers, model inspection), without a guard: an
exception here would stop vLLM for everybody. So it imports nothing heavy, does nothing twice, and cannot fail.
"""

from __future__ import annotations

import logging

__all__ = ["BACKEND", "register"]

BACKEND = "delta_snapshot"
"""The name in ``WeightTransferConfig(backend=...)``."""

_MODULE = "vllm_delta_snapshot.engine.backend"
_CLASS = "DeltaSnapshotWeightTransferEngine"

# Under vLLM's own logger: it is the only one whose INFO lines reach the user from a worker.
logger = logging.getLogger("vllm.delta_snapshot")


def register() -> None:
    """Register the backend with vLLM, by name only: the engine's module is imported when a worker needs it."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

        try:
            Factory.register_engine(BACKEND, _MODULE, _CLASS)
        except ValueError:
            _say_who_owns_the_name(Factory)
        _prepare_process()
    except Exception:
        logger.exception("delta_snapshot could not be registered; vLLM goes on without it")


def _prepare_process() -> None:
    """Arrange for what has to be done when vLLM's modules are loaded, in the processes that load them."""
    from vllm_delta_snapshot.engine.plan import compiled
    from vllm_delta_snapshot.engine.vllm_patches import beside_numba, cpu, executor
    from vllm_delta_snapshot.engine.vllm_patches.on_import import on_import
    from vllm_delta_snapshot.engine.vllm_patches.quiet import quiet_not_staged

    on_import("vllm.model_executor.layers.utils", cpu.keep_plain_linears)
    on_import("vllm.model_executor.layers.fused_moe.experts.cpu_moe", cpu.keep_plain_experts)
    on_import("vllm.compilation.caching", compiled.keep_caches_apart)
    on_import("vllm.triton_utils.dispatcher", beside_numba.bear_odd_attributes)
    on_import("vllm.v1.executor.multiproc_executor", executor.keep_answers_in_step)
    quiet_not_staged()


def _say_who_owns_the_name(factory: object) -> None:
    """Warn if the name is another plugin's. Ours, from an earlier call in this process, is no news."""
    loader = getattr(factory, "_registry", {}).get(BACKEND)
    owner = loader() if loader is not None else None
    if owner is None or (owner.__module__, owner.__qualname__) != (_MODULE, _CLASS):
        name = f"{owner.__module__}.{owner.__qualname__}" if owner is not None else "an unknown class"
        logger.warning(
            "weight transfer backend %r belongs to %s, not to vllm-delta-snapshot. Uninstall one of the two, or "
            "choose with VLLM_PLUGINS (comma-separated entry point names, no spaces).",
            BACKEND,
            name,
        )
