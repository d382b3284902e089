# SPDX-License-Identifier: Apache-2.0
"""Audit: proof that the trainer's weights are what was published, by digests and apart from how changes are found.

Nothing that a comparison skips, remembers or is fast by is used: every element that is audited is brought to the host
and digested, and so is the baseline's. `prove` does it for a piece beside the comparison, a part of the pieces in each
publication (`Turns`); `digest_pieces` for all of them at once. Which publisher asks, and what it says of a difference,
is the publishers'.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np

from trainer_hooks.compare.device_diff import DeviceDiff, Marks
from trainer_hooks.compare.diff import Piece, TensorDiff
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.errors import VerifyError
from vllm_delta_snapshot.format.digest import add_digests, patch_digest, slice_digest
from vllm_delta_snapshot.types import TensorSpec
from vllm_delta_snapshot.util.ordered import Join, ordered_map

__all__ = [
    "AuditReport",
    "Digests",
    "Turns",
    "check_turns",
    "digest_pieces",
    "lost_published",
    "prove",
    "unlike_published",
    "unseen",
]

logger = logging.getLogger(__name__)

_CHUNK: Final = 1 << 18
_NAMED: Final = 5


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit has proven.

    Attributes:
        version: the version that the weights are.
        state_digest: its state digest, computed anew from the trainer's weights.
        elements: how many were read: all of the checkpoint; of replicated shards every copy.
        seconds: how long it took.
    """

    version: int
    state_digest: str
    elements: int
    seconds: float

    def log(self) -> None:
        """Write the line of an audit."""
        logger.info(
            "audited version=%d digest=%s elements=%d seconds=%.3f",
            self.version,
            self.state_digest,
            self.elements,
            self.seconds,
        )


@dataclass(frozen=True, slots=True)
class Digests:
    """The digests of a piece: the part that it has in the digest of its tensor.

    Attributes:
        piece: the piece.
        current: of the trainer's elements.
        published: of the baseline's.
    """

    piece: Piece
    current: int
    published: int


@dataclass(frozen=True, slots=True)
class Turns:
    """Which pieces are audited by a publication: each once in `every` of them, about as many elements each time.

    Attributes:
        every: how many publications it takes to audit all.
        version: the version that is made.
        offsets: where each tensor begins, if all of the checkpoint's are laid end to end.
        total: elements of the checkpoint.
    """

    every: int
    version: int
    offsets: Mapping[str, int]
    total: int

    def is_due(self, piece: Piece) -> bool:
        """Say whether it is a piece's turn."""
        return self._turn(self.offsets[piece.spec.name] + piece.start) == self.version % self.every

    @classmethod
    def of(cls, every: int | None, version: int, specs: Iterable[TensorSpec]) -> Turns | None:
        """Return the turns of a checkpoint with these tensors; ``None`` if nobody wants any."""
        if every is None:
            return None
        specs = list(specs)
        *starts, total = itertools.accumulate((spec.numel for spec in specs), initial=0)
        return cls(every, version, {spec.name: at for spec, at in zip(specs, starts, strict=True)}, total)

    def is_any_due(self, specs: Iterable[TensorSpec]) -> bool:
        """Say whether it may be the turn of a piece of some tensors, wherever these are cut."""
        now = self.version % self.every
        ends = ((self.offsets[spec.name], self.offsets[spec.name] + max(0, spec.numel - 1)) for spec in specs)
        return any(self._turn(first) <= now <= self._turn(last) for first, last in ends)

    def _turn(self, place: int) -> int:
        return min(self.every - 1, place * self.every // max(1, self.total))


def check_turns(every: int | None) -> None:
    """Check what a user gives as `audit_every`.

    Raises:
        ValueError: it is less than 1.
    """
    if every is not None and every < 1:
        raise ValueError(f"audit_every must be at least 1, not {every}")


def digest_pieces(
    pieces: Iterable[Piece | Join], pool: ThreadPoolExecutor | None, device_diff: DeviceDiff
) -> Iterator[Digests]:
    """Digest the trainer's elements of each piece, and the baseline's. Yields them in order; blocks.

    Args:
        pieces: see `trainer_hooks.compare.differ.diff_pieces`.
        pool: threads to work on; ``None`` for the caller's.
        device_diff: how to reach what lies on an accelerator.
    """
    on_devices = device_diff.begin()

    def digest(marked: tuple[Piece, Marks]) -> Digests:
        piece, marks = marked
        current = _digest(piece, on_devices.read(piece, marks))
        return Digests(piece, current, _digest(piece, piece.baseline))

    marked = (of if isinstance(of, Join) else (of, on_devices.mark([of])) for of in pieces)
    yield from ordered_map(digest, marked, pool)


def prove(piece: Piece, current: Bits, diff: TensorDiff | None) -> None:
    """Prove that a piece is its baseline and what was found to differ.

    Args:
        piece: the piece.
        current: its elements, read once more.
        diff: what was found in it.

    Raises:
        VerifyError: it is not.
    """
    moved = 0 if diff is None else diff.new_digest - diff.old_digest
    expected = add_digests(_digest(piece, piece.baseline), moved)
    found = _digest(piece, current)
    if found != expected:
        raise VerifyError(
            "what was found to differ is not how the weights differ from what was published",
            tensor=piece.spec.name,
            expected=f"digest {expected:016x} of {piece.baseline.size} elements from {piece.start} on",
            found=f"{found:016x}",
            hint="Nothing may write the weights while publish compares them. If nothing does, suspect this host's "
            'memory, or report it; diff_on="host" and DELTA_SNAPSHOT_KERNEL=0 compare in other ways.',
        )


def unseen(name: str) -> VerifyError:
    """Return the error for a tensor that has changed although its fingerprint said that it had not."""
    return VerifyError(
        "the tensor was written although nothing counted it, so versions may have been published without",
        tensor=name,
        hint="Leave skip_frozen out. Nothing was published now; the next publication carries the change.",
    )


def unlike_published(version: int, names: Collection[str]) -> VerifyError:
    """Return the error for weights that are not what was published."""
    return VerifyError(
        f"the weights are not version {version}",
        tensor=_named(names),
        found=f"{len(names)} tensors that differ",
        hint="Audit after publish and before the weights change. If they have not changed since, engines have other "
        "values of these tensors; the next publication compares everything and carries the difference.",
    )


def lost_published(version: int, expected: str, found: str) -> VerifyError:
    """Return the error for a baseline that is not what was published."""
    return VerifyError(
        f"what this process keeps of version {version} is not that version",
        expected=f"state digest {expected}",
        found=found,
        hint="Suspect this host's memory. Start a new publisher: it reads the published state from the store.",
    )


def _named(names: Collection[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(list(names)[:_NAMED]) + more


def _digest(piece: Piece, bits: Bits) -> int:
    if piece.places is None:
        return slice_digest(piece.spec, piece.start, bits)
    parts = (
        patch_digest(
            piece.spec,
            piece.places(np.arange(piece.start + at, piece.start + min(at + _CHUNK, bits.size), dtype=np.int64)),
            bits[at : at + _CHUNK],
        )
        for at in range(0, bits.size, _CHUNK)
    )
    return add_digests(*parts)
