# SPDX-License-Identifier: Apache-2.0
"""Between numpy's unsigned bits and torch's integer views."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from vllm_delta_snapshot.dtypes import Bits

__all__ = ["bits_of", "flat_storage", "integer_of", "integer_type", "keeps_bits", "torch_dtype_of"]

_INTEGER: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SIGNED: Final = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


_EXACT: Final = {
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float64),
    (torch.float16, torch.float64),
    (torch.float32, torch.float64),
}
"""Conversions that lose nothing."""


def keeps_bits(source: torch.dtype, live: torch.dtype) -> bool:
    """Say whether values of type `source`, kept as `live`, can be had back bit for bit."""
    return source is live or (source, live) in _EXACT


def torch_dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype of this name, e.g. ``bfloat16``."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)  # noqa: S101 - names come from our own table
    return dtype


def integer_type(dtype: torch.dtype) -> torch.dtype:
    """Return the integer type of the same width."""
    return _INTEGER[dtype.itemsize]


def integer_of(bits: Bits) -> torch.Tensor:
    """Return bits as an integer tensor of the same width, sharing memory where numpy allows a writable view."""
    signed = bits.view(_SIGNED[bits.dtype.itemsize])
    return torch.from_numpy(signed if signed.flags.writeable else signed.copy())


def bits_of(integers: torch.Tensor) -> Bits:
    """Return an integer tensor's bits, on the host."""
    array = integers.cpu().contiguous().numpy()
    bits: Bits = array.view(np.dtype(f"<u{array.dtype.itemsize}"))
    return bits


def flat_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's whole storage as a flat integer tensor of the element's width: writes reach the tensor."""
    itemsize = tensor.element_size()
    flat = torch.empty(0, dtype=_INTEGER[itemsize], device=tensor.device)
    return flat.set_(tensor.untyped_storage(), 0, (tensor.untyped_storage().nbytes() // itemsize,), (1,))
