# SPDX-License-Identifier: Apache-2.0
"""`ShardedPublisher`: `DeltaPublisher` for a model that several processes hold together.

Every rank compares what it publishes with its own baseline and writes its own files; rank 0 writes the table of all
parts and commits; all learn the outcome. No weight travels between ranks. Invariant: all ranks take the same turns.
What one of them has to say, that it is busy, or that it failed behind the step, is asked of all before a turn is taken.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch.distributed as dist
from torch import nn

from trainer_hooks.base_publisher import BasePublisher
from trainer_hooks.compare.audit import Turns, check_turns
from trainer_hooks.compare.device_diff import DeviceDiff, DiffOn
from trainer_hooks.compare.kernel import load_kernel
from trainer_hooks.publication.conduct import Conduct, WhenBusy
from trainer_hooks.publication.leftovers import Leftovers
from trainer_hooks.publication.notes import notes_of
from trainer_hooks.publication.observers import PublishObserver
from trainer_hooks.publication.publication import Fleet, Publication, R
from trainer_hooks.publication.published import Head
from trainer_hooks.publication.saved_state import SavedState
from trainer_hooks.publication.shard_audit import check_audited
from trainer_hooks.publication.shard_opening import open_sharded
from trainer_hooks.publication.shard_published import ShardPublished
from trainer_hooks.publication.shard_writing import Place, ShardWriting
from trainer_hooks.publication.upkeep import SideUpkeep
from trainer_hooks.publication.writing import WritingRules, default_buffer_bytes
from trainer_hooks.ranks import JSON, Ranks
from trainer_hooks.source.items import refuse_of_no_module
from trainer_hooks.source.names import Names
from trainer_hooks.source.sharded_module import ShardedModuleSource
from trainer_hooks.source.shards import PartialSource, ShardSource
from trainer_hooks.source.unsourced import check_patterns
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import RankFailed, SourceError, VerifyError
from vllm_delta_snapshot.format.container import DEFAULT_MAX_FILE_BYTES
from vllm_delta_snapshot.runs.own_run import OwnRun
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import Store, open_store
from vllm_delta_snapshot.upkeep import UpkeepPolicy
from vllm_delta_snapshot.util.ordered import thread_pool

__all__ = ["ShardedPublisher", "shard_source_of"]

logger = logging.getLogger(__name__)


class ShardedPublisher(BasePublisher):
    """Publishes the weights that the ranks of a `torch.distributed` group hold together. Use it on all of them.

    Making one, `publish`, `sync` and the end of a ``with`` block are collective: every rank comes there, in the same
    order. A rank that fails makes the publication fail on all, with an error that names it; nothing is lost, the next
    one carries it. What fails behind the step is raised at the next call, on all ranks unless all were told already.
    After a rank has died, start the trainer again, with any number of ranks: the run is continued.

    Args:
        model_or_source: the model as it is trained (FSDP2 or another `DTensor` layout, FSDP1 with ``use_orig_params``,
            DeepSpeed ZeRO-3, or plain), a function that returns an iterable of `PartialTensor` or of (checkpoint name,
            full tensor), or a `ShardSource`.
        sync_dir: the run's folder, that all ranks reach: ``/path``, ``s3://bucket/prefix`` or ``gs://bucket/prefix``.
        base: the checkpoint that trainer and engines start from, a folder with safetensors files that all ranks reach.
            Every rank reads its own part of it.
        unsourced: see `DeltaPublisher`; rank 0's counts.
        names: see `DeltaPublisher`; the same on all ranks. A function is asked about stand-ins without weights, and has
            to return ranges of consecutive elements of them.
        skip_frozen: see `DeltaPublisher`; of a `DTensor` torch counts no writes at all, so one that is frozen is then
            only read when it is replaced.
        audit_every: see `DeltaPublisher`; each rank proves its own.
        encoding: see `DeltaPublisher`. OpenRL cannot read what several ranks write, whatever the encoding.
        group: the ranks that hold the model together; by default all.
        asynchronous: see `DeltaPublisher`.
        when_busy: see `DeltaPublisher`; a call is skipped on all ranks or on none.
        buffer_bytes: see `DeltaPublisher`, of this rank's changes. By default 1/8 of its part of the checkpoint, and at
            least 256 MiB.
        drain_timeout_s: see `DeltaPublisher`.
        resume_from: see `DeltaPublisher`; rank 0's counts.
        threads: how many threads of this rank compare and encode; by default its cores, at most 8.
        diff_on: see `DeltaPublisher`; a rank's own matter.
        single_writer: see `DeltaPublisher`.
        upkeep: see `DeltaPublisher`; beside rank 0.
        max_file_bytes: soft limit of a payload file.
        observers: see `DeltaPublisher`; rank 0's are told.
        timeout_s: how long a rank may keep the others waiting, in seconds, before it is given up. A process that dies
            is noticed at once.

    Raises:
        SourceError: the shards of all ranks are not the base checkpoint, or cannot be published by shards; every misfit
            is named.
        RunMismatch, BrokenChain, VersionConflict, UnsupportedFormat, ObjectNotFound, CorruptFile, StoreError,
            StoreUnavailable: see `DeltaPublisher`.
        RankFailed: another rank failed or is gone.
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
        group: dist.ProcessGroup | None = None,
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
        timeout_s: float = 1800.0,
    ) -> None:
        conduct = Conduct(asynchronous, when_busy, drain_timeout_s)
        check_turns(audit_every)
        patterns = check_patterns(unsourced)
        self._audit_every = audit_every
        self._device_diff = DeviceDiff(diff_on)
        self._ranks = Ranks(group, timeout_s=timeout_s)
        # Of their own, so that what is said behind the step does not come in between.
        behind = Ranks(group, timeout_s=timeout_s)
        self._untold: BaseException | None = None

        def prepare() -> Store:
            self._source = shard_source_of(model_or_source, names, skip_frozen=skip_frozen)
            self._base = Checkpoint(base)
            if (kernel := load_kernel()) is not None:
                kernel.warm_up(self._base.specs.values())
            return open_store(str(sync_dir), single_writer=single_writer)

        store = self._ranks.all_do(prepare)
        self._base_model = str(self._base.folder)
        side = SideUpkeep.of(upkeep, store.uri, self._base_model, single_writer=single_writer)
        super().__init__(store, conduct, side if self._ranks.rank == 0 else None)
        self._folder = RunFolder(store)

        def check_saved() -> None:
            if resume_from is not None:
                SavedState.of(resume_from).check(self._folder)

        self._ranks.first_does(check_saved)
        opened = open_sharded(
            self._ranks, self._source, self._base, self._folder, encoding, patterns, self._device_diff.host_memory()
        )
        self._published = ShardPublished(opened)
        self._own = OwnRun(store, opened.run_id)
        specs = self._base.specs
        self._place = Place(behind, self._own, list(specs.values()), {name: place for place, name in enumerate(specs)})
        self._rules = WritingRules(
            run_id=opened.run_id,
            encoding=opened.policy,
            total_elements=self._base.total_elements,
            checkpoint_bytes=sum(spec.num_bytes for spec in specs.values()),
            max_file_bytes=max_file_bytes,
            threads=threads or min(8, len(os.sched_getaffinity(0))),
            buffer_bytes=buffer_bytes or default_buffer_bytes(opened.baseline.num_bytes),
            exit_timeout_s=drain_timeout_s,
            on_commit=() if self._upkeep is None else (self._upkeep.after,),
            observers=(Leftovers(self._store), *observers),
        )
        logger.info(
            "opened run=%s sync_dir=%s version=%d rank=%d of %d elements=%d of %d",
            self.run_id,
            self._store.uri,
            self.version,
            self._ranks.rank,
            self._ranks.size,
            opened.baseline.elements,
            self._base.total_elements,
        )

    @property
    def _head(self) -> Head:
        return self._published.head

    def sync(
        self, fleet: Fleet[R] | None, *, step: int | None = None, metrics: Mapping[str, float] | None = None
    ) -> R | None:
        """Publish, and have engines take the version. Collective; blocks until the last one has it or has failed.

        Args:
            fleet: the engines: a `vllm_delta_snapshot.drive.DeltaSync`. Only rank 0's is driven.
            step: see `publish`.
            metrics: see `publish`.

        Returns:
            On rank 0 what the fleet reports, elsewhere ``None``.

        Raises:
            DeltaSnapshotError: see `publish`; it is never skipped. Or, on all ranks, what the fleet raised.
        """
        with self._use.taken("sync"):
            publication = self._call(step, metrics, may_skip=False)

        def drive() -> R:
            if fleet is None:
                raise SourceError("rank 0 has no fleet to bring to the version")
            version = publication.version
            return fleet.sync(version, run_id=self.run_id, state_digest=self._digest_of(version))

        return self.then(publication, drive)

    def then(self, publication: Publication, work: Callable[[], R]) -> R | None:
        """Wait for a publication on all ranks, then have rank 0 do something that all wait for. Collective; blocks.

        Args:
            publication: what `publish` returned here.
            work: what to do; only rank 0's is called.

        Returns:
            On rank 0 what `work` returned, elsewhere ``None``.

        Raises:
            DeltaSnapshotError: the publication failed; or, on all ranks, what `work` raised.
        """
        with self._use.taken("then"):
            return self._ranks.first_does(lambda: self._use.lend(work), once=publication.wait)

    def any_rank(self, is_so: bool) -> bool:
        """Say whether something is so on any rank. Collective; blocks until all have said.

        Raises:
            RankFailed: another rank is gone.
        """
        with self._use.taken("any_rank"):
            return self._agree(is_so)

    def _publish(self, step: int | None, metrics: Mapping[str, float] | None, *, may_skip: bool) -> Publication:
        started = time.monotonic()
        publication_id = self._next(step, metrics, may_skip=may_skip)
        if publication_id is None:
            return Publication(None, None)
        notes = notes_of(self._base_model, *((step, metrics) if self._ranks.rank == 0 else (None, None)))
        turns = Turns.of(self._audit_every, self.version + 1, self._base.specs.values())
        differ = self._published.differ(self._source, self._device_diff, turns)
        writing = ShardWriting(
            self._rules, self._place, self._published, differ, notes, publication_id=publication_id, started=started
        )
        return self._turns.take(writing, is_asynchronous=self._conduct.asynchronous)

    def _audit(self) -> int:
        self._next(None, None, may_skip=False)
        audit = self._published.audit(self._source, self._base.specs)

        def work() -> JSON:
            with thread_pool(self._rules.threads) as pool:
                return audit.run(pool, self._device_diff)

        def decide(parts: list[JSON]) -> JSON:
            elements = check_audited(parts, self._head)
            self._check_store()
            return elements

        return int(self._ranks.round(work, decide))

    def _next(self, step: int | None, metrics: Mapping[str, float] | None, *, may_skip: bool) -> str | None:
        """Wait for the publication before, on all ranks; return the next one's id, or ``None`` if it is skipped."""
        begun = self._ranks.round(
            lambda: self._ready(may_skip=may_skip), lambda heard: self._begin(heard, step, metrics)
        )
        if begun["is_skipped"]:
            return None
        untold, self._untold = self._untold, None
        if begun["adopted"] is not None:
            logger.warning("version=%d was committed although its answer was lost", self.version + 1)
            self._published.adopt(begun["adopted"])
        self._published.attempt = None
        if begun["failed"] is not None:
            raise untold or RankFailed(f"the publication before failed on {begun['failed']}", hint=_AGAIN)
        return str(begun["id"])

    def _ready(self, *, may_skip: bool) -> JSON:
        """Say whether this rank can take a turn, and what it knows of the one before."""
        if may_skip and self._turns.is_busy:
            return {"is_busy": True}
        self._untold = self._turns.ended() or self._untold
        if self._published.mend(self._folder, self._base):
            self._untold = None  # that is what it was
        failed = None if self._untold is None else f"{type(self._untold).__name__}: {self._untold}"
        return {"is_busy": False, "version": self.version, "failed": failed}

    def _begin(self, heard: list[JSON], step: int | None, metrics: Mapping[str, float] | None) -> JSON:
        """On rank 0: find out what became of an earlier commit whose answer never came, and name the next one."""
        if any(said["is_busy"] for said in heard):
            return {"is_skipped": True}
        versions = {said["version"] for said in heard}
        if len(versions) > 1:
            raise VerifyError("the ranks are at different versions", found=sorted(versions))
        adopted = self._published.find_out(self._own)
        failed = [f"rank {rank}: {said['failed']}" for rank, said in enumerate(heard) if said["failed"] is not None]
        return {
            "is_skipped": False,
            "adopted": adopted,
            "failed": failed[0] if failed and adopted is None else None,
            "id": uuid.uuid4().hex,
        }

    def _find_out(self) -> bool:
        return False  # that is asked of all ranks, by the next call

    def _agree(self, is_needed: bool) -> bool:
        return bool(self._ranks.round(lambda: is_needed, any))

    def _leave(self) -> None:
        self._ranks.leave("has closed its publisher")


_AGAIN = "The next publication carries its changes."


def shard_source_of(model_or_source: object, names: Names | None = None, *, skip_frozen: bool = False) -> ShardSource:
    """Turn what the user gave into a source of shards.

    Args:
        model_or_source: see `ShardedPublisher`.
        names: see there.
        skip_frozen: see there.

    Raises:
        SourceError: it is none of the kinds that are understood, or what is for modules was given for something else.
    """
    if isinstance(model_or_source, nn.Module):
        return ShardedModuleSource(model_or_source, names, skip_frozen=skip_frozen)
    refuse_of_no_module(model_or_source, names, skip_frozen=skip_frozen)
    if isinstance(model_or_source, ShardSource):
        return model_or_source
    if callable(model_or_source):
        return PartialSource(model_or_source)
    raise SourceError(
        "cannot publish this",
        expected="a module, or a function that returns an iterable of PartialTensor",
        found=type(model_or_source).__name__,
    )
