"""vLLM's CUDA code path without a GPU: a forced platform, whose tensors lie on the CPU. For a process of its own.

Which kernels, loaders and post-processing vLLM chooses for a GPU is Python, and so is what they do to weights. What
needs the device (kernels, streams) is replaced by plain torch, or by what fails when it is called. Import this before
anything else of vLLM's.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import os
import sys
import types
from pathlib import Path
from typing import Any

os.environ |= {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TRITON_INTERPRET": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "delta_snapshot",
}

import torch

_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
_CAPABILITY = 90  # an H100


class _Absent(types.ModuleType):
    """A compiled module that is not there: importable, and whatever is called in it fails."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.__path__: list[str] = []
        sys.modules[name] = self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if "version" in name and "supported" in name:
            return lambda *_, **__: None if "reason" in name else True

        def call(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"{self.__name__}.{name}")

        return call


class _Nothing:
    """Stands for streams and events."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


for _name in (
    "_C_stable_libtorch",
    "_moe_C_stable_libtorch",
    "vllm_flash_attn",
    "vllm_flash_attn.flash_attn_interface",
):
    _Absent(f"vllm.{_name}")

import vllm.platforms  # noqa: E402 - after what it imports
from vllm.platforms.cuda import CudaPlatformBase  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402


def _answers(**values: Any) -> dict[str, Any]:
    return {name: classmethod(lambda cls, *_, _value=value, **__: _value) for name, value in values.items()}


_ANSWERS = _answers(
    get_device_capability=DeviceCapability(_CAPABILITY // 10, _CAPABILITY % 10),
    get_device_name="NVIDIA H100 80GB HBM3",
    get_device_uuid="GPU-0",
    get_device_total_memory=80 << 30,
    get_device_numa_node=None,
    get_device_communicator_cls="vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase",
    device_count=8,
    num_compute_units=132,
    is_fully_connected=True,
    is_integrated_gpu=False,
    is_pin_memory_available=False,
    use_custom_allreduce=False,
    set_device=None,
)


class _Platform(type("_Answers", (CudaPlatformBase,), _ANSWERS)):  # type: ignore[misc]
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"

    @classmethod
    def has_device_capability(cls, capability: Any, device_id: int = 0) -> bool:
        return _number(capability) <= _CAPABILITY

    @classmethod
    def is_device_capability(cls, capability: Any, device_id: int = 0) -> bool:
        return _number(capability) == _CAPABILITY

    @classmethod
    def is_device_capability_family(cls, capability: Any, device_id: int = 0) -> bool:
        return _number(capability) // 10 == _CAPABILITY // 10

    @classmethod
    def get_attn_backend_cls(cls, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None) -> str:
        if attn_selector_config.use_mla:
            return "vllm.v1.attention.backends.mla.triton_mla.TritonMLABackend"
        return "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        torch.manual_seed(seed)


def _number(capability: Any) -> int:
    return int(capability[0] * 10 + capability[1] if isinstance(capability, tuple) else capability)


vllm.platforms._current_platform = _Platform()


def _scaled_fp8_quant(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    use_per_token_if_dynamic: bool = False,
    output: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What vLLM's CUDA kernel of this name computes."""
    wide = input.float()
    if scale is None and use_per_token_if_dynamic:
        scale = (wide.abs().amax(-1, keepdim=True) / _FP8_MAX).clamp_min(1 / (_FP8_MAX * 512))
    elif scale is None:
        scale = (wide.abs().max() / _FP8_MAX).reshape(1)
    factor = scale.float()
    factor = factor.reshape(()) if factor.numel() == 1 else factor.reshape(-1, 1)
    quantized = (wide / factor).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    return (quantized if output is None else output.copy_(quantized)), scale


def _prepare() -> None:
    with contextlib.suppress(ImportError):
        importlib.import_module("vllm._C_AVX2")  # activations, on any x86
    for name in ("empty_cache", "synchronize", "reset_peak_memory_stats"):
        setattr(torch.accelerator, name, lambda *_, **__: None)
    for name in ("max_memory_allocated", "memory_reserved", "memory_allocated", "max_memory_reserved"):
        setattr(torch.accelerator, name, lambda *_, **__: 0)
    properties = types.SimpleNamespace(
        multi_processor_count=132, total_memory=80 << 30, shared_memory_per_block_optin=232448, major=9, minor=0
    )
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = _Nothing
    cuda.get_device_properties = lambda *_, **__: properties
    import vllm._custom_ops as ops
    from vllm.model_executor.models import registry

    ops.scaled_fp8_quant = _scaled_fp8_quant  # type: ignore[assignment]
    ops.cutlass_scaled_mm_supports_fp8 = lambda _: True
    ops.cutlass_scaled_mm_supports_block_fp8 = lambda _: True
    # In this process: another one would not have this platform.
    lazy: Any = registry._LazyRegisteredModel
    lazy.inspect_model_cls = lambda self: registry._ModelInfo.from_model_cls(self.load_model_cls())


_prepare()


def build(folder: Path, rendezvous: Path, **options: Any) -> tuple[Any, Any]:
    """Load a checkpoint as a CUDA engine would, without the engine. Returns the model and vLLM's configuration."""
    from vllm.config import DeviceConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    settings = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 128, "skip_tokenizer_init": True}
    config = EngineArgs(model=str(folder), **(settings | options)).create_engine_config()
    config.device_config = DeviceConfig(device=torch.device("cpu"))
    with set_current_vllm_config(config):
        if not parallel_state.model_parallel_is_initialized():
            address = f"file://{rendezvous}"
            init_distributed_environment(1, 0, distributed_init_method=address, local_rank=0, backend="gloo")
            initialize_model_parallel(1)
        return get_model(vllm_config=config), config
