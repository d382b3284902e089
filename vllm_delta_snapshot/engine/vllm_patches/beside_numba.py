# SPDX-License-Identifier: Apache-2.0
"""Let vLLM's CPU engine start in a process that has numba loaded, as a trainer's with the compiled kernel has.

vLLM 0.31 and 0.32 look through the attributes of every loaded module for their kernels, and read ``vars(value)`` of
each as a dictionary. One object of llvmlite answers to any attribute, ``__dict__`` too, with something that is none;
the engine then fails to start with "'_lib_fn_wrapper' object has no attribute 'get'".
"""

from __future__ import annotations

import builtins
from types import ModuleType
from typing import Any

__all__ = ["bear_odd_attributes"]


def bear_odd_attributes(module: ModuleType) -> None:
    """Act on ``vllm.triton_utils.dispatcher``. Does nothing twice."""
    module.__dict__["vars"] = _vars


def _vars(value: Any) -> dict[str, Any]:
    found = builtins.vars(value)
    return found if hasattr(type(found), "get") else {}
