# SPDX-License-Identifier: Apache-2.0
"""Tensors that lie in one memory although they are several: a collection that was made of what an exporter only lent.

``dict(export())`` of an exporter with one buffer has all names and, under each, what came last. Tied weights look
alike, but are equal in the base too. Only dense tensors are looked at: views that interleave share no element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.errors import SourceError

__all__ = ["Overlap", "overlaps", "refuse_lent"]


@dataclass(frozen=True, slots=True)
class Overlap:
    """Elements that two tensors have in common.

    Attributes:
        names: of the two.
        starts: where in each, flat, the common elements begin; ``None`` if these are not elements of both.
        size: how many they are.
    """

    names: tuple[str, str]
    starts: tuple[int, int] | None
    size: int


def overlaps(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Overlap]:
    """Yield each tensor that lies in the memory of another one, with that one; nothing of what is not dense."""
    spans = [
        (str(tensor.device), tensor.data_ptr(), tensor.nbytes, name, tensor.element_size(), tensor.dtype)
        for name, tensor in tensors
        if tensor.numel() and tensor.is_contiguous()
    ]
    last = None
    for span in sorted(spans, key=lambda span: span[:4]):
        device, start, size, name, width, dtype = span
        if last is not None and last[0] == device and start < last[1] + last[2]:
            common = min(last[1] + last[2], start + size) - start
            is_same = dtype == last[5] and (start - last[1]) % width == 0
            yield Overlap((last[3], name), ((start - last[1]) // width, 0) if is_same else None, common // width)
        if last is None or last[0] != device or start + size > last[1] + last[2]:
            last = span


def refuse_lent(tensors: Iterable[tuple[str, torch.Tensor]], published: Callable[[str], Bits] | None) -> None:
    """Check that tensors that lie in one memory are equal there in what was published, as tied weights are.

    Args:
        tensors: all of a collection, by checkpoint name.
        published: gives the published bits of a tensor, flat; ``None`` if nobody knows, and none may lie in another's.

    Raises:
        SourceError: they are not.
    """
    for found in overlaps(tensors):
        if published is not None and found.starts is not None:
            one, other = (
                published(name)[at : at + found.size] for name, at in zip(found.names, found.starts, strict=True)
            )
            if one.dtype == other.dtype and np.array_equal(one, other):
                continue
        raise SourceError(
            "tensors lie in the same memory, but are different ones in the checkpoint",
            tensor=" and ".join(found.names),
            found=f"{found.size} elements in common",
            hint="An exporter that fills one buffer again must be read as it goes: give the function that returns its "
            "iterator, and no list or dict of what it yielded.",
        )
