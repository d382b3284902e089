# SPDX-License-Identifier: Apache-2.0
"""`DeltaPublisher`: after each optimizer step, one call that publishes what changed.

The call itself only compares; the rest runs behind the step (`background`). What it shares with `ShardedPublisher`, the
order of publications and how they end, is `base_publisher`'s.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from trainer_hooks.base_publisher import BasePublisher
from trainer_hooks.compare.audit import check_turns, lost_published, unlike_published
from trainer_hooks.compare.device_diff import DeviceDiff, DiffOn
from trainer_hooks.compare.kernel import load_kernel
from trainer_hooks.publication.conduct import Conduct, WhenBusy
from trainer_hooks.publication.leftovers import Leftovers
from trainer_hooks.publication.notes import notes_of
from trainer_hooks.publication.observers import PublishObserver
from trainer_hooks.publication.publication import Fleet, Publication, PublishReport, R
from trainer_hooks.publication.published import Head, Published
from trainer_hooks.publication.resume import PublishedState, open_run, policy_of
from trainer_hooks.publication.upkeep import SideUpkeep
from trainer_hooks.publication.whole_writing import WholeWriting
from trainer_hooks.publication.writing import WritingRules, default_buffer_bytes
from trainer_hooks.source.fit import check_fit
from trainer_hooks.source.items import source_of
from trainer_hooks.source.names import Names
from trainer_hooks.source.unsourced import check_patterns, settle
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.format.container import DEFAULT_MAX_FILE_BYTES
from vllm_delta_snapshot.format.digest import add_digests, format_digest
from vllm_delta_snapshot.runs.own_run import OwnRun
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import open_store
from vllm_delta_snapshot.upkeep import UpkeepPolicy
from vllm_delta_snapshot.util.ordered import thread_pool

__all__ = ["DeltaPublisher", "Publication", "PublishReport"]

logger = logging.getLogger(__name__)


class DeltaPublisher(BasePublisher):
    """Publishes a trainer's weights as deltas. Use it in one process, one call at a time.

    Starting it reads the base checkpoint once and keeps a copy of it in host memory (the baseline). If `sync_dir`
    already holds a run with the same base, that run is continued after its newest version. As a context manager it
    ends with its last weights published, or raises; see `close` for the rest.

    Args:
        model_or_source: a module, a mapping or re-iterable of (checkpoint name, full tensor), a function that returns
            one, or a `ParameterSource`.
        sync_dir: the run's folder: ``/path``, ``s3://bucket/prefix`` or ``gs://bucket/prefix``.
        base: the checkpoint that trainer and engines start from, a local folder with safetensors files.
        names: checkpoint names of a module's parameters, where they are not those that transformers would give: a
            mapping from parameter names, or a function (`trainer_hooks.source.names.Names`, docs/trainers.md).
        unsourced: patterns of tensors of the base that the source need not have, such as ``["model.mtp.*"]``: what it
            has not of these stays as it is in the base, in every version, and is named in the log once. What it has is
            published, whatever was named (docs/trainers.md, "Tensors that the trainer does not have").
        skip_frozen: do not read a module's parameters that require no gradient while torch's version counters say that
            nobody wrote them. Saves time and can publish wrong weights: writes through ``.data`` and numpy are missed
            (docs/publishing.md, "What is compared"). By default everything is compared, always.
        audit_every: prove by digests that what was found to differ is all that differs, of a part of the weights in
            each publication, so that all are proven in this many; by default never (docs/publishing.md, "Audit").
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
        diff_on: where weights that lie on an accelerator are compared: there (``device``), or on the CPU (``host``); by
            default there if it has room (docs/publishing.md, "Weights on a GPU"). The bits published are the same.
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
        names: Names | None = None,
        unsourced: Iterable[str] = (),
        skip_frozen: bool = False,
        audit_every: int | None = None,
        encoding: str | None = None,
        asynchronous: bool = True,
        when_busy: WhenBusy = "wait",
        buffer_bytes: int | None = None,
        drain_timeout_s: float = 60.0,
        resume_from: Mapping[str, object] | None = None,
        threads: int | None = None,
        diff_on: DiffOn = "auto",
        single_writer: bool = False,
        upkeep: UpkeepPolicy | None = None,
        max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
        observers: Iterable[PublishObserver] = (),
    ) -> None:
        conduct = Conduct(asynchronous, when_busy, drain_timeout_s)
        check_turns(audit_every)
        patterns = check_patterns(unsourced)
        self._audit_every = audit_every
        self._device_diff = DeviceDiff(diff_on)
        self._source = source_of(model_or_source, names, skip_frozen=skip_frozen)
        store = open_store(str(sync_dir), single_writer=single_writer)
        checkpoint = Checkpoint(base)
        # Absolute, and so is the store's: both are opened again later, maybe from another working folder.
        self._base_model = str(checkpoint.folder)
        side = SideUpkeep.of(upkeep, store.uri, self._base_model, single_writer=single_writer)
        super().__init__(store, conduct, side)
        lacks = check_fit(self._source.items(checkpoint.specs), checkpoint, self._base_model, patterns)
        if resume_from is not None:
            self.load_state_dict(resume_from)
        state = open_run(RunFolder(self._store), checkpoint, encoding, self._device_diff.host_memory())
        checkpoint_bytes = sum(spec.num_bytes for spec in checkpoint.specs.values())
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
            observers=(Leftovers(self._store), *observers),
        )
        lacks = settle(lacks, state.version, state.baseline.bits, checkpoint, self._store.uri)
        self._own = OwnRun(self._store, state.run.run_id)
        self._published = Published(state, lacks)
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
    def _head(self) -> Head:
        return self._published.head

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
        with self._use.taken("sync"):
            publication = self._call(step, metrics, may_skip=False)
        version = publication.wait().version
        return fleet.sync(version, run_id=self.run_id, state_digest=self._digest_of(version))

    def _publish(self, step: int | None, metrics: Mapping[str, float] | None, *, may_skip: bool) -> Publication:
        if may_skip and self._turns.is_busy:
            return Publication(None, None)
        started = time.monotonic()
        notes = notes_of(self._base_model, step, metrics)
        self._turns.settle(self._find_out)
        differ = self._published.differ(self._source, self._base_model, self._device_diff, self._audit_every)
        writing = WholeWriting(self._rules, self._own, self._published, differ, notes, started=started)
        return self._turns.take(writing, is_asynchronous=self._conduct.asynchronous)

    def _audit(self) -> int:
        self._turns.settle(self._find_out)
        head = self._published.head
        differ = self._published.differ(self._source, self._base_model, self._device_diff)
        current = published = elements = 0
        wrong: dict[str, None] = {}
        with thread_pool(self._rules.threads) as pool:
            for of in differ.digests(pool):
                current, published = add_digests(current, of.current), add_digests(published, of.published)
                elements += of.piece.baseline.size
                if of.current != of.published:
                    wrong[of.piece.spec.name] = None
        if wrong:
            self._published.forget()
            raise unlike_published(head.version, wrong)
        for digest in map(format_digest, (published, current)):
            if digest != head.state_digest:
                raise lost_published(head.version, head.state_digest, digest)
        self._check_store()
        return elements

    def _find_out(self) -> bool:
        return self._published.settle(self._own, self._reopened)

    def _reopened(self) -> PublishedState:
        self._own.check()
        memory = self._device_diff.host_memory()
        return open_run(RunFolder(self._store), Checkpoint(self._base_model), self._rules.encoding, memory)
