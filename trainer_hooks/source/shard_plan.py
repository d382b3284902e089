# SPDX-License-Identifier: Apache-2.0
"""Plan: which range of which parameter is which tensor of the checkpoint, found out without any weights.

transformers' ``revert_weight_conversion`` needs whole tensors, which no rank has. So it is asked about stand-ins: first
one without memory (meta), whose outputs tell names and shapes, and by their strides the place where they are views;
where they are copies (fused experts are cut so), one whose elements are their own positions, in digits of 16 bits, once
for all layers alike. What is not a range of consecutive elements, unchanged, is refused: a transposed or rescaled
tensor cannot be published by slices. What the user says of names is asked in the same way.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import nn

from trainer_hooks.source.names import Given, Revert, revert_of
from vllm_delta_snapshot.errors import SourceError

__all__ = ["NamePlan", "Range", "clean_name"]

_WRAPPERS: Final = re.compile(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_NUMBER: Final = re.compile(r"\d+")
_DIGIT: Final = 16
_CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Range:
    """A tensor of the checkpoint, as a range of a parameter's elements.

    Attributes:
        name: its checkpoint name.
        shape: its shape.
        start: the flat position in the parameter where it begins.
    """

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        """Where it ends."""
        return self.start + math.prod(self.shape)


class NamePlan:
    """See the module.

    Args:
        module: the model, unwrapped; perhaps sharded. Its weights are not read.
        given: what the user says of its names.
    """

    def __init__(self, module: nn.Module, given: Given) -> None:
        self._module = module
        self._given = given
        self._revert: Revert | None = revert_of(module)
        self._probed: dict[object, list[int]] = {}

    def of(self, name: str, shape: torch.Size) -> tuple[Range, ...]:
        """Return what a parameter becomes in the checkpoint; nothing if the user says that it is not there.

        Args:
            name: its clean name.
            shape: its full shape.

        Raises:
            SourceError: it does not become ranges of consecutive elements.
        """
        # Of the type of the digits: what an output's type differs in, was converted.
        stand_in = torch.empty(shape, dtype=torch.int16, device="meta")
        given = self._said(name, stand_in)
        if given is None and self._revert is None:
            return (Range(name, tuple(shape), 0),)
        return self._ranges(name, shape, stand_in, given)

    def said(self, name: str, shape: torch.Size) -> tuple[Range, ...] | None:
        """Return what the user says that a parameter becomes, ``None`` if nothing; as `of`, which see."""
        stand_in = torch.empty(shape, dtype=torch.int16, device="meta")
        given = self._said(name, stand_in)
        return None if given is None else self._ranges(name, shape, stand_in, given)

    def _ranges(
        self, name: str, shape: torch.Size, stand_in: torch.Tensor, given: Mapping[str, torch.Tensor] | None
    ) -> tuple[Range, ...]:
        outputs = self._reverted(name, stand_in) if given is None else given
        starts = [_view_start(stand_in, output) for output in outputs.values()]
        if any(start is None for start in starts):
            # Two layers that look alike are converted alike by transformers; of the user nothing is assumed.
            find = self._starts_of_alike if given is None else self._probe
            starts = list(find(name, shape, outputs))
        ranges = [
            Range(key, tuple(output.shape), start)
            for (key, output), start in zip(outputs.items(), starts, strict=True)
            if start is not None
        ]
        if given is None:
            _check_cover(name, shape, ranges)
        return tuple(ranges)

    def _starts_of_alike(self, name: str, shape: torch.Size, outputs: Mapping[str, torch.Tensor]) -> list[int]:
        alike = (
            _NUMBER.sub("*", name),
            tuple(shape),
            tuple((_NUMBER.sub("*", key), tuple(output.shape)) for key, output in outputs.items()),
        )
        if alike not in self._probed:
            self._probed[alike] = self._probe(name, shape, outputs)
        return self._probed[alike]

    def _probe(self, name: str, shape: torch.Size, names: Iterable[str]) -> list[int]:
        """Find where outputs lie by elements that are positions; twice the memory of the parameter in bf16."""
        numel = math.prod(shape)
        shifts = range(0, max(1, numel.bit_length()), _DIGIT)
        starts = dict.fromkeys(names, 0)
        for shift in shifts:
            for key, first in self._outputs(name, shape, shift).items():
                starts[key] |= (int(first.flatten()[0]) & 0xFFFF) << shift if first.numel() else 0
        # The lowest digit once more with all bits flipped: what was added to it, shows.
        for shift, mask in [(0, 0xFFFF), *((shift, 0) for shift in shifts)]:
            for key, output in self._outputs(name, shape, shift, mask).items():
                _check_digits(name, key, output, starts[key], shift, mask)
        return list(starts.values())

    def _outputs(self, name: str, shape: torch.Size, shift: int, mask: int = 0) -> Mapping[str, torch.Tensor]:
        digits = _digits(math.prod(shape), shift, mask).view(shape)
        given = self._said(name, digits)
        return self._reverted(name, digits) if given is None else given

    def _said(self, name: str, stand_in: torch.Tensor) -> Mapping[str, torch.Tensor] | None:
        pairs = self._given.of(name, stand_in)
        return None if pairs is None else dict(pairs)

    def _reverted(self, name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        assert self._revert is not None  # noqa: S101 - asked of models that have one
        with torch.no_grad(), _own_classes(self._module):
            try:
                return self._revert(self._module, {name: tensor})
            except Exception as error:
                raise SourceError(
                    "transformers cannot say what the parameter becomes in the checkpoint",
                    tensor=name,
                    found=f"{type(error).__name__}: {error}",
                    hint="Publish from a generic source of (checkpoint name, tensor).",
                ) from error


def clean_name(name: str) -> str:
    """Return a parameter's name without what wrappers put into it."""
    return _WRAPPERS.sub("", name)


@contextlib.contextmanager
def _own_classes(module: nn.Module) -> Iterator[None]:
    """Give sharded modules the classes they had before: FSDP2 renames them, and conversions are found by class name."""
    renamed = []
    for inner in module.modules():
        kind = type(inner)
        if len(kind.__mro__) > 2 and kind.__mro__[1].__name__ == "FSDPModule":
            renamed.append((inner, kind))
            inner.__class__ = kind.__mro__[2]
    try:
        yield
    finally:
        for inner, kind in renamed:
            inner.__class__ = kind


def _view_start(whole: torch.Tensor, part: torch.Tensor) -> int | None:
    """Return where a part begins if it is consecutive elements of the same memory, else ``None``."""
    same = part.untyped_storage()._cdata == whole.untyped_storage()._cdata
    return int(part.storage_offset()) if same and part.dtype == whole.dtype and part.is_contiguous() else None


def _digits(numel: int, shift: int, mask: int) -> torch.Tensor:
    """Return 16 bits of each of the numbers 0, 1, 2, ..., some of them flipped."""
    digits = np.empty(numel, np.uint16)
    for start in range(0, numel, _CHUNK):
        numbers = np.arange(start, min(numel, start + _CHUNK), dtype=np.int64)
        digits[start : start + _CHUNK] = ((numbers >> shift) ^ mask).astype(np.uint16)
    return torch.from_numpy(digits.view(np.int16))


def _check_digits(name: str, key: str, output: torch.Tensor, start: int, shift: int, mask: int) -> None:
    is_same = output.dtype == torch.int16
    flat = output.reshape(-1)
    for first in range(0, flat.numel() if is_same else 0, _CHUNK):
        found = flat[first : first + _CHUNK].numpy().view(np.uint16)
        numbers = np.arange(start + first, start + first + found.size, dtype=np.int64)
        is_same = is_same and bool(np.array_equal(found, ((numbers >> shift) ^ mask).astype(np.uint16)))
    if not is_same:
        raise _not_a_range(name, f"{key} holds its elements converted or in another order")


def _check_cover(name: str, shape: torch.Size, ranges: list[Range]) -> None:
    at = 0
    for item in sorted(ranges, key=lambda item: (item.start, item.stop)):
        if item.start != at:
            break
        at = item.stop
    if at != math.prod(shape):
        raise _not_a_range(name, f"of its elements, those from {at} on are in no tensor, or in two")


def _not_a_range(name: str, found: str) -> SourceError:
    return SourceError(
        "the parameter's form in the checkpoint is not made of ranges of it, so it cannot be published by shards",
        tensor=name,
        found=found,
        hint="Publish this model from a generic source of (checkpoint name, tensor).",
    )
