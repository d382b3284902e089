# SPDX-License-Identifier: Apache-2.0
"""Guard of tied weights that a source yields twice: both names must get the same values in every version.

A trainer that has come to train two is one whose engines, which take one of them for both, would serve another model.
Watches what changes, by digests that do not depend on the name: tensors that were equal stay equal if these move alike.
Works for parts of tensors too, whose moves add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from trainer_hooks.compare.diff import TensorDiff
from vllm_delta_snapshot.checkpoint.tied import Tie
from vllm_delta_snapshot.errors import SourceError
from vllm_delta_snapshot.format.digest import add_digests, patch_digest

__all__ = ["TieGuard", "check_moves"]


class TieGuard:
    """Watches one pass.

    Args:
        tie: the tied weights; ``None`` if there are none to watch.

    Attributes:
        moves: by name, how far the values seen so far move.
    """

    def __init__(self, tie: Tie | None) -> None:
        self._tie = tie
        self.moves: dict[str, int] = {}

    def see(self, diff: TensorDiff) -> None:
        """Take a difference of the pass."""
        if self._tie is None or diff.spec.name not in self._tie.names:
            return
        spec = replace(diff.spec, name=self._tie.embedding)
        old, new = (patch_digest(spec, diff.positions, values) for values in (diff.old, diff.new))
        self.moves[diff.spec.name] = add_digests(self.moves.get(diff.spec.name, 0), new, -old)


def check_moves(tie: Tie | None, moves: Iterable[Mapping[str, int]]) -> None:
    """Check that tied weights have moved alike.

    Args:
        tie: the tied weights; ``None`` if there are none to watch.
        moves: what the guards of all who had a part of them saw.

    Raises:
        SourceError: they have not; what was compared must not be published.
    """
    if tie is None:
        return
    moves = list(moves)
    one, other = (add_digests(*(seen.get(name, 0) for seen in moves)) for name in tie.names)
    if one != other:
        raise SourceError(
            "tied weights have become different",
            tensor=" and ".join(tie.names),
            expected='equal tensors, since the base\'s config.json says "tie_word_embeddings": true',
            found="a trainer that has two",
            hint="Engines take one for both. Tie them in the trainer; or train two, from a base whose config.json says "
            '"tie_word_embeddings": false, with engines started from that.',
        )
