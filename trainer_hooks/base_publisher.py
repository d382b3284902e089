# SPDX-License-Identifier: Apache-2.0
"""What all publishers have in common: one publication at a time, the engines that wait for it, and an end in order.

Invariant: one publication is under way at most, and the next is compared with the baseline only when it has ended:
committed, and the baseline moved, or failed, and its changes are found again. How a publication is made, and by how
many processes, is the subclass's.
"""

from __future__ import annotations

import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import NoReturn, Self

import torch
from torch.utils.hooks import RemovableHandle

from trainer_hooks.compare.audit import AuditReport
from trainer_hooks.publication.conduct import Conduct
from trainer_hooks.publication.hook import publish_after_steps
from trainer_hooks.publication.publication import Publication
from trainer_hooks.publication.published import Head
from trainer_hooks.publication.saved_state import SavedState
from trainer_hooks.publication.turns import Turns
from trainer_hooks.publication.upkeep import SideUpkeep
from trainer_hooks.publication.use import Use, not_to_be_copied
from trainer_hooks.publication.writing import WritingRules
from vllm_delta_snapshot.errors import NotPublished
from vllm_delta_snapshot.runs.acks import Acknowledgement, wait_applied
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import Store

__all__ = ["BasePublisher"]

logger = logging.getLogger(__name__)

_Call = tuple[int | None, Mapping[str, float] | None]
"""The step and the metrics of a call."""


class BasePublisher(ABC):
    """See the module.

    Args:
        store: the run's store.
        conduct: how to behave.
        upkeep: what looks after the run's folder; ``None`` if nothing, or if another process does.
    """

    _rules: WritingRules

    def __init__(self, store: Store, conduct: Conduct, upkeep: SideUpkeep | None) -> None:
        self._store = store
        self._conduct = conduct
        self._upkeep = upkeep
        self._use = Use()
        self._turns = Turns()
        self._is_closed = False
        self._has_ended = False
        self._last_call: _Call | None = None
        self._last: Publication | None = None  # what came of that call; none if it raised

    @property
    def run_id(self) -> str:
        """The run's id, a uuid."""
        return self._rules.run_id

    @property
    def version(self) -> int:
        """The newest version this publisher committed or found; 0 is the base. Not the one that is under way."""
        return self._head.version

    @property
    def state_digest(self) -> str:
        """The state digest of the newest version."""
        return self._head.state_digest

    @property
    @abstractmethod
    def _head(self) -> Head: ...

    def _digest_of(self, version: int) -> str | None:
        """Return the state digest of a version, if it is the newest."""
        head = self._head
        return head.state_digest if head.version == version else None

    def publish(self, *, step: int | None = None, metrics: Mapping[str, float] | None = None) -> Publication:
        """Publish what changed since the newest version; a valid empty delta if nothing did.

        Blocks until the weights may be changed again: for the publication before this one, as `when_busy` says, and for
        the diff. What comes after that fails at the next call, or at ``wait()`` of the handle. With
        ``asynchronous=False`` it blocks until the commit, and fails at once.

        Of several ranks, all call it, in the same order; it is skipped on all or on none.

        Args:
            step: the optimizer step, recorded for people and plots; rank 0's counts.
            metrics: numbers to record beside it, such as the reward; rank 0's count. What is no finite number is left
                out with a warning, and so is a step that is no integer: neither keeps weights from engines.

        Returns:
            The handle of the publication.

        Raises:
            SourceError: a tensor is missing, doubled or does not fit. Nothing was published.
            VersionConflict: another trainer is publishing into this run.
            StoreError, StoreUnavailable: this publication, or the one before if nobody was told yet, was not committed.
                The next call carries its changes too, and those of this one.
            RankFailed: another rank failed, in this publication or, if a rank was not told yet, in the one before; or
                is gone.
            NotPublished: the publisher is closed, is in another call, or belongs to another process.
        """
        with self._use.taken("publish"):
            return self._call(step, metrics, may_skip=self._conduct.may_skip)

    def audit(self) -> AuditReport:
        """Prove that the weights, as they are now, are the newest version, bit for bit. Publishes nothing; blocks.

        Call it after `publish` and before the weights change. Waits for the publication under way, reads all of the
        source once more, whatever is skipped or remembered elsewhere, and compares its digest, computed from scratch,
        with the version's; so is the published copy that this process compares with, and the version in the store. Of
        several ranks, all call it; replicas of a shard are compared too.

        Returns:
            What was proven.

        Raises:
            VerifyError: the weights are not the version, which names the tensors; or the published copy is not, or
                ranks hold different values of the same shard.
            VersionConflict, RunMismatch, BrokenChain: the store has another version of that number, or another run.
            SourceError: the weights do not fit.
            StoreError, StoreUnavailable: the store cannot be read; or the publication before was not committed.
            RankFailed: another rank failed or is gone.
            NotPublished: the publisher is closed, is in another call, or belongs to another process.
        """
        started = time.monotonic()
        with self._use.taken("audit"):
            self._check_open()
            elements = self._audit()
            head = self._head
        report = AuditReport(head.version, head.state_digest, elements, time.monotonic() - started)
        report.log()
        return report

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
        self._use.check_process("wait_applied")
        deadline = time.monotonic() + timeout_s
        if version is None:
            self.drain(timeout_s)
            version = self.version
        left = max(0.0, deadline - time.monotonic())
        return wait_applied(self._store, self.run_id, version, samplers, timeout_s=left)

    def hook(self, optimizer: torch.optim.Optimizer, *, every: int = 1, first_step: int = 1) -> RemovableHandle:
        """Publish after optimizer steps, without a call in the training loop; of several ranks, on all.

        Only real steps count: not the micro-batches of gradient accumulation, nor steps that a `GradScaler` skips.
        What `publish` raises comes out of ``optimizer.step()``, after the weights were updated.

        Args:
            optimizer: whose steps.
            every: publish after steps whose number this divides; at least 1, or it raises ValueError.
            first_step: the number of the next step; after a resume, one more than the steps made.

        Returns:
            A handle; its ``remove()`` ends it.
        """
        self._use.check_process("hook")
        return publish_after_steps(lambda step: self.publish(step=step), optimizer, every=every, first_step=first_step)

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is under way on this rank. Blocks.

        Raises:
            NotPublished: something still is after this time; or another call is.
            DeltaSnapshotError: it failed, and nobody was told yet.
        """
        with self._use.taken("drain"):
            self._turns.drain(self._find_out, timeout_s)

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """Publish no more. Blocks for what is under way.

        It compares nothing: what the last call skipped or failed to publish stays unpublished, and a later publisher of
        the run finds it. A ``with`` block that ends without an error publishes that too. Of several ranks, all close,
        before the process group is destroyed. If an interrupt breaks it off, what is under way goes on; call it again
        to wait. In a process that was forked off it does nothing, nor does the end of a ``with`` block.

        Args:
            drain: whether to wait. If not, what is under way is abandoned: unless its commit was asked for already, it
                never becomes a version.
            timeout_s: how long to wait; by default `drain_timeout_s`.

        Raises:
            NotPublished: it was not committed in time, and is abandoned.
            DeltaSnapshotError: it failed, and nobody was told yet.
        """
        if not self._use.is_here:
            return
        with self._use.taken("close"):
            self._close(drain=drain, timeout_s=timeout_s)

    def _close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        self._is_closed = True
        if self._has_ended:
            return
        try:
            if drain:
                self._turns.drain(self._find_out, self._conduct.drain_timeout_s if timeout_s is None else timeout_s)
        except Exception:
            self._end(drain=drain)
            raise
        except BaseException:  # who interrupts the waiting does not ask to lose what is waited for
            self._leave()
            raise
        self._end(drain=drain)

    def _end(self, *, drain: bool) -> None:
        self._turns.abandon()  # which does nothing to what has ended
        self._leave()
        if self._upkeep is not None:
            self._upkeep.close(timeout_s=self._conduct.drain_timeout_s if drain else 0.0)
        self._has_ended = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._use.is_here:
            return
        if error is not None:
            try:
                self._leave()  # first: the others may be waiting already
                self.close()
            except Exception as failure:  # noqa: BLE001 - the error that ended the block is the one to be seen
                logger.error("the last publication failed too: %s", failure)
        elif not self._is_closed:
            with self._use.taken("close"):
                self._end_well()

    def _end_well(self) -> None:
        """Have the last call become a version, if it did not; and close."""
        with contextlib.suppress(Exception):  # the next attempt says why
            self._turns.drain(self._find_out, self._conduct.drain_timeout_s)
        is_busy = self._turns.is_busy
        is_out = self._last is not None and not self._last.is_skipped and self._last.version <= self.version
        try:
            if self._agree(self._last_call is not None and not (is_busy or is_out)):
                self._call(*(self._last_call or (None, None)), may_skip=False)
        finally:
            self._close(timeout_s=0.0 if is_busy else None)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise not_to_be_copied("a publisher")

    def state_dict(self) -> dict[str, object]:
        """Return what a trainer's checkpoint should remember of the run: plain strings and numbers. Does not block.

        It names the newest committed version, which may be older than the weights; a resumed trainer publishes what
        they differ in. Any rank's will do.
        """
        head = self._head
        return SavedState(
            run_id=self.run_id, version=head.version, state_digest=head.state_digest, sync_dir=self._store.uri
        ).model_dump()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Check that this is the run that a trainer's checkpoint remembers. Changes nothing; blocks for a few reads.

        The published state comes from the store in any case. ``resume_from`` checks before a new run would be started.

        Raises:
            RunMismatch, BrokenChain, VersionConflict: it is not, or has gone back, or has gone another way since.
            StoreError, StoreUnavailable: the store cannot be read.
        """
        self._use.check_process("load_state_dict")
        SavedState.of(state).check(RunFolder(self._store))

    def _call(self, step: int | None, metrics: Mapping[str, float] | None, *, may_skip: bool) -> Publication:
        """Take one call, whatever becomes of it."""
        self._check_open()
        self._last_call, self._last = (step, metrics), None
        self._last = self._publish(step, metrics, may_skip=may_skip)
        if self._last.is_skipped:
            logger.info("skipped step=%s: the publication before still runs; the next one carries it", step)
        return self._last

    def _check_open(self) -> None:
        if self._is_closed:
            raise NotPublished("the publisher is closed", hint="A new one continues the run.")

    @abstractmethod
    def _publish(self, step: int | None, metrics: Mapping[str, float] | None, *, may_skip: bool) -> Publication:
        """Publish, or skip it if that may be and the publication before still runs."""

    def _check_store(self) -> None:
        """Check that the store has the newest version as it is known here; see `SavedState.check`."""
        SavedState.of(self.state_dict()).check(RunFolder(self._store))

    @abstractmethod
    def _audit(self) -> int:
        """Wait for what is under way, and audit: see `audit`. Return how many elements were read."""

    @abstractmethod
    def _find_out(self) -> bool:
        """Find out whether an earlier commit, whose answer never came, was made; if it was, it is adopted."""

    def _agree(self, is_needed: bool) -> bool:
        """Say whether any rank needs something. Of several, all are asked."""
        return is_needed

    def _leave(self) -> None:  # noqa: B027 - one process leaves nobody behind
        """Tell other ranks that this one takes part no more. Does not block."""
