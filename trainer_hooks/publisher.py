# SPDX-License-Identifier: Apache-2.0
"""`DeltaPublisher`: after each optimizer step, one call that publishes what changed.

Invariant: the baseline is what the newest committed version says. It moves after the commit and never before, so a
publication that fails loses nothing: the next one carries its changes.
"""

from __future__ import annotations

import logging
import math
import operator
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trainer_hooks.diff import TensorDiff
from trainer_hooks.differ import Differ, Fingerprints, check_names
from trainer_hooks.kept import KeptChanges
from trainer_hooks.kernel import load_kernel
from trainer_hooks.publication import Fleet, Publication, PublishReport, R
from trainer_hooks.publish import commit, is_committed, write_publication
from trainer_hooks.resume import PublishedState, open_run, policy_of
from trainer_hooks.source import source_of
from vllm_delta_snapshot.acks import Acknowledgement, wait_applied
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.delta_folder import DigestedChange, Lineage, WriterNotes
from vllm_delta_snapshot.errors import SourceError
from vllm_delta_snapshot.format.choose import choose
from vllm_delta_snapshot.format.container import DEFAULT_MAX_FILE_BYTES
from vllm_delta_snapshot.format.version import VersionRecord
from vllm_delta_snapshot.ordered import thread_pool
from vllm_delta_snapshot.run_folder import RunFolder
from vllm_delta_snapshot.store import open_store

__all__ = ["DeltaPublisher", "Publication", "PublishReport"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Attempt:
    """A publication whose commit was asked for."""

    record: VersionRecord
    changes: KeptChanges
    fingerprints: Fingerprints


class DeltaPublisher:
    """Publishes a trainer's weights as deltas. Use it from one thread of one process.

    Starting it reads the base checkpoint once and keeps a copy of it in host memory (the baseline). If `sync_dir`
    already holds a run with the same base, that run is continued after its newest version.

    Args:
        model_or_source: a module, a mapping or re-iterable of (checkpoint name, full tensor), a function that returns
            one, or a `ParameterSource`.
        sync_dir: the run's folder: ``/path``, ``s3://bucket/prefix`` or ``gs://bucket/prefix``.
        base: the checkpoint that trainer and engines start from, a local folder with safetensors files.
        encoding: how changes are written: ``auto`` (the smallest for each tensor), ``absolute`` (the smallest that
            needs no old values), or the name of one encoding, which is forced; ``raw`` is what OpenRL reads. By default
            that which the run was started with, and ``auto`` for a new run.
        threads: how many threads compare and encode; by default as many as there are cores, at most 8.
        single_writer: accept a store that cannot tell two trainers apart.
        max_file_bytes: soft limit of a payload file.

    Raises:
        SourceError: the tensors do not fit the base checkpoint; every misfit is named.
        RunMismatch: `sync_dir` belongs to a run with another base, or one that does not allow such encodings.
        UnsupportedFormat: there is no such encoding.
        ObjectNotFound, CorruptFile, UnsupportedFormat: the base, or the run there, cannot be read.
        StoreError, StoreUnavailable: `sync_dir` cannot be used.

    Example:
        >>> publisher = DeltaPublisher(model, sync_dir="/shared/run-1", base="/models/base")  # doctest: +SKIP
        >>> optimizer.step()  # doctest: +SKIP
        >>> publisher.publish(step=1).version  # doctest: +SKIP
        1
    """

    _attempt: _Attempt | None

    def __init__(
        self,
        model_or_source: object,
        *,
        sync_dir: str,
        base: str | Path,
        encoding: str | None = None,
        threads: int | None = None,
        single_writer: bool = False,
        max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
    ) -> None:
        self._source = source_of(model_or_source)
        self._store = open_store(str(sync_dir), single_writer=single_writer)
        self._max_file_bytes = max_file_bytes
        checkpoint = Checkpoint(base)
        self._specs = checkpoint.specs
        self._total_elements = checkpoint.total_elements
        self._checkpoint_bytes = sum(spec.num_bytes for spec in checkpoint.specs.values())
        self._base_model = str(base)
        check_names(
            [name for item in self._source.items(self._specs) for name in item.names], self._specs, self._base_model
        )
        state = open_run(RunFolder(self._store), checkpoint, encoding)
        self._encoding = encoding or policy_of(state.run.encodings)
        self._threads = threads or min(8, len(os.sched_getaffinity(0)))
        self._run_id = state.run.run_id
        self._start_from(state)
        if (kernel := load_kernel()) is not None:
            kernel.warm_up(self._specs.values())
        logger.info(
            "opened run=%s sync_dir=%s version=%d tensors=%d elements=%d",
            self._run_id,
            self._store.uri,
            self._version,
            len(self._specs),
            self._total_elements,
        )

    @property
    def run_id(self) -> str:
        """The run's id, a uuid."""
        return self._run_id

    @property
    def version(self) -> int:
        """The newest version this publisher committed or found; 0 is the base."""
        return self._version

    @property
    def state_digest(self) -> str:
        """The state digest of the newest version."""
        return self._state_digest

    def publish(self, *, step: int | None = None, metrics: Mapping[str, float] | None = None) -> Publication:
        """Publish what changed since the newest version; a valid empty delta if nothing did. Blocks.

        Args:
            step: the optimizer step, recorded for people and plots.
            metrics: finite numbers to record beside it, such as the reward.

        Returns:
            The handle of the committed publication.

        Raises:
            SourceError: a tensor is missing, doubled or does not fit, or a metric is no finite number. Nothing was
                published.
            VersionConflict: another trainer is publishing into this run.
            StoreError, StoreUnavailable: nothing was committed; the next call carries these changes too.
        """
        started = time.monotonic()
        self._settle()
        notes = _notes(self._base_model, step, metrics)
        differ = Differ(self._source, self._specs, self._baseline, self._base_model, self._fingerprints)
        kept = KeptChanges()
        with thread_pool(self._threads) as pool:
            record = write_publication(
                self._store,
                self._lineage(),
                (self._digested(diff) for diff in differ.diffs(pool)),
                lambda: replace(notes, diff_s=differ.seconds),
                keep=kept.add,
                pool=pool,
                max_file_bytes=self._max_file_bytes,
            )
        self._attempt = _Attempt(record, kept, differ.fingerprints)
        commit(self._store, record)
        self._adopt(self._attempt)
        report = PublishReport(
            run_id=self._run_id,
            version=record.version,
            changed_elements=record.changed_elements,
            total_elements=self._total_elements,
            changed_tensors=differ.changed_tensors,
            payload_bytes=record.payload_bytes,
            checkpoint_bytes=self._checkpoint_bytes,
            folder=record.folder,
            diff_s=differ.seconds,
            total_s=time.monotonic() - started,
        )
        _log(report)
        return Publication(report)

    def sync(self, fleet: Fleet[R], *, step: int | None = None, metrics: Mapping[str, float] | None = None) -> R:
        """Publish, and have engines take the version. Blocks until the last one has it or has failed.

        Args:
            fleet: the engines: a `vllm_delta_snapshot.drive.DeltaSync`.
            step: see `publish`.
            metrics: see `publish`.

        Returns:
            What the fleet reports: an engine that failed is named in it, and raises nothing.

        Raises:
            DeltaSnapshotError: see `publish`.
        """
        return fleet.sync(self.publish(step=step, metrics=metrics).version, run_id=self._run_id)

    def wait_applied(
        self, samplers: Iterable[str], *, version: int | None = None, timeout_s: float = 600.0
    ) -> Mapping[str, Acknowledgement]:
        """Wait until samplers in follow mode have acknowledged a version, or a later one, in the store. Blocks.

        Args:
            samplers: their names.
            version: the version; by default the newest.
            timeout_s: how long to wait.

        Returns:
            What each said last.

        Raises:
            StageError: they did not in time; names those that lag.
            DeltaSnapshotError: the store cannot be read.
        """
        wanted = self._version if version is None else version
        return wait_applied(self._store, self._run_id, wanted, samplers, timeout_s=timeout_s)

    def _start_from(self, state: PublishedState) -> None:
        """Take over what the run's newest version is."""
        self._version = state.version
        self._state_digest = state.state_digest
        self._baseline = state.baseline
        self._fingerprints: Fingerprints = {}
        self._attempt = None
        self._is_moving = False

    def _settle(self) -> None:
        """Find out what became of an earlier commit whose answer never came: it is adopted, or it never was."""
        if self._is_moving:
            logger.warning("a publication was interrupted after its commit; reading the run again")
            self._start_from(open_run(RunFolder(self._store), Checkpoint(self._base_model), self._encoding))
        attempt = self._attempt
        if attempt is None:
            return
        if is_committed(self._store, attempt.record):
            logger.warning("version=%d was committed although its answer was lost", attempt.record.version)
            self._adopt(attempt)
        self._attempt = None

    def _adopt(self, attempt: _Attempt) -> None:
        """Move the baseline to a committed version."""
        self._is_moving = True  # and if it stops half-way, nobody knows where: differences cannot be added again
        self._baseline.advance(attempt.changes.changes())
        self._version, self._state_digest = attempt.record.version, attempt.record.state_digest
        self._fingerprints = attempt.fingerprints
        self._attempt = None
        self._is_moving = False

    def _lineage(self) -> Lineage:
        return Lineage(
            run_id=self._run_id,
            version=self._version + 1,
            base_version=self._version,
            base_state_digest=self._state_digest,
            total_elements=self._total_elements,
        )

    def _digested(self, diff: TensorDiff) -> DigestedChange:
        chosen = choose(self._encoding, diff.spec, diff.positions, diff.old, diff.new)
        return DigestedChange(chosen.change, diff.old_digest, diff.new_digest, chosen.encoding)


def _notes(base_model: str, step: int | None, metrics: Mapping[str, float] | None) -> WriterNotes:
    """Check what the caller wants recorded, before anything is written."""
    numbers = {str(name): float(value) for name, value in (metrics or {}).items()}
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise SourceError(
                f"metric {name} is not a finite number", found=value, hint="Leave it out; JSON cannot hold it."
            )
    return WriterNotes(base_model, None if step is None else operator.index(step), numbers)


def _log(report: PublishReport) -> None:
    logger.info(
        "published version=%d changed=%d density=%.5f tensors=%d bytes=%d diff_s=%.3f total_s=%.3f",
        report.version,
        report.changed_elements,
        report.density,
        report.changed_tensors,
        report.payload_bytes,
        report.diff_s,
        report.total_s,
    )
