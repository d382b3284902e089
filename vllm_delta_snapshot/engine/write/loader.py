# SPDX-License-Identifier: Apache-2.0
"""Apply by `loader`: through vLLM's own `load_checkpoint_weight_patches`, the reference.

It works on whole tensors, and marks unchanged elements by NaN; so it cannot carry a NaN, nor integers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm_delta_snapshot.engine.bits import integer_of, torch_dtype_of
from vllm_delta_snapshot.types import TensorPatch

__all__ = ["apply_by_loader", "is_for_loader"]

_LOADER_DTYPES = frozenset({"BF16", "F16", "F32", "F64"})


def is_for_loader(patch: TensorPatch) -> bool:
    """Say whether vLLM's loader can carry the patch exactly."""
    if patch.spec.dtype not in _LOADER_DTYPES:
        return False
    values = integer_of(patch.values).view(torch_dtype_of(patch.spec.element.torch_name))
    return not bool(torch.isnan(values).any())


def apply_by_loader(model: torch.nn.Module, patches: Sequence[TensorPatch]) -> None:
    """Write patches that `is_for_loader` accepts. Not atomic.

    Raises:
        Exception: whatever the model's loader raises; some weights may be written.
    """
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    )

    load_checkpoint_weight_patches(
        model,
        [
            CheckpointWeightPatch(
                name=patch.spec.name,
                shape=patch.spec.shape,
                dtype=torch_dtype_of(patch.spec.element.torch_name),
                values=integer_of(patch.values).view(torch_dtype_of(patch.spec.element.torch_name)),
                indices=torch.from_numpy(np.array(patch.positions)),
            )
            for patch in patches
        ],
        # Strictly increasing positions were checked when they were decoded.
        validate_unique_indices=False,
    )
