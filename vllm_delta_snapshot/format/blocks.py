# SPDX-License-Identifier: Apache-2.0
"""Blocks: the changes of many tensors put together, and encoded.

Tensors of one width and one encoding share a block until it has enough changes for its streams to compress well; so a
delta is encoded, and decoded, piece by piece and on many threads. A block that came out larger than raw is raw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from vllm_delta_snapshot.dtypes import dtype_of
from vllm_delta_snapshot.format.encodings import encoding_of
from vllm_delta_snapshot.format.encodings.base import Parts, Stated
from vllm_delta_snapshot.types import Change, TensorDifference, position_dtype

__all__ = [
    "BLOCK_CHANGES",
    "Block",
    "EncodedBlock",
    "FiledBlock",
    "Placed",
    "decode_parts",
    "encode_block",
    "group_blocks",
]

BLOCK_CHANGES: Final = 1 << 17
"""A block is closed when it has this many changes. At 131,072, frames cost 0.1 % against one stream for all."""

_BLOCK_TENSORS: Final = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A change, its place among those of the delta or of its writer, and the encoding chosen for it."""

    place: int
    change: Change
    encoding: str


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Changes that are encoded together, of one width and by one encoding. The first one's place names the block."""

    encoding: str
    members: tuple[Placed, ...]


@dataclass(frozen=True, slots=True, eq=False)
class EncodedBlock:
    """A block as arrays.

    Attributes:
        encoding: its encoding, perhaps another than was asked for.
        members: the changes in it.
        parts: the arrays.
    """

    encoding: str
    members: tuple[Placed, ...]
    parts: Parts

    @property
    def place(self) -> int:
        """The place that names the block."""
        return self.members[0].place

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for _, array in self.parts.values())

    @property
    def names(self) -> tuple[tuple[int, str], ...]:
        """Place and name of each tensor in it."""
        return tuple((member.place, member.change.spec.name) for member in self.members)

    @property
    def stated(self) -> list[Stated]:
        """What metadata says of its changes."""
        return [Stated(member.change.spec, member.change.changed) for member in self.members]

    @property
    def filed(self) -> FiledBlock:
        """What a file needs of it: compact parts do not keep the changes in memory."""
        return FiledBlock(self.place, self.names, self.parts)


@dataclass(frozen=True, slots=True, eq=False)
class FiledBlock:
    """A block that waits to be written.

    Attributes:
        place: the place that names it.
        names: place and name of each tensor in it.
        parts: the arrays.
    """

    place: int
    names: tuple[tuple[int, str], ...]
    parts: Parts


def group_blocks(placed: Iterable[Placed], order: Callable[[Placed], int] | None = None) -> Iterator[Block]:
    """Put changes into blocks, each yielded as soon as it is full.

    Args:
        placed: the changes.
        order: how to order the members of a block; by default as they come.
    """
    growing: dict[tuple[str, int], list[Placed]] = {}
    changed: dict[tuple[str, int], int] = {}
    for item in placed:
        if not encoding_of(item.encoding).is_joint:
            yield Block(item.encoding, (item,))
            continue
        key = (item.encoding, item.change.spec.element.itemsize)
        members = growing.setdefault(key, [])
        members.append(item)
        changed[key] = changed.get(key, 0) + item.change.changed
        if changed[key] >= BLOCK_CHANGES or len(members) == _BLOCK_TENSORS:
            del changed[key]
            yield Block(item.encoding, _ordered(growing.pop(key), order))
    for (encoding, _), members in growing.items():
        yield Block(encoding, _ordered(members, order))


def encode_block(block: Block) -> list[EncodedBlock]:
    """Encode a block; as raw ones, one a tensor, if those are smaller."""
    encoded = _encode(block.encoding, block.members)
    raw_bytes = sum(_raw_bytes(member.change) for member in block.members)
    if not encoding_of(block.encoding).is_joint or encoded.num_bytes <= raw_bytes:
        return [encoded]
    return [_encode(_raw_of(member.change), (member,)) for member in block.members]


def decode_parts(encoding: str, stated: Sequence[Stated], parts: Parts) -> list[Change]:
    """Decode what `encode_block` made, without a file in between.

    Args:
        encoding: the block's.
        stated: its tensors, and how many of their elements change.
        parts: its arrays.
    """
    # As bits, as a decoder is given them from a file.
    bits = {key: (code, array.view(dtype_of(code).bits)) for key, (code, array) in parts.items()}
    return encoding_of(encoding).decode(stated, bits)


def _ordered(members: list[Placed], order: Callable[[Placed], int] | None) -> tuple[Placed, ...]:
    return tuple(members if order is None else sorted(members, key=order))


def _encode(encoding: str, members: tuple[Placed, ...]) -> EncodedBlock:
    return EncodedBlock(encoding, members, encoding_of(encoding).encode([member.change for member in members]))


def _raw_of(change: Change) -> str:
    return "raw_difference" if isinstance(change, TensorDifference) else "raw"


def _raw_bytes(change: Change) -> int:
    return change.changed * (position_dtype(change.spec.numel).itemsize + change.spec.element.itemsize)
