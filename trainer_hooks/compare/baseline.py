# SPDX-License-Identifier: Apache-2.0
"""The baseline: a host copy of the weights as they were last published.

It moves only by `advance`, which the publisher calls when a publication is committed, and never before. One copy of
the serving weights, as bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trainer_hooks.compare.pinned import HostMemory
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.types import Change, TensorDifference, TensorSpec

__all__ = ["Baseline"]


class Baseline:
    """See the module.

    Args:
        base: the checkpoint to start from; copied.
        memory: where to; by default plain memory.

    Attributes:
        specs: the tensors by name.
    """

    def __init__(self, base: Checkpoint, memory: HostMemory | None = None) -> None:
        self.specs: Mapping[str, TensorSpec] = dict(base.specs)
        memory = memory or HostMemory(is_pinned=False)
        self._bits: dict[str, Bits] = {spec.name: memory.copy_of(bits) for spec, bits in base.items()}

    def bits(self, name: str) -> Bits:
        """Return all elements of a tensor, flat. The caller must not write."""
        return self._bits[name]

    def items(self) -> Iterable[tuple[TensorSpec, Bits]]:
        """Return every tensor and its bits."""
        return ((self.specs[name], bits) for name, bits in self._bits.items())

    def advance(self, changes: Iterable[Change]) -> None:
        """Write committed changes."""
        for change in changes:
            bits = self._bits[change.spec.name]
            if isinstance(change, TensorDifference):
                bits[change.positions] = change.resolve(bits[change.positions]).values
            else:
                bits[change.positions] = change.values
