# SPDX-License-Identifier: Apache-2.0
"""The contract of an encoding.

Lossless for every bit pattern of every element type, for empty and 0-d tensors and for any number of elements.
`decode` trusts nothing: it bounds what it allocates by the counts that metadata states, and its result is a valid
change or an error.

An encoding writes a block: the changes of one tensor or, if it is joint, of several tensors of the same width, since
short streams compress worse and many small arrays cost more than one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_delta_snapshot.errors import CorruptFile
from vllm_delta_snapshot.types import Change, TensorSpec

__all__ = ["Encoding", "Part", "Parts", "Stated", "check_keys", "names_of"]

Part = tuple[str, NDArray[np.generic]]
"""One array of an encoded block: its safetensors code and its elements, flat. `decode` is given bits (unsigned)."""

Parts = Mapping[str, Part]
"""An encoded block: its arrays by the suffix of their key in the container (``indices`` of ``7.indices``)."""


@dataclass(frozen=True, slots=True)
class Stated:
    """What metadata says of a change in a block: the tensor, and how many of its elements change."""

    spec: TensorSpec
    changed: int


class Encoding(Protocol):
    """One way to write a block of changes."""

    @property
    def name(self) -> str:
        """Its name in metadata."""
        ...

    @property
    def is_difference(self) -> bool:
        """Whether it holds differences (`TensorDifference`), and not new values (`TensorPatch`)."""
        ...

    @property
    def is_joint(self) -> bool:
        """Whether a block may hold several tensors."""
        ...

    def encode(self, changes: Sequence[Change]) -> Parts:
        """Turn valid changes of one width into arrays. May return views of them."""
        ...

    def decode(self, stated: Sequence[Stated], parts: Parts) -> list[Change]:
        """Turn arrays back into the changes. May return views of the arrays.

        Args:
            stated: the changes, from metadata, of one width; at least one.
            parts: the arrays found in the container.

        Raises:
            CorruptFile: the arrays are not an encoding of such changes.
        """
        ...


def names_of(stated: Sequence[Stated]) -> str:
    """Return the names of a block's tensors, for messages."""
    names = [item.spec.name for item in stated]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_keys(stated: Sequence[Stated], parts: Parts, expected: frozenset[str]) -> None:
    """Check that a block has exactly these arrays.

    Raises:
        CorruptFile: it has others.
    """
    if set(parts) != expected:
        raise CorruptFile(
            "wrong arrays",
            tensor=names_of(stated),
            expected=", ".join(sorted(expected)),
            found=", ".join(sorted(parts)),
        )
