"""Exporters that lend their tensors: what they yielded is overwritten, cleared or freed when the next one is asked for.

As bucketed exporters are. Each is a function of the weights by name, and yields the pairs that they are now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch

Pairs = Iterator[tuple[str, torch.Tensor]]
Weights = Mapping[str, torch.Tensor]


def _room(weights: Weights) -> int:
    return max(tensor.nbytes for tensor in weights.values())


def _fill(buffer: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the front of a buffer of bytes, and return it there."""
    view = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return view.copy_(tensor)


def one_buffer(weights: Weights) -> Pairs:
    """Yield all of them from one buffer."""
    buffer = torch.empty(_room(weights), dtype=torch.uint8)
    for name, tensor in weights.items():
        yield name, _fill(buffer, tensor)


def numpy_buffer(weights: Weights) -> Pairs:
    """Yield all of them from one array of numpy's."""
    array = np.empty(_room(weights), np.uint8)
    for name, tensor in weights.items():
        if tensor.numel():
            array[: tensor.nbytes] = tensor.view(torch.uint8).numpy()
        yield name, torch.from_numpy(array[: tensor.nbytes]).view(tensor.dtype).view(tensor.shape)


def bucket(weights: Weights) -> Pairs:
    """Yield views of one flat buffer, side by side until it is full, and then from its front again."""
    buffer = torch.empty(2 * _room(weights), dtype=torch.uint8)
    at = 0
    for name, tensor in weights.items():
        if at + tensor.nbytes > buffer.numel():
            buffer.fill_(0x5A)
            at = 0
        yield name, _fill(buffer[at:], tensor)
        at += -(-tensor.nbytes // 16) * 16


def zeroed(weights: Weights) -> Pairs:
    """Yield copies, each cleared once the next is asked for."""
    for name, tensor in weights.items():
        copy = tensor.clone()
        yield name, copy
        copy.zero_()


def freed(weights: Weights) -> Pairs:
    """Yield copies, each with its memory given back once the next is asked for, as FSDP does."""
    for name, tensor in weights.items():
        copy = tensor.clone()
        yield name, copy
        copy.untyped_storage().resize_(0)


def resized(weights: Weights) -> Pairs:
    """Yield one tensor object, resized and written anew each time."""
    held: dict[torch.dtype, torch.Tensor] = {}
    for name, tensor in weights.items():
        mine = held.setdefault(tensor.dtype, torch.empty(0, dtype=tensor.dtype))
        mine.resize_(tensor.shape).copy_(tensor)
        yield name, mine


def swapped(weights: Weights) -> Pairs:
    """Yield one tensor object whose data is replaced."""
    held: dict[torch.dtype, torch.Tensor] = {}
    for name, tensor in weights.items():
        mine = held.setdefault(tensor.dtype, torch.empty(0, dtype=tensor.dtype))
        mine.data = tensor.clone()
        yield name, mine
        mine.data.zero_()


EXPORTERS: dict[str, Callable[[Weights], Pairs]] = {
    "one buffer": one_buffer,
    "an array of numpy's": numpy_buffer,
    "views of a bucket": bucket,
    "zeroed behind": zeroed,
    "freed behind": freed,
    "one tensor resized": resized,
    "one tensor, its data replaced": swapped,
}
