# SPDX-License-Identifier: Apache-2.0
"""Compare two versions of a run by what lies between them: only those deltas are read, and merged.

That is enough where they hold differences. Where a version gives absolute values, it takes the values before to know
which of them are new: these are looked up, at the touched positions only, in the base checkpoint (or an anchor) and the
deltas from there up to the earlier version. In neither case is a whole state made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from vllm_delta_snapshot.audit.comparison import Comparison, TensorComparison
from vllm_delta_snapshot.audit.ulp import distance, distance_of_difference
from vllm_delta_snapshot.changes.merge import fold, merge
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.errors import BaseMismatch, ChainError
from vllm_delta_snapshot.format.digest import add_digests, format_digest, patch_digest
from vllm_delta_snapshot.format.version import DeltaRecord
from vllm_delta_snapshot.runs.chain import plan_chain
from vllm_delta_snapshot.runs.replay import RunPlan, opened_start, opened_version, plan_run
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.types import Change, Positions, TensorDifference, TensorPatch

__all__ = ["compare_versions"]

Progress = Callable[[int, int], None]
"""Called with (versions read, versions in all); these become more when earlier ones have to be read too."""


def compare_versions(
    folder: RunFolder,
    version_a: int,
    version_b: int,
    *,
    find_base: Callable[[], Checkpoint | None],
    progress: Progress | None = None,
) -> Comparison:
    """Compare two versions of a run. Blocks; memory is that of the merged changes between them.

    Args:
        folder: the run.
        version_a: a version; 0 is the base.
        version_b: another one, earlier or later.
        find_base: returns the run's base checkpoint, or ``None`` if it is not at hand; asked only if values before are
            needed. An anchor serves as well: it is fetched into the temp folder.
        progress: told after every version that was read.

    Returns:
        What differs. Without base and anchor, counts of tensors with absolute values are upper bounds (``is_exact``).

    Raises:
        BrokenChain, CorruptFile, UnsupportedFormat, LimitExceeded, StoreUnavailable: the run cannot be read.
        SourceError, BaseMismatch: the base is not the run's base checkpoint.
    """
    reader = _Reader(folder, progress)
    run = folder.read_run()
    first, last = sorted((version_a, version_b))
    merged, moves = reader.merged(first, last)
    found: dict[str, TensorComparison] = {}
    unknown: list[Change] = []
    for change in merged:
        compared = _by_difference(change)
        if compared is None:
            unknown.append(change)
        elif compared.changed:
            found[change.spec.name] = compared
    old = reader.values_at(first, find_base, {change.spec.name: change.positions for change in unknown})
    for change in unknown:
        name = change.spec.name
        compared = _upper_bound(change) if old is None else _by_values(change, old[name], moves[name])
        if compared.changed:
            found[name] = compared
    return Comparison([found[name] for name in sorted(found)], run.base.num_tensors, run.base.total_elements)


class _Reader:
    """Reads versions of a run, and tells how many."""

    def __init__(self, folder: RunFolder, progress: Progress | None) -> None:
        self._folder = folder
        self._specs = folder.read_run().specs()
        self._progress = progress
        self._done, self._total = 0, 0

    def merged(self, first: int, last: int) -> tuple[list[Change], dict[str, int]]:
        """Return what changes between two versions, and by how much the digest of each tensor moves."""
        moves: dict[str, int] = {}

        def versions() -> Iterator[Sequence[Change]]:
            for record in self._steps(first, last):
                with opened_version(self._folder, record, self._specs) as (metadata, changes):
                    for entry in metadata.tensors:
                        moves[entry.name] = add_digests(moves.get(entry.name, 0), entry.moves_digest)
                    yield changes
                self._tell()

        return list(merge(fold(versions()))), moves

    def values_at(
        self, version: int, find_base: Callable[[], Checkpoint | None], wanted: Mapping[str, Positions]
    ) -> dict[str, Bits] | None:
        """Return the bit patterns that a version has at some positions; ``None`` if there is nothing to start from."""
        if not wanted:
            return {}
        base = find_base()
        plan = self._plan(version, base)
        if plan is None:
            return None
        self._total += len(plan.chain.steps)
        with opened_start(self._folder, plan, base) as start:
            values = {name: start.bits(name)[positions] for name, positions in wanted.items()}
        for record in plan.chain.steps:
            with opened_version(self._folder, record, self._specs) as (_, changes):
                for change in changes:
                    if change.spec.name in wanted:
                        _advance(values[change.spec.name], wanted[change.spec.name], change)
            self._tell()
        return values

    def _plan(self, version: int, base: Checkpoint | None) -> RunPlan | None:
        run = self._folder.read_run()
        if base is not None:
            base.check_fits(dict(self._specs), what=f"run {run.run_id}")
        try:
            return plan_run(self._folder, version, start=None if base is None else (0, run.base.state_digest))
        except ChainError:
            if base is None:
                return None
            raise

    def _steps(self, first: int, last: int) -> Sequence[DeltaRecord]:
        start = self._folder.read_version(first).state_digest if first else self._folder.read_run().base.state_digest
        plan = plan_chain(
            self._folder.versions(),
            self._folder.read_delta,
            base_version=first,
            base_state_digest=start,
            version=last,
            shortcuts=self._folder.shortcuts(),
        )
        self._total += len(plan.steps)
        return plan.steps

    def _tell(self) -> None:
        self._done += 1
        if self._progress:
            self._progress(self._done, self._total)


def _advance(values: Bits, wanted: Positions, change: Change) -> None:
    """Apply a change to the values at the positions that are wanted; both are ascending."""
    if not change.changed:
        return
    at = np.minimum(np.searchsorted(change.positions, wanted), change.changed - 1)
    is_hit = change.positions[at] == wanted
    at = at[is_hit]
    new = change.values[at]
    if isinstance(change, TensorDifference):
        added = values[is_hit] + new
        new = added if change.absolute is None else np.where(change.absolute[at], new, added)
    values[is_hit] = new


def _by_difference(change: Change) -> TensorComparison | None:
    if not isinstance(change, TensorDifference):
        return None
    apart = distance_of_difference(change)
    if apart is None:
        return None
    return TensorComparison(change.spec.name, change.spec, change.spec, change.changed, apart.max_ulp, apart.num_nan)


def _by_values(change: Change, old: Bits, move: int) -> TensorComparison:
    spec = change.spec
    new = change.values if isinstance(change, TensorPatch) else change.resolve(old).values
    moved = add_digests(patch_digest(spec, change.positions, new), -patch_digest(spec, change.positions, old))
    if moved != move:
        raise BaseMismatch(
            "the values before are not the ones that the run was made against",
            tensor=spec.name,
            expected=f"a digest moved by {format_digest(move)}",
            found=f"by {format_digest(moved)}",
            hint="The base checkpoint is another one, or a payload is damaged: delta-snapshot verify SYNC_DIR",
        )
    differs = old != new
    apart = distance(spec.dtype, old[differs], new[differs])
    return TensorComparison(spec.name, spec, spec, int(differs.sum()), apart.max_ulp, apart.num_nan)


def _upper_bound(change: Change) -> TensorComparison:
    # Differences that add up to nothing were dropped already.
    is_exact = isinstance(change, TensorDifference) and not change.is_mixed
    return TensorComparison(change.spec.name, change.spec, change.spec, change.changed, is_exact=is_exact)
