# SPDX-License-Identifier: Apache-2.0
"""Tensors of the base checkpoint that no source has: draft heads, `inv_freq`, the second copy of tied weights.

Each is decided on at the start, once, and said. Kept: it stays as it is in the base in every version, because the user
named it. A copy: of tied weights the source has one, and the base, which says that they are tied, stores both with the
same bits; the other follows. Refused: everything else. What the source has is never kept, whatever was named: it is
published. Decides by names and the base; what a pass over the weights makes of it is the differs'.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.checkpoint.tied import Tie, are_same, counterpart_of, role_of, says_tied, tie_of
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.errors import SourceError
from vllm_delta_snapshot.util.patterns import listed, patterns_of

__all__ = [
    "Unsourced",
    "check_kept",
    "check_patterns",
    "find_unsourced",
    "refuse_sourced",
    "settle",
    "stranger_of",
    "unguarded",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Unsourced:
    """What becomes of the tensors that a source has not.

    Attributes:
        kept: those that stay as they are in the base, in the base's order.
        copies: by tensor that the source has, the one that is its copy.
        tie: tied weights that the source has both of, which must stay equal.
        refused: those that nobody allowed, a line each.
        hint: what to do about these.
    """

    kept: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    tie: Tie | None = None
    refused: tuple[str, ...] = ()
    hint: str = ""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Unsourced:
        """Return what `dataclasses.asdict` made fields of, also after a way through JSON."""
        tie = None if fields["tie"] is None else Tie(**fields["tie"])
        return cls(tuple(fields["kept"]), dict(fields["copies"]), tie)


def check_patterns(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return what a user gives as `unsourced`.

    Raises:
        ValueError: it is no list of patterns.
    """
    given = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in given):
        raise ValueError(f"unsourced must be a list of patterns of names, not {patterns!r}")
    return given


def find_unsourced(sourced: Collection[str], base: Checkpoint, patterns: Collection[str]) -> Unsourced:
    """Decide what becomes of each tensor of the base that a source has not, and say so. Reads tied weights.

    Args:
        sourced: the names that the source has.
        base: the base checkpoint.
        patterns: what the user said need not be there.

    Raises:
        SourceError: the base stores two that it says to be tied, and differ, and the source has one.
    """
    known = frozenset(sourced)
    missing = [name for name in base.specs if name not in known]
    tie = tie_of(base)
    if tie is not None and not tie.are_equal:
        if len(known.intersection(tie.names)) == 1:
            raise _untied(tie, base)
        tie = None  # what has both takes them for two, as loaders do
    followed = [] if tie is None else [name for name in tie.names if name not in known and tie.other(name) in known]
    kept = tuple(n for n in missing if n not in followed and any(fnmatchcase(n, p) for p in patterns))
    allowed = {*kept, *followed}
    lost = [name for name in missing if name not in allowed]
    copies = {} if tie is None else {tie.other(name): name for name in followed}
    if lost:
        return Unsourced(kept, copies, None, *_refusal(lost, known, base))
    _tell(kept, copies, patterns, base)
    return Unsourced(kept, copies, tie if tie is not None and known.issuperset(tie.names) else None)


def settle(lacks: Unsourced, version: int, published: Callable[[str], Bits], base: Checkpoint, file: str) -> Unsourced:
    """Check what was decided against the run that is continued.

    Args:
        lacks: what was decided.
        version: the run's newest version.
        published: gives a tensor's bits there.
        base: the base checkpoint.
        file: where the run is, for messages.

    Returns:
        The same; without a guard of tied weights if they are not equal there.

    Raises:
        SourceError: an earlier trainer has changed what this one lacks.
    """
    if not version:
        return lacks
    check_kept(lacks.kept, version, published, base, file)
    tie = lacks.tie
    if tie is not None and not np.array_equal(published(tie.embedding), published(tie.head)):
        return unguarded(lacks, version)
    return lacks


def check_kept(
    names: Iterable[str], version: int, published: Callable[[str], Bits], base: Checkpoint, file: str
) -> None:
    """Check that tensors are at a version what they are in the base: see `settle`."""
    changed = [name for name in names if not np.array_equal(published(name), base.bits(name))]
    if changed:
        raise SourceError(
            f"tensors that the source has not are at version {version} not as they are in the base checkpoint",
            file=file,
            tensor=listed(changed),
            found=f"{len(changed)} tensors that an earlier trainer of this run has changed",
            hint="Give a source that has them, as that trainer had; or start a new run in a sync_dir of its own.",
        )


def unguarded(lacks: Unsourced, version: int, *, is_told: bool = True) -> Unsourced:
    """Return what was decided, for a run in which tied weights are not equal; and say so, if this is who does."""
    if lacks.tie is not None and is_told:
        logger.warning("%s and %s are tied, but not equal at version %d", *lacks.tie.names, version)
    return replace(lacks, tie=None)


def refuse_sourced(seen: Iterable[str], unsourced: Unsourced) -> None:
    """Check that a source still lacks what it lacked at the start: else what it has now would not be published.

    Args:
        seen: the names of a pass, with those that are accounted for without the source.
        unsourced: what was decided at the start.

    Raises:
        SourceError: it does not.
    """
    watched = {*unsourced.kept, *unsourced.copies.values()}
    counts = Counter(name for name in seen if name in watched)
    came = [name for name, count in counts.items() if count > 1]
    if came:
        raise SourceError(
            "the source has tensors that it had not when the publisher was started",
            tensor=listed(came),
            hint="Start a new publisher; it continues the run, and publishes them.",
        )


def stranger_of(name: str, base: Checkpoint) -> str:
    """Return the line for a tensor that the base has not."""
    line = f"{name} is not in the base checkpoint"
    stored = counterpart_of(name, base.specs)
    if stored is None or not says_tied(base.folder):
        return line
    return f"{line}, which stores tied weights once, as {stored}: leave it out"


def _tell(kept: Collection[str], copies: Mapping[str, str], patterns: Collection[str], base: Checkpoint) -> None:
    for original, copy in copies.items():
        logger.warning("%s is stored as a copy of %s, to which it is tied, and follows it", copy, original)
    if kept:
        elements = sum(base.specs[name].numel for name in kept)
        logger.warning(
            "the source has not got %d tensors (%d elements); they stay as in the base in every version: %s",
            len(kept),
            elements,
            listed(kept),
        )
    left = frozenset(kept)
    for pattern in patterns:
        matched = [name for name in base.specs if fnmatchcase(name, pattern)]
        published = [name for name in matched if name not in left]
        if not matched:
            logger.warning("unsourced: %r matches no tensor of the base checkpoint", pattern)
        elif published:
            logger.warning("unsourced: %r also matches what is published nevertheless: %s", pattern, listed(published))


def _refusal(lost: Collection[str], known: Collection[str], base: Checkpoint) -> tuple[tuple[str, ...], str]:
    """Return a line for each tensor, and the hint."""
    argument = ", ".join(f'"{pattern}"' for pattern in patterns_of(lost, known))
    hint = f"If the trainer rightly has not got them, have them stay as they are in the base: unsourced=[{argument}]."
    copies = {name: original for name in lost if (original := _original(name, known, base)) is not None}
    if copies:
        # Kept, it would go on with old values beside new ones, and loaders differ in which they take.
        copy, original = next(iter(copies.items()))
        hint += (
            f" But where the trainer ties them, have the source yield the tensor of {original} as {copy} too, or the "
            'base\'s config.json say "tie_word_embeddings": true.'
        )
    lines = (f"{n} is missing" + (f" (in the base a copy of {copies[n]})" if n in copies else "") for n in lost)
    return tuple(lines), hint


def _original(name: str, known: Collection[str], base: Checkpoint) -> str | None:
    """Return the sourced embedding or head of which a tensor is a copy."""
    other = counterpart_of(name, base.specs) if role_of(name) else None
    return other if other is not None and other in known and are_same(base, name, other) else None


def _untied(tie: Tie, base: Checkpoint) -> SourceError:
    return SourceError(
        "the base checkpoint says that its embeddings are tied, but stores two that differ, and the source has one",
        file=str(base.folder),
        tensor=" and ".join(tie.names),
        expected="both, as transformers 5 and vLLM take them for two then; or a base that stores one",
        found="one",
        hint="Have the source yield both, if the trainer has two. If it has one, save_pretrained that, and start "
        "trainer and engines from there.",
    )
