# SPDX-License-Identifier: Apache-2.0
"""`ShardedPublisher`: `DeltaPublisher` for a model that several processes hold together.

Every rank compares what it publishes with its own baseline and writes its own files; rank 0 writes the table of all
parts and commits; all learn the outcome. No weight travels between ranks. Invariant, on every rank: the baseline is
what the newest committed version says; it moves after the commit and never before.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist
from torch import nn

from trainer_hooks.kept import KeptChanges
from trainer_hooks.kernel import load_kernel
from trainer_hooks.publication import Fleet, Publication, PublishReport, R, notes_of
from trainer_hooks.publish import commit, is_committed
from trainer_hooks.sharded.differ import ShardDiffer, ShardFingerprints
from trainer_hooks.sharded.module import ShardedModuleSource
from trainer_hooks.sharded.opening import bring, open_sharded
from trainer_hooks.sharded.ranks import JSON, Ranks
from trainer_hooks.sharded.source import PartialSource, ShardSource
from trainer_hooks.sharded.writing import digested, write_rank, write_table
from vllm_delta_snapshot.acks import Acknowledgement, wait_applied
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.delta_folder import DigestedChange, Lineage, WriterNotes
from vllm_delta_snapshot.errors import SourceError, VerifyError
from vllm_delta_snapshot.format import layout
from vllm_delta_snapshot.format.container import DEFAULT_MAX_FILE_BYTES
from vllm_delta_snapshot.format.digest import add_digests
from vllm_delta_snapshot.format.version import VersionRecord
from vllm_delta_snapshot.ordered import thread_pool
from vllm_delta_snapshot.run_folder import RunFolder
from vllm_delta_snapshot.store import open_store

__all__ = ["ShardedPublisher", "shard_source_of"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Attempt:
    """What one rank wrote of a publication whose outcome it does not know yet."""

    changes: KeptChanges
    fingerprints: ShardFingerprints
    move: int


class ShardedPublisher:
    """Publishes the weights that the ranks of a `torch.distributed` group hold together. Use it on all of them.

    Making one, `publish` and `sync` are collective: every rank calls them, in the same order. A rank that fails makes
    the call fail on all, with an error that names it; nothing is lost, the next publication carries it. After a rank
    has died, start the trainer again, with any number of ranks: the run is continued.

    Args:
        model_or_source: the model as it is trained (FSDP2 or another `DTensor` layout, FSDP1 with ``use_orig_params``,
            DeepSpeed ZeRO-3, or plain), a function that returns an iterable of `PartialTensor` or of (checkpoint name,
            full tensor), or a `ShardSource`.
        sync_dir: the run's folder, that all ranks reach: ``/path``, ``s3://bucket/prefix`` or ``gs://bucket/prefix``.
        base: the checkpoint that trainer and engines start from, a folder with safetensors files that all ranks reach.
            Every rank reads its own part of it.
        encoding: see `DeltaPublisher`. OpenRL cannot read what several ranks write, whatever the encoding.
        group: the ranks that hold the model together; by default all.
        threads: how many threads of this rank compare and encode; by default its cores, at most 8.
        single_writer: see `DeltaPublisher`.
        max_file_bytes: soft limit of a payload file.
        timeout_s: how long a rank may keep the others waiting, in seconds, before it is given up. A process that dies
            is noticed at once.

    Raises:
        SourceError: the shards of all ranks are not the base checkpoint, or cannot be published by shards; every misfit
            is named.
        RunMismatch, UnsupportedFormat, ObjectNotFound, CorruptFile, StoreError, StoreUnavailable: see `DeltaPublisher`.
        RankFailed: another rank failed or is gone.
    """

    def __init__(
        self,
        model_or_source: object,
        *,
        sync_dir: str,
        base: str | Path,
        encoding: str | None = None,
        group: dist.ProcessGroup | None = None,
        threads: int | None = None,
        single_writer: bool = False,
        max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
        timeout_s: float = 1800.0,
    ) -> None:
        self._ranks = Ranks(group, timeout_s=timeout_s)
        self._max_file_bytes = max_file_bytes
        self._threads = threads or min(8, len(os.sched_getaffinity(0)))
        self._base_model = str(base)

        def prepare() -> None:
            self._source = shard_source_of(model_or_source)
            self._store = open_store(str(sync_dir), single_writer=single_writer)
            self._base = Checkpoint(base)
            if (kernel := load_kernel()) is not None:
                kernel.warm_up(self._base.specs.values())

        self._ranks.round(prepare, lambda _: None)
        self._order = {name: place for place, name in enumerate(self._base.specs)}
        self._folder = RunFolder(self._store)
        opened = open_sharded(self._ranks, self._source, self._base, self._folder, encoding)
        self._run_id, self._policy = opened.run_id, opened.policy
        self._version, self._state_digest = opened.version, opened.state_digest
        self._owned, self._baseline = opened.owned, opened.baseline
        self._digest = self._baseline.digest()
        self._fingerprints: ShardFingerprints = {}
        self._attempt: _Attempt | None = None
        self._record: VersionRecord | None = None
        self._is_moving = False
        logger.info(
            "opened run=%s sync_dir=%s version=%d rank=%d of %d elements=%d of %d",
            self._run_id,
            self._store.uri,
            self._version,
            self._ranks.rank,
            self._ranks.size,
            self._baseline.elements,
            self._base.total_elements,
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
        """Publish what changed since the newest version; a valid empty delta if nothing did. Collective; blocks.

        Args:
            step: the optimizer step, recorded for people and plots; rank 0's counts.
            metrics: finite numbers to record beside it, such as the reward; rank 0's count.

        Returns:
            The handle of the committed publication; the same report on all ranks, but for the seconds.

        Raises:
            SourceError: on some rank a shard is missing or does not fit, or a metric is no finite number. Nothing was
                published.
            RankFailed: another rank failed or is gone; the next call carries these changes too.
            VersionConflict: another trainer is publishing into this run.
            StoreError, StoreUnavailable: nothing was committed; the next call carries these changes too.
        """
        started = time.monotonic()
        begun = self._ranks.round(self._ready, lambda versions: self._begin(versions, step, metrics))
        if begun["is_adopted"]:
            logger.warning("version=%d was committed although its answer was lost", self._version + 1)
            self._adopt(begun["adopted"])
        self._attempt = None
        report = self._ranks.round(
            lambda: self._write(begun["folder"]),
            lambda parts: self._commit(begun, parts, notes_of(self._base_model, step, metrics), started),
        )
        self._adopt(report.pop("state_digest"))
        seconds = time.monotonic() - started
        found = PublishReport(**report, total_s=seconds, blocked_s=seconds)
        if self._ranks.rank == 0:
            found.log()
        return Publication(found.version, found)

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
            DeltaSnapshotError: see `publish`; or, on all ranks, what the fleet raised.
        """
        version = self.publish(step=step, metrics=metrics).version
        results: list[R] = []

        def drive(_: list[JSON]) -> None:
            if fleet is None:
                raise SourceError("rank 0 has no fleet to bring to the version")
            results.append(fleet.sync(version, run_id=self._run_id))

        self._ranks.round(lambda: None, drive)
        return results[0] if results else None

    def wait_applied(
        self, samplers: Iterable[str], *, version: int | None = None, timeout_s: float = 600.0
    ) -> Mapping[str, Acknowledgement]:
        """Wait until samplers have acknowledged a version: see `DeltaPublisher.wait_applied`. Not collective."""
        wanted = self._version if version is None else version
        return wait_applied(self._store, self._run_id, wanted, samplers, timeout_s=timeout_s)

    def _ready(self) -> JSON:
        """Make this rank's baseline whole again if moving it was interrupted, and say where it is."""
        if self._is_moving:
            logger.warning("a publication was interrupted after its commit; reading the run again")
            bring(self._baseline, self._folder, self._base, self._version)
            if self._baseline.digest() != self._digest:
                raise VerifyError("the run does not lead to the state that this rank published", file=self._store.uri)
            self._fingerprints = {}
            self._is_moving = False
        return {"version": self._version}

    def _begin(self, heard: list[JSON], step: int | None, metrics: Mapping[str, float] | None) -> JSON:
        """On rank 0: find out what became of an earlier commit whose answer never came, and name the next one."""
        notes_of(self._base_model, step, metrics)  # what is wrong with them is said before anything is written
        versions = {said["version"] for said in heard}
        if len(versions) > 1:
            raise VerifyError("the ranks are at different versions", found=sorted(versions))
        record, is_adopted = self._record, False
        if record is not None:
            is_adopted = is_committed(self._store, record)
            self._record = None
        publication = uuid.uuid4().hex
        version = self._version + 1 + is_adopted
        adopted = record.state_digest if record is not None and is_adopted else None
        folder = layout.delta_folder(version, publication)
        return {"is_adopted": is_adopted, "adopted": adopted, "id": publication, "folder": folder}

    def _write(self, folder: str) -> JSON:
        """Compare this rank's shards, and write what changed."""
        differ = ShardDiffer(self._source, self._owned, self._baseline, self._fingerprints)
        kept = KeptChanges()
        moves: list[int] = []

        def counted() -> Iterator[DigestedChange]:
            for item in digested(self._policy, differ.diffs(pool), self._baseline):
                moves.append(item.move)
                yield item

        with thread_pool(self._threads) as pool:
            written = write_rank(
                self._store,
                folder,
                self._ranks.rank,
                counted(),
                self._order,
                keep=kept.add,
                pool=pool,
                max_file_bytes=self._max_file_bytes,
            )
        self._attempt = _Attempt(kept, differ.fingerprints, add_digests(*moves))
        return written | {"diff_s": differ.seconds}

    def _commit(self, begun: JSON, parts: list[JSON], notes: WriterNotes, started: float) -> JSON:
        """On rank 0: write the table of all parts, and commit."""
        lineage = Lineage(
            run_id=self._run_id,
            version=self._version + 1,
            base_version=self._version,
            base_state_digest=self._state_digest,
            total_elements=self._base.total_elements,
        )
        diff_s = max(part["diff_s"] for part in parts)
        record = write_table(
            self._store,
            begun["folder"],
            begun["id"],
            lineage,
            list(self._base.specs.values()),
            parts,
            replace(notes, diff_s=diff_s),
            seconds=time.monotonic() - started,
            max_file_bytes=self._max_file_bytes,
        )
        self._record = record
        commit(self._store, record)
        self._record = None
        return {
            "run_id": self._run_id,
            "version": record.version,
            "changed_elements": record.changed_elements,
            "total_elements": self._base.total_elements,
            "changed_tensors": len({entry[0] for part in parts for entry in part["entries"]}),
            "payload_bytes": record.payload_bytes,
            "checkpoint_bytes": sum(spec.num_bytes for spec in self._base.specs.values()),
            "folder": record.folder,
            "diff_s": diff_s,
            "state_digest": record.state_digest,
        }

    def _adopt(self, state_digest: str) -> None:
        """Move this rank's baseline to a version that was committed."""
        attempt = self._attempt
        assert attempt is not None  # noqa: S101 - a version is committed when all ranks have written
        # From here on the version is this one; where moving stops half-way, it is read again.
        self._version, self._state_digest = self._version + 1, state_digest
        self._digest = add_digests(self._digest, attempt.move)
        self._attempt = None
        self._is_moving = True
        self._baseline.advance(attempt.changes.changes())
        self._fingerprints = attempt.fingerprints
        self._is_moving = False


def shard_source_of(model_or_source: object) -> ShardSource:
    """Turn what the user gave into a source of shards.

    Raises:
        SourceError: it is none of the kinds that are understood.
    """
    if isinstance(model_or_source, nn.Module):
        return ShardedModuleSource(model_or_source)
    if isinstance(model_or_source, ShardSource):
        return model_or_source
    if callable(model_or_source):
        return PartialSource(model_or_source)
    raise SourceError(
        "cannot publish this",
        expected="a module, or a function that returns an iterable of PartialTensor",
        found=type(model_or_source).__name__,
    )
