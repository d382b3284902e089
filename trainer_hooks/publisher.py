# SPDX-License-Identifier: Apache-2.0
"""`DeltaPublisher`: after each optimizer step, one call that publishes what changed.

The call itself only compares; the rest runs behind the step (`background`). Invariant: one publication is under way at
most, and the next is compared with the baseline only when it has ended: committed, and the baseline moved, or failed,
and its changes are found again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, get_args

import torch
from torch.utils.hooks import RemovableHandle

from trainer_hooks.differ import check_names
from trainer_hooks.hook import publish_after_steps
from trainer_hooks.kernel import load_kernel
from trainer_hooks.observers import PublishObserver
from trainer_hooks.publication import Fleet, Publication, PublishReport, R, notes_of
from trainer_hooks.published import Published
from trainer_hooks.resume import PublishedState, open_run, policy_of
from trainer_hooks.saved_state import SavedState
from trainer_hooks.source import source_of
from trainer_hooks.turns import Turns
from trainer_hooks.upkeep import SideUpkeep
from trainer_hooks.writing import Writing, WritingRules, default_buffer_bytes
from vllm_delta_snapshot.acks import Acknowledgement, wait_applied
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import NotPublished
from vllm_delta_snapshot.format.container import DEFAULT_MAX_FILE_BYTES
from vllm_delta_snapshot.run_folder import RunFolder
from vllm_delta_snapshot.store import open_store
from vllm_delta_snapshot.upkeep import UpkeepPolicy

__all__ = ["DeltaPublisher", "Publication", "PublishReport"]

logger = logging.getLogger(__name__)

WhenBusy = Literal["wait", "merge"]

_Call = tuple[int | None, Mapping[str, float] | None]
"""The step and the metrics of a call."""


class DeltaPublisher:
    """Publishes a trainer's weights as deltas. Use it from one thread of one process.

    Starting it reads the base checkpoint once and keeps a copy of it in host memory (the baseline). If `sync_dir`
    already holds a run with the same base, that run is continued after its newest version. As a context manager it
    ends with its last weights published, or raises; see `close` for the rest.

    Args:
        model_or_source: a module, a mapping or re-iterable of (checkpoint name, full tensor), a function that returns
            one, or a `ParameterSource`.
        sync_dir: the run's folder: ``/path``, ``s3://bucket/prefix`` or ``gs://bucket/prefix``.
        base: the checkpoint that trainer and engines start from, a local folder with safetensors files.
        encoding: how changes are written: ``auto`` (the smallest for each tensor), ``absolute`` (the smallest that
            needs no old values), or the name of one encoding, which is forced; ``raw`` is what OpenRL reads. By default
            that which the run was started with, and ``auto`` for a new run.
        asynchronous: whether `publish` returns after the diff, and the rest runs behind it; if not, it returns after
            the commit, and a failure is raised at once.
        when_busy: what `publish` does while the publication before it still runs: ``wait`` for it, or ``merge``: skip
            this call, and leave its changes to the next.
        buffer_bytes: how many bytes of changes may wait to be encoded; a diff of more blocks until there is room. By
            default 1/8 of the checkpoint, and at least 256 MiB.
        drain_timeout_s: how long `close`, and the interpreter when it ends, wait for a publication under way.
        resume_from: what `state_dict` returned, from the trainer's own checkpoint; the run is checked against it.
        threads: how many threads compare and encode; by default as many as there are cores, at most 8.
        single_writer: accept a store that cannot tell two trainers apart.
        upkeep: when anchors and merged deltas are written and old deltas pruned, in a process of its own; by default
            never (docs/retention.md).
        max_file_bytes: soft limit of a payload file.
        observers: told of every publication, such as `PublishMetrics`; what they raise is logged.

    Raises:
        SourceError: the tensors do not fit the base checkpoint; every misfit is named.
        RunMismatch: `sync_dir` belongs to a run with another base or to another than `resume_from`, or to one that does
            not allow such encodings.
        BrokenChain, VersionConflict: the run there has gone back, or has gone another way, since `resume_from`.
        ObjectNotFound, CorruptFile, UnsupportedFormat: the base, or the run there, cannot be read, or there is no such
            encoding.
        StoreError, StoreUnavailable: `sync_dir` cannot be used.

    Example:
        >>> publisher = DeltaPublisher(model, sync_dir="/shared/run-1", base="/models/base")  # doctest: +SKIP
        >>> optimizer.step()  # doctest: +SKIP
        >>> publisher.publish(step=1).version  # doctest: +SKIP
        1
    """

    def __init__(
        self,
        model_or_source: object,
        *,
        sync_dir: str,
        base: str | Path,
        encoding: str | None = None,
        asynchronous: bool = True,
        when_busy: WhenBusy = "wait",
        buffer_bytes: int | None = None,
        drain_timeout_s: float = 60.0,
        resume_from: Mapping[str, object] | None = None,
        threads: int | None = None,
        single_writer: bool = False,
        upkeep: UpkeepPolicy | None = None,
        max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
        observers: Iterable[PublishObserver] = (),
    ) -> None:
        if when_busy not in get_args(WhenBusy):
            raise ValueError(f"when_busy must be one of {get_args(WhenBusy)}, not {when_busy!r}")
        self._source = source_of(model_or_source)
        self._store = open_store(str(sync_dir), single_writer=single_writer)
        self._base_model = str(base)
        checkpoint = Checkpoint(base)
        names = [name for item in self._source.items(checkpoint.specs) for name in item.names]
        check_names(names, checkpoint.specs, self._base_model)
        if resume_from is not None:
            self.load_state_dict(resume_from)
        state = open_run(RunFolder(self._store), checkpoint, encoding)
        checkpoint_bytes = sum(spec.num_bytes for spec in checkpoint.specs.values())
        self._upkeep = SideUpkeep.of(upkeep, str(sync_dir), self._base_model, single_writer=single_writer)
        self._rules = WritingRules(
            run_id=state.run.run_id,
            encoding=encoding or policy_of(state.run.encodings),
            total_elements=checkpoint.total_elements,
            checkpoint_bytes=checkpoint_bytes,
            max_file_bytes=max_file_bytes,
            threads=threads or min(8, len(os.sched_getaffinity(0))),
            buffer_bytes=buffer_bytes or default_buffer_bytes(checkpoint_bytes),
            exit_timeout_s=drain_timeout_s,
            on_commit=() if self._upkeep is None else (self._upkeep.after,),
            observers=tuple(observers),
        )
        self._published = Published(state)
        self._turns = Turns(self._published, self._reopened)
        self._is_asynchronous = asynchronous
        self._is_merging = when_busy == "merge"
        self._drain_timeout_s = drain_timeout_s
        self._is_closed = False
        self._last_call: _Call | None = None
        self._last: Publication | None = None  # what came of that call; none if it raised
        if (kernel := load_kernel()) is not None:
            kernel.warm_up(checkpoint.specs.values())
        logger.info(
            "opened run=%s sync_dir=%s version=%d tensors=%d elements=%d",
            self.run_id,
            self._store.uri,
            self.version,
            len(checkpoint.specs),
            checkpoint.total_elements,
        )

    @property
    def run_id(self) -> str:
        """The run's id, a uuid."""
        return self._rules.run_id

    @property
    def version(self) -> int:
        """The newest version this publisher committed or found; 0 is the base. Not the one that is under way."""
        return self._published.head.version

    @property
    def state_digest(self) -> str:
        """The state digest of the newest version."""
        return self._published.head.state_digest

    def publish(self, *, step: int | None = None, metrics: Mapping[str, float] | None = None) -> Publication:
        """Publish what changed since the newest version; a valid empty delta if nothing did.

        Blocks until the weights may be changed again: for the publication before this one, as `when_busy` says, and for
        the diff. What comes after that fails at the next call, or at ``wait()`` of the handle. With
        ``asynchronous=False`` it blocks until the commit, and fails at once.

        Args:
            step: the optimizer step, recorded for people and plots.
            metrics: finite numbers to record beside it, such as the reward.

        Returns:
            The handle of the publication.

        Raises:
            SourceError: a tensor is missing, doubled or does not fit, or a metric is no finite number. Nothing was
                published.
            VersionConflict: another trainer is publishing into this run.
            StoreError, StoreUnavailable: this publication, or the one before if nobody was told yet, was not committed.
                The next call carries its changes too, and those of this one.
            NotPublished: the publisher is closed.
        """
        if self._is_merging and not self._is_closed and self._turns.is_busy:
            logger.info("skipped step=%s: the publication before still runs; the next one carries it", step)
            self._last_call, self._last = (step, metrics), Publication(None, None)
            return self._last
        return self._publish(step, metrics)

    def sync(self, fleet: Fleet[R], *, step: int | None = None, metrics: Mapping[str, float] | None = None) -> R:
        """Publish, and have engines take the version. Blocks until the last one has it or has failed.

        Args:
            fleet: the engines: a `vllm_delta_snapshot.drive.DeltaSync`.
            step: see `publish`.
            metrics: see `publish`.

        Returns:
            What the fleet reports: an engine that failed is named in it, and raises nothing.

        Raises:
            DeltaSnapshotError: see `publish`; it is never skipped.
        """
        return fleet.sync(self._publish(step, metrics).wait().version, run_id=self.run_id)

    def wait_applied(
        self, samplers: Iterable[str], *, version: int | None = None, timeout_s: float = 600.0
    ) -> Mapping[str, Acknowledgement]:
        """Wait until samplers in follow mode have acknowledged a version, or a later one, in the store. Blocks.

        Args:
            samplers: their names.
            version: the version; by default the newest, which is waited for if it is under way.
            timeout_s: how long to wait.

        Returns:
            What each said last.

        Raises:
            StageError: they did not in time; names those that lag.
            DeltaSnapshotError: the publication under way failed, or the store cannot be read.
        """
        deadline = time.monotonic() + timeout_s
        if version is None:
            self.drain(timeout_s)
            version = self.version
        left = max(0.0, deadline - time.monotonic())
        return wait_applied(self._store, self.run_id, version, samplers, timeout_s=left)

    def hook(self, optimizer: torch.optim.Optimizer, *, every: int = 1, first_step: int = 1) -> RemovableHandle:
        """Publish after optimizer steps, without a call in the training loop.

        Only real steps count: not the micro-batches of gradient accumulation, nor steps that a `GradScaler` skips.
        What `publish` raises comes out of ``optimizer.step()``, after the weights were updated.

        Args:
            optimizer: whose steps.
            every: publish after steps whose number this divides; at least 1, or it raises ValueError.
            first_step: the number of the next step; after a resume, one more than the steps made.

        Returns:
            A handle; its ``remove()`` ends it.
        """
        return publish_after_steps(lambda step: self.publish(step=step), optimizer, every=every, first_step=first_step)

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is under way. Blocks.

        Raises:
            NotPublished: something still is after this time.
            DeltaSnapshotError: it failed, and nobody was told yet.
        """
        self._turns.drain(self._store, timeout_s)

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """Publish no more. Blocks for what is under way.

        It compares nothing: what the last call skipped or failed to publish stays unpublished, and a later publisher of
        the run finds it. A ``with`` block that ends without an error publishes that too.

        Args:
            drain: whether to wait. If not, what is under way is abandoned: unless its commit was asked for already, it
                never becomes a version.
            timeout_s: how long to wait; by default `drain_timeout_s`.

        Raises:
            NotPublished: it was not committed in time, and is abandoned.
            DeltaSnapshotError: it failed, and nobody was told yet.
        """
        was_closed, self._is_closed = self._is_closed, True
        if was_closed:
            return
        try:
            if drain:
                self.drain(self._drain_timeout_s if timeout_s is None else timeout_s)
        finally:
            self._turns.abandon()  # which does nothing to what has ended
            if self._upkeep is not None:
                self._upkeep.close(timeout_s=self._drain_timeout_s if drain else 0.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            try:
                self.close()
            except Exception as failure:  # noqa: BLE001 - the error that ended the block is the one to be seen
                logger.error("the last publication failed too: %s", failure)
        elif not self._is_closed:
            self._end_well()

    def _end_well(self) -> None:
        """Have the last call become a version, if it did not; and close."""
        with contextlib.suppress(Exception):  # the next attempt says why
            self.drain(self._drain_timeout_s)
        is_busy = self._turns.is_busy
        is_out = self._last is not None and not self._last.is_skipped and self._last.version <= self.version
        if self._last_call is not None and not (is_busy or is_out):
            self._publish(*self._last_call)
        self.close(timeout_s=0.0 if is_busy else None)

    def state_dict(self) -> dict[str, object]:
        """Return what a trainer's checkpoint should remember of the run: plain strings and numbers. Does not block.

        It names the newest committed version, which may be older than the weights; a resumed trainer publishes what
        they differ in.
        """
        head = self._published.head
        return SavedState(
            run_id=self.run_id, version=head.version, state_digest=head.state_digest, sync_dir=self._store.uri
        ).model_dump()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Check that this is the run that a trainer's checkpoint remembers. Changes nothing; blocks for a few reads.

        The published state comes from the store in any case. ``DeltaPublisher(resume_from=...)`` checks before it
        would start a new run.

        Raises:
            RunMismatch, BrokenChain, VersionConflict: it is not, or has gone back, or has gone another way since.
            StoreError, StoreUnavailable: the store cannot be read.
        """
        SavedState.of(state).check(RunFolder(self._store))

    def _publish(self, step: int | None, metrics: Mapping[str, float] | None) -> Publication:
        if self._is_closed:
            raise NotPublished("the publisher is closed", hint="A new one continues the run.")
        started = time.monotonic()
        self._last_call, self._last = (step, metrics), None
        notes = notes_of(self._base_model, step, metrics)
        self._turns.settle(self._store)
        differ = self._published.differ(self._source, self._base_model)
        writing = Writing(self._rules, self._store, self._published, differ, notes, started)
        self._last = self._turns.take(writing, is_asynchronous=self._is_asynchronous)
        return self._last

    def _reopened(self) -> PublishedState:
        return open_run(RunFolder(self._store), Checkpoint(self._base_model), self._rules.encoding)
