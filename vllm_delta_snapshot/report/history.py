# SPDX-License-Identifier: Apache-2.0
"""The history of a run: what its records and metadata say of every version, and where the chain does not hold.

Reads two small objects a version and no payload. Goes on after a problem, so that a broken chain can be shown as it is.
Of each version a few numbers are kept, one a layer and some more, whatever the number of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_delta_snapshot.audit.verify_run import RunProblem, check_link
from vllm_delta_snapshot.errors import DeltaSnapshotError, StoreUnavailable
from vllm_delta_snapshot.format.anchor import AnchorRecord
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.format.version import MergedRecord, VersionRecord
from vllm_delta_snapshot.report.layers import Layer, layer_of, layers_of
from vllm_delta_snapshot.runs.acks import Acknowledgement, read_acknowledgements
from vllm_delta_snapshot.runs.chain import Shortcuts
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.util.ordered import ordered_map, thread_pool

__all__ = ["RunHistory", "VersionFacts", "read_history"]

Progress = Callable[[int, int], None]
"""Called with (versions read, versions in all)."""

_THREADS: Final = 8
"""Objects in a bucket take some 30 ms each to ask for."""


@dataclass(frozen=True, slots=True, eq=False)
class VersionFacts:
    """What is known of a version. What only metadata says is ``None`` where that was pruned or cannot be read.

    Attributes:
        record: the version's record.
        step: the optimizer step, if the trainer recorded one.
        changed_tensors: how many tensors changed.
        diff_s: seconds for the comparison.
        upload_s: seconds for encoding and writing, beyond the comparison.
        metrics: what else the trainer recorded.
        changed_by_layer: changed elements of each layer, shape ``(layers,)``.
        is_pruned: whether its delta was removed, because anchors lead past it.
    """

    record: VersionRecord
    step: int | None = None
    changed_tensors: int | None = None
    diff_s: float | None = None
    upload_s: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    changed_by_layer: NDArray[np.int64] | None = None
    is_pruned: bool = False

    @property
    def version(self) -> int:
        """The version."""
        return self.record.version


@dataclass(frozen=True, slots=True, eq=False)
class RunHistory:
    """See the module.

    Attributes:
        run_id: the run.
        base: the base checkpoint, as the trainer named it.
        created_at: when the run began.
        checkpoint_bytes: bytes of a whole checkpoint.
        total_elements: its elements.
        layers: its layers.
        versions: every version whose record can be read, ascending.
        problems: what is wrong, in order of version.
        acknowledgements: what each sampler said last, by name.
        anchors: versions that also lie there as whole checkpoints, ascending.
        merged: deltas over several versions, that lie there beside those of each.
        in_line: the newest version that something leads to; ``None`` for the last of `versions`.
    """

    run_id: str
    base: str
    created_at: str
    checkpoint_bytes: int
    total_elements: int
    layers: Sequence[Layer]
    versions: Sequence[VersionFacts]
    problems: Sequence[RunProblem] = ()
    acknowledgements: Mapping[str, Acknowledgement] = field(default_factory=dict)
    anchors: Sequence[AnchorRecord] = ()
    merged: Sequence[MergedRecord] = ()
    in_line: int | None = None

    @property
    def newest(self) -> int:
        """The newest version; 0 if there is none but the base."""
        if self.in_line is not None:
            return self.in_line
        return self.versions[-1].version if self.versions else 0

    @property
    def payload_bytes(self) -> int:
        """Bytes of the payload files that versions were published with, also where they were pruned since."""
        return sum(facts.record.payload_bytes for facts in self.versions)

    @property
    def pruned(self) -> int:
        """The newest version whose delta was pruned; 0 if none was."""
        return max((facts.version for facts in self.versions if facts.is_pruned), default=0)

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """The versions that are missing, as (first, last) of each gap."""
        known = [0, *sorted({facts.version for facts in self.versions} | {p.version for p in self.problems})]
        return [(a + 1, b - 1) for a, b in pairwise(known) if b > a + 1]

    def densities(self) -> NDArray[np.float64]:
        """Return the density of every version, 0 to 1, shape ``(versions,)``."""
        changed = np.array([facts.record.changed_elements for facts in self.versions], np.float64)
        return changed / max(1, self.total_elements)

    def layer_densities(self) -> NDArray[np.float64]:
        """Return the density of every layer, shape ``(layers, versions)``; NaN where it is not known."""
        elements = np.array([max(1, layer.elements) for layer in self.layers], np.float64)
        unknown = np.full(len(self.layers), np.nan)
        columns = [unknown if f.changed_by_layer is None else f.changed_by_layer / elements for f in self.versions]
        return np.array(columns, np.float64).reshape(len(columns), len(self.layers)).T

    def metric_names(self) -> list[str]:
        """Return the names of all recorded metrics, those of most versions first."""
        counts: dict[str, int] = {}
        for facts in self.versions:
            for name in facts.metrics:
                counts[name] = counts.get(name, 0) + 1
        return sorted(counts, key=lambda name: (-counts[name], name))

    def metric(self, name: str) -> NDArray[np.float64]:
        """Return a metric of every version, shape ``(versions,)``; NaN where it was not recorded."""
        return np.array([facts.metrics.get(name, np.nan) for facts in self.versions], np.float64)

    def pauses(self) -> dict[int, float]:
        """Return by version the longest pause that a sampler acknowledged. Samplers leave only what they said last."""
        longest: dict[int, float] = {}
        for said in self.acknowledgements.values():
            longest[said.version] = max(said.pause_s, longest.get(said.version, 0.0))
        return longest

    def stagings(self) -> dict[int, float]:
        """Return by version the longest time that a sampler acknowledged for fetching and staging it."""
        longest: dict[int, float] = {}
        for said in self.acknowledgements.values():
            if said.stage_s is not None:
                longest[said.version] = max(said.stage_s, longest.get(said.version, 0.0))
        return longest


def read_history(folder: RunFolder, *, progress: Progress | None = None) -> RunHistory:
    """Read the history of a run. Blocks.

    Args:
        folder: the run.
        progress: told after every version.

    Returns:
        The history; what is wrong with single versions is in it, not raised.

    Raises:
        ObjectNotFound, CorruptFile, UnsupportedFormat, LimitExceeded: there is no readable run.json.
        StoreUnavailable: the store went away.
    """
    run = folder.read_run()
    specs = run.specs()
    layers = layers_of(specs)
    numbers = {layer.name: number for number, layer in enumerate(layers)}
    layer_of_tensor = {name: numbers[layer_of(name)] for name in specs}
    existing = folder.versions()
    shortcuts = folder.shortcuts()
    versions: list[VersionFacts] = []
    problems: list[RunProblem] = []
    before: tuple[int, str] | None = (0, run.base.state_digest)
    with thread_pool(_THREADS) as pool:
        found = ordered_map(
            partial(_read, folder, shortcuts.pruned, len(layers), layer_of_tensor), existing, pool, ahead=2 * _THREADS
        )
        for done, (version, (facts, errors)) in enumerate(zip(existing, found, strict=True), start=1):
            if facts is not None:
                errors = [*_broken_link(facts.record, before), *errors]
                versions.append(facts)
            # Nothing is known to continue a version whose record is damaged, and that was said already.
            before = None if facts is None else (version, facts.record.state_digest)
            problems += [RunProblem(version, error) for error in errors]
            if progress:
                progress(done, len(existing))
    anchors, merged = _read_shortcuts(folder, shortcuts, problems)
    newest, _ = folder.newest_and_stray()
    lying = folder.mark_problem()
    if lying is not None:
        problems.append(RunProblem(newest, lying))
    return RunHistory(
        run_id=run.run_id,
        base=run.base.name,
        created_at=run.created_at,
        checkpoint_bytes=sum(spec.num_bytes for spec in specs.values()),
        total_elements=run.base.total_elements,
        layers=layers,
        versions=versions,
        problems=problems,
        acknowledgements=_acknowledgements(folder, run.run_id),
        anchors=anchors,
        merged=merged,
        in_line=newest,
    )


def _read(
    folder: RunFolder, pruned: int, layers: int, layer_of_tensor: Mapping[str, int], version: int
) -> tuple[VersionFacts | None, list[DeltaSnapshotError]]:
    record: VersionRecord | None = None
    try:
        record = folder.read_version(version)
        if version <= pruned:
            return VersionFacts(record, is_pruned=True), []
        return _facts(record, folder.read_metadata(record), layers, layer_of_tensor), []
    except StoreUnavailable:
        raise
    except DeltaSnapshotError as error:
        return None if record is None else VersionFacts(record), [error]


def _facts(
    record: VersionRecord, metadata: DeltaMetadata, layers: int, layer_of_tensor: Mapping[str, int]
) -> VersionFacts:
    changed = np.zeros(layers, np.int64)
    for entry in metadata.tensors:
        number = layer_of_tensor.get(entry.name)
        if number is not None:  # a tensor that is not the run's: `verify` says so
            changed[number] += entry.changed
    return VersionFacts(
        record,
        metadata.step,
        len(metadata.by_tensor),
        metadata.timings.diff_s,
        metadata.timings.upload_s,
        dict(metadata.metrics),
        changed,
    )


def _broken_link(record: VersionRecord, before: tuple[int, str] | None) -> list[DeltaSnapshotError]:
    if before is None:
        return []
    try:
        check_link(record, *before)
    except DeltaSnapshotError as error:
        return [error]
    return []


def _read_shortcuts(
    folder: RunFolder, shortcuts: Shortcuts, problems: list[RunProblem]
) -> tuple[list[AnchorRecord], list[MergedRecord]]:
    anchors: list[AnchorRecord] = []
    merged: list[MergedRecord] = []
    for version in shortcuts.anchors:
        try:
            anchors.append(folder.read_anchor(version))
        except StoreUnavailable:
            raise
        except DeltaSnapshotError as error:
            problems.append(RunProblem(version, error))
    for base_version, version in shortcuts.merged:
        try:
            merged.append(folder.read_merged(base_version, version))
        except StoreUnavailable:
            raise
        except DeltaSnapshotError as error:
            problems.append(RunProblem(version, error))
    return anchors, merged


def _acknowledgements(folder: RunFolder, run_id: str) -> Mapping[str, Acknowledgement]:
    try:
        return read_acknowledgements(folder.store, run_id)
    except StoreUnavailable:
        raise
    except DeltaSnapshotError:
        return {}  # they say nothing of the run itself, and a sampler writes them anew
