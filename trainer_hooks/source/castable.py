# SPDX-License-Identifier: Apache-2.0
"""Which dtypes of a trainer become the serving dtype of a tensor by rounding alone."""

from __future__ import annotations

import torch

from vllm_delta_snapshot.errors import SourceError
from vllm_delta_snapshot.types import TensorSpec

__all__ = ["check_dtype", "serving_dtype"]


def check_dtype(spec: TensorSpec, dtype: torch.dtype) -> None:
    """Check that a dtype becomes the serving dtype by rounding alone.

    Raises:
        SourceError: it does not fit.
    """
    serving = serving_dtype(spec)
    if dtype == serving:
        return
    if not (dtype.is_floating_point and serving.is_floating_point and spec.element.itemsize > 1):
        raise SourceError(
            "the tensor cannot be cast to the serving dtype by rounding alone",
            tensor=spec.name,
            expected=serving,
            found=dtype,
            hint="Give the tensor in the dtype of the base checkpoint.",
        )


def serving_dtype(spec: TensorSpec) -> torch.dtype:
    """Return torch's name for a tensor's serving dtype."""
    dtype = getattr(torch, spec.element.torch_name)
    assert isinstance(dtype, torch.dtype)  # noqa: S101 - names come from our own table
    return dtype
