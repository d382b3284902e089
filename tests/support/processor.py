"""Which instructions the tests run with: said, and lowered or claimed where a library lets itself be told.

``python -m tests.support.processor`` says what this processor has and what torch, oneDNN and vLLM make of it. With a
level and a command (``... avx2 -m pytest tests/vllm``) Python runs as on a processor of that level: torch and oneDNN
choose lower kernels by their own variables, and vLLM, which asks torch, is answered so in this process and loads the
library that it has for that level. Processes that a test starts (servers, workers) get the variables only.

No library can be told to use what a processor lacks. Where it has no AMX, the level ``amx`` is therefore a claim: vLLM
decides as with AMX (which experts, which packing), but attention, which would execute its instructions, stays as it is.
"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_delta_snapshot.engine.vllm_patches.on_import import on_import

__all__ = ["LEVELS", "claimed", "describe", "lower", "own_level"]

_VARIABLE = "DELTA_SNAPSHOT_TEST_PROCESSOR"
_FLAGS = [
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "amx_fp16",
]


@dataclass(frozen=True)
class Level:
    """What a level is made by.

    Attributes:
        environment: variables that torch and oneDNN read.
        answers: by name of a function of `torch.cpu`, what it says.
    """

    environment: dict[str, str] = field(default_factory=dict)
    answers: dict[str, bool] = field(default_factory=dict)


_NO_AMX = {"_is_amx_tile_supported": False, "_is_amx_fp16_supported": False}
_NO_BF16 = {"_is_avx512_bf16_supported": False, **_NO_AMX}

LEVELS = {
    "avx2": Level(
        {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}, {"_is_avx512_supported": False, **_NO_BF16}
    ),
    "avx512": Level({"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, _NO_BF16),
    "avx512_bf16": Level({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, _NO_AMX),
    "amx": Level({}, {"_is_amx_tile_supported": True}),
}
"""From the lowest to the highest."""


def own_level() -> str:
    """Return the highest level that this processor has, whatever was claimed or lowered."""
    flags = _flags_of_processor()
    for level, flag in (("amx", "amx_tile"), ("avx512_bf16", "avx512_bf16"), ("avx512", "avx512f")):
        if flag in flags:
            return level
    return "avx2"


def claimed() -> str | None:
    """Return the level that these tests run with by request."""
    return os.environ.get(_VARIABLE)


def describe() -> str:
    """Say what the processor has, and what the libraries that are here make of it."""
    flags = _flags_of_processor()
    known = " ".join(flag for flag in _FLAGS if flag in flags) or f"none of {' '.join(_FLAGS)}"
    lines = [f"processor: {_model()}, {os.cpu_count()} cores, {known}"]
    if claimed():
        lines.append(f"as if it were: {claimed()}")
    variables = {name: os.environ[name] for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA") if name in os.environ}
    lines += [f"{name}={value}" for name, value in variables.items()]
    try:
        import torch
    except ImportError:
        return "\n".join([*lines, "torch: not installed"])
    lower()
    supported = torch.ops.mkldnn
    lines.append(
        f"torch {torch.__version__}: kernels {torch.backends.cpu.get_cpu_capability()}; oneDNN products of "
        f"bf16 {_yes(supported._is_mkldnn_bf16_supported())}, fp16 {_yes(supported._is_mkldnn_fp16_supported())}; "
        f"AMX tiles {_yes(torch.cpu._is_amx_tile_supported())}"
    )
    lines.append(f"vLLM: {_vllm_library()}")
    return "\n".join(lines)


def lower() -> None:
    """Have torch answer in this process as at the level that was asked for. To be called before vLLM is imported."""
    level = claimed()
    if level is None:
        return
    import torch

    for name, answer in LEVELS[level].answers.items():
        setattr(torch.cpu, name, lambda answer=answer: answer)
    if level == "amx" != own_level():
        on_import("vllm.v1.attention.backends.cpu_attn", _without_amx)


def _without_amx(attention: Any) -> None:
    choose = attention._get_attn_isa
    attention._get_attn_isa = lambda *args, **kwargs: choose(*args, **kwargs).replace("amx", "vec")


def run_python(level: str, arguments: list[str]) -> None:
    """Become a Python that runs as on a processor of this level."""
    environment = {**os.environ, **LEVELS[level].environment, _VARIABLE: level}
    os.execve(sys.executable, [sys.executable, *arguments], environment)


def _vllm_library() -> str:
    import torch

    if not torch.cpu._is_avx512_supported():
        return "_C_AVX2"
    return "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"


def _yes(value: object) -> str:
    return "yes" if value else "no"


def _flags_of_processor() -> set[str]:
    for line in _cpuinfo():
        if line.startswith("flags"):
            return set(line.split(":", 1)[1].split())
    return set()


def _model() -> str:
    names = [line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return f"{names[0] if names else 'unknown'} ({platform.machine()})"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(errors="replace").splitlines() if path.exists() else []


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_python(sys.argv[1], sys.argv[2:])
    print(describe())  # noqa: T201
