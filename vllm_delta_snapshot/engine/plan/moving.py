# SPDX-License-Identifier: Apache-2.0
"""What moves live weights, or takes them away, while an engine serves: refused by name.

The load plan says where each weight lies; whoever moves weights behind it makes the plan lie. vLLM's load balancing of
experts (EPLB) rewrites experts in place and routes by a map of its own; its prefetching offloader keeps weights on the
host and streams them through shared buffers; an engine that sleeps has no memory behind its weights.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from vllm_delta_snapshot.errors import ApplyError, TensorRefused

__all__ = ["refuse_asleep", "refuse_moving"]

_ALLOCATORS: Final = (
    ("vllm.device_allocator.cumem", "CuMemAllocator"),
    ("vllm.device_allocator.xpumem", "XpuMemAllocator"),
)


def refuse_moving(config: Any) -> None:
    """Refuse an engine whose weights do not stay where they are, or are not there now.

    Args:
        config: vLLM's configuration of the engine; ``None`` where there is no engine.

    Raises:
        TensorRefused: says which feature it is, and how to go on.
        ApplyError: the engine sleeps.
    """
    parallel = getattr(config, "parallel_config", None)
    if getattr(parallel, "enable_eplb", False):
        raise TensorRefused(
            "load balancing of experts (EPLB) moves experts between workers while the engine serves, so an update "
            "would write them to where they no longer are",
            tensor="the experts of this model",
            found="enable_eplb",
            hint="Start the engine without --enable-eplb; expert parallelism without it is served.",
        )
    if _is_prefetched(getattr(config, "offload_config", None)):
        raise TensorRefused(
            "weights are offloaded to the host and streamed through buffers that layers share, so an update would not "
            "reach them",
            tensor="the offloaded layers",
            found="the prefetch backend of vLLM's weight offloading",
            hint="Start the engine without --offload-group-size; --cpu-offload-gb keeps weights in place.",
        )
    refuse_asleep()


def refuse_asleep() -> None:
    """Refuse to touch weights that have no memory behind them.

    Raises:
        ApplyError: the engine sleeps.
    """
    if _is_asleep():
        raise ApplyError(
            "the engine sleeps: there is no memory behind its weights",
            found="sleep mode",
            hint='Wake it up first, its weights at least: POST /wake_up?tags=weights, or LLM.wake_up(["weights"]).',
        )


def _is_asleep() -> bool:
    """Say whether vLLM's allocator in this process has taken memory away from weights."""
    for module, name in _ALLOCATORS:
        kind = getattr(sys.modules.get(module), name, None)
        allocator: Any = getattr(kind, "instance", None)
        allocations = getattr(allocator, "pointer_to_data", None) or {}
        if any(getattr(data, "is_asleep", False) and data.tag == "weights" for data in list(allocations.values())):
            return True
    return False


def _is_prefetched(offload: Any) -> bool:
    if offload is None:
        return False
    backend = getattr(offload, "offload_backend", "auto")
    group = getattr(getattr(offload, "prefetch", None), "offload_group_size", 0)
    return backend == "prefetch" or (backend == "auto" and group > 0)
