# SPDX-License-Identifier: Apache-2.0
"""One pass over a source: every tensor compared with the baseline, piece by piece on threads, results in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch

from trainer_hooks.compare.audit import Digests, Turns, digest_pieces, prove, unseen
from trainer_hooks.compare.baseline import Baseline
from trainer_hooks.compare.device_diff import DeviceDiff, Marks
from trainer_hooks.compare.diff import PIECE_ELEMENTS, Piece, TensorDiff, difference, join_pieces, pieces
from trainer_hooks.compare.tie_guard import TieGuard, check_moves
from trainer_hooks.source.fit import check_names
from trainer_hooks.source.items import ParameterSource, all_exist, refuse_unreadable
from trainer_hooks.source.overlap import refuse_lent
from trainer_hooks.source.unsourced import Unsourced, refuse_sourced
from vllm_delta_snapshot.errors import SourceError
from vllm_delta_snapshot.format.digest import tensor_digest
from vllm_delta_snapshot.types import TensorSpec
from vllm_delta_snapshot.util.ordered import JOIN, Join, ordered_map

__all__ = ["Differ", "Fingerprints", "diff_pieces"]

Fingerprints = dict[tuple[str, ...], Hashable]
"""By the names of a source item, its fingerprint when it was last published."""

_DEVICE_DIFF: Final = DeviceDiff()
"""For those who do not say; one, since lanes and the memory that their streams have used are kept."""


class Differ:
    """See the module. Use it once.

    Args:
        source: the weights.
        specs: the tensors of the base checkpoint.
        baseline: what was published.
        base_model: where the base checkpoint is, for messages.
        known: the fingerprints of the last publication. One that turns out to be wrong is taken out.
        device_diff: where to compare what lies on an accelerator; by default as ``auto``.
        turns: which pieces are audited; by default none.
        unsourced: what becomes of tensors that the source has not; by default it has all.

    Attributes:
        fingerprints: those of this pass, once it is at its end.
        changed_tensors: how many tensors differed so far.
        seconds: how long the consumer of `diffs` waited for it.
    """

    def __init__(
        self,
        source: ParameterSource,
        specs: Mapping[str, TensorSpec],
        baseline: Baseline,
        base_model: str,
        known: Fingerprints,
        device_diff: DeviceDiff | None = None,
        turns: Turns | None = None,
        unsourced: Unsourced | None = None,
    ) -> None:
        self._source = source
        self._specs = specs
        self._baseline = baseline
        self._base_model = base_model
        self._known = known
        self._device_diff = device_diff or _DEVICE_DIFF
        self._turns = turns
        self._unsourced = unsourced or Unsourced()
        self._believed: dict[str, tuple[str, ...]] = {}  # tensors that are said to be unchanged, and their items
        self.fingerprints: Fingerprints = {}
        self.changed_tensors = 0
        self.seconds = 0.0

    def diffs(self, pool: ThreadPoolExecutor | None) -> Iterator[TensorDiff]:
        """Yield the tensors that differ, in the order of the source.

        Args:
            pool: threads to compare on; ``None`` for the caller's.

        Raises:
            SourceError: a tensor is missing, doubled, unknown or does not fit, or tied ones have become different. What
                was yielded must not be published.
            VerifyError: an audited piece is not what was found, or has changed although that was ruled out. The same.
        """
        started = time.monotonic()
        guard = TieGuard(self._unsourced.tie)
        is_audited = None if self._turns is None else self._turns.is_due
        for diff in diff_pieces(self._pieces(), pool, device_diff=self._device_diff, is_audited=is_audited):
            if diff.spec.name in self._believed:
                self._known.pop(self._believed[diff.spec.name], None)
                raise unseen(diff.spec.name)
            guard.see(diff)
            self.changed_tensors += 1
            self.seconds += time.monotonic() - started
            yield diff
            started = time.monotonic()
        check_moves(self._unsourced.tie, [guard.moves])
        self.seconds += time.monotonic() - started

    def digests(self, pool: ThreadPoolExecutor | None) -> Iterator[Digests]:
        """Yield the digests of all pieces, of the weights and of what was published; nothing is skipped.

        What the source has not counts as it was published, since nothing else can be said of it.

        Raises:
            SourceError: see `diffs`.
        """
        self._known = {}
        yield from digest_pieces(self._pieces(), pool, self._device_diff)
        for name in self._unsourced.kept:
            digest = tensor_digest(self._specs[name], bits := self._baseline.bits(name))
            yield Digests(Piece(self._specs[name], 0, bits, torch.empty(0), is_last=True), digest, digest)

    def _pieces(self) -> Iterator[Piece | Join]:
        seen: list[str] = list(self._unsourced.kept)
        copies = self._unsourced.copies
        apart: list[tuple[str, torch.Tensor]] = []
        for item in self._source.items(self._specs):
            if item.fingerprint is not None:
                names = [*item.names, *(copies[name] for name in item.names if name in copies)]
                self.fingerprints[item.names] = item.fingerprint
                if self._known.get(item.names) == item.fingerprint:
                    if not self._is_any_due(names):
                        seen.extend(names)
                        continue
                    self._believed |= dict.fromkeys(names, item.names)
            pairs = item.load()
            for name, tensor in pairs:
                seen.append(name)
                if item.is_apart:
                    apart.append((name, tensor))
                yield from self._pieces_of(name, tensor)
                if name in copies:
                    seen.append(copies[name])
                    yield from self._pieces_of(copies[name], tensor)
                if not (item.stays or all_exist(pairs)):
                    yield JOIN
            if not item.stays:
                yield JOIN
        refuse_sourced(seen, self._unsourced)
        check_names(seen, self._specs, self._base_model)
        refuse_lent(apart, self._baseline.bits)

    def _is_any_due(self, names: Iterable[str]) -> bool:
        return self._turns is not None and self._turns.is_any_due(self._specs[name] for name in names)

    def _pieces_of(self, name: str, tensor: torch.Tensor) -> Iterator[Piece]:
        spec = self._specs.get(name)
        if spec is None:
            raise SourceError("tensor is not in the base checkpoint", tensor=name, found=tuple(tensor.shape))
        refuse_unreadable(name, tensor)
        return pieces(spec, self._baseline.bits(name), tensor)


def diff_pieces(
    pieces: Iterable[Piece | Join],
    pool: ThreadPoolExecutor | None,
    *,
    device_diff: DeviceDiff | None = None,
    is_digested: bool = True,
    is_audited: Callable[[Piece], bool] | None = None,
) -> Iterator[TensorDiff]:
    """Yield the tensors that differ, whole and in order.

    At its end, or when it is closed or raises, nothing reads the pieces any more, on no stream of a device either.

    Args:
        pieces: those of every tensor, one after the other. Taken in the caller's thread: on an accelerator, they are
            read once its current stream has come to where it is when they were given. Nothing is taken over a `JOIN`
            before all pieces given until then are read, by the host and by every stream of a device.
        pool: threads to compare on; ``None`` for the caller's.
        device_diff: where to compare what lies on an accelerator; by default as ``auto``.
        is_digested: see `difference`.
        is_audited: says of which pieces what was found is proven (`trainer_hooks.compare.audit.prove`).

    Raises:
        VerifyError: what was found in a piece is not how it differs.
    """
    on_devices = (device_diff or _DEVICE_DIFF).begin()

    def compare(marked: tuple[list[Piece], Marks]) -> list[tuple[Piece, TensorDiff | None]]:
        batch, marks = marked
        compared = []
        for piece in batch:
            diff = difference(piece, on_devices.find(piece, marks), is_digested=is_digested)
            if is_audited is not None and is_audited(piece):
                prove(piece, on_devices.read(piece, marks), diff)
            compared.append((piece, diff))
        return compared

    batches = (of if isinstance(of, Join) else (of, on_devices.mark(of)) for of in _batches(pieces))
    found: list[TensorDiff] = []
    for compared in ordered_map(compare, batches, pool):
        for piece, diff in compared:
            if diff is not None:
                found.append(diff)
            if piece.is_last and found:
                whole, found = join_pieces(found), []
                yield whole


def _batches(pieces: Iterable[Piece | Join]) -> Iterator[list[Piece] | Join]:
    """Put small pieces together, so that handing work to a thread and back costs little beside the work."""
    batch: list[Piece] = []
    elements = 0
    for piece in pieces:
        if not isinstance(piece, Join):
            batch.append(piece)
            elements += piece.baseline.size
        if batch and (elements >= PIECE_ELEMENTS or isinstance(piece, Join)):
            yield batch
            batch, elements = [], 0
        if isinstance(piece, Join):
            yield piece
    if batch:
        yield batch
