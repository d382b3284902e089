# SPDX-License-Identifier: Apache-2.0
"""What a publication changed, kept until it is committed and the baseline moves.

A few changes are kept as they are. Beyond a budget only the encoded blocks are kept, a fifth of the size, and decoded
again when the time comes: the memory of a publication is that of what it sends, and a constant.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from vllm_delta_snapshot.format.blocks import EncodedBlock, decode_parts
from vllm_delta_snapshot.format.encodings.base import Parts, Stated
from vllm_delta_snapshot.types import Change

__all__ = ["KeptChanges"]

_BUDGET_BYTES: Final = 256 << 20


class KeptChanges:
    """See the module.

    Args:
        budget_bytes: how many bytes of decoded changes may be kept.
    """

    def __init__(self, budget_bytes: int = _BUDGET_BYTES) -> None:
        self._room = budget_bytes
        self._changes: list[Change] = []
        self._encoded: list[tuple[str, list[Stated], Parts]] = []

    def add(self, block: EncodedBlock) -> None:
        """Keep the changes of a block."""
        changes = [member.change for member in block.members]
        size = sum(change.positions.nbytes + change.values.nbytes for change in changes)
        if size <= self._room:
            self._room -= size
            self._changes += changes
        else:
            self._encoded.append((block.encoding, block.stated, block.parts))

    def changes(self) -> Iterator[Change]:
        """Yield every change that was kept, a block at a time in memory."""
        yield from self._changes
        for encoding, stated, parts in self._encoded:
            yield from decode_parts(encoding, stated, parts)
