# SPDX-License-Identifier: Apache-2.0
"""Have a run's upkeep done behind the trainer's back: anchors, merged deltas and pruning, in a process of its own.

One at a time, at low priority; it reads the store and its own copy of the base, never the trainer's memory. What goes
wrong in it is logged, and costs the trainer nothing: the next time does what was left.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from typing import IO, Final, Self

from trainer_hooks.publication.publication import PublishReport
from vllm_delta_snapshot.upkeep import UpkeepOrder, UpkeepPolicy

__all__ = ["SideUpkeep"]

logger = logging.getLogger(__name__)

_NICENESS: Final = 10


class SideUpkeep:
    """See the module. Use it from one thread.

    Args:
        order: the run, the base and the policy.
    """

    def __init__(self, order: UpkeepOrder) -> None:
        self._order = order
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._since_anchor = 0.0
        self._is_due = False

    @classmethod
    def of(cls, policy: UpkeepPolicy | None, sync_dir: str, base: str, *, single_writer: bool) -> Self | None:
        """Return one that follows a policy; ``None`` if there is none."""
        if policy is None:
            return None
        return cls(UpkeepOrder(sync_dir=sync_dir, base=base, single_writer=single_writer, policy=policy))

    def after(self, report: PublishReport) -> None:
        """Note a commit, and start a process if something may be due and none is at work. Returns at once."""
        self._since_anchor += report.payload_bytes / max(1, report.checkpoint_bytes)
        self._order = self._order.model_copy(update={"run_id": report.run_id})
        self._is_due = self._is_due or self._may_be_due(self._order.policy, report.version)
        if self._is_due and self._is_free():
            self._is_due = False
            self._start()

    def close(self, *, timeout_s: float) -> None:
        """Wait for the process at work, if there is one, but no longer than that; then it goes on by itself."""
        if self._process is not None:
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                logger.info("upkeep of %s goes on in process %d", self._order.sync_dir, self._process.pid)
                return
            self._is_free()

    def _may_be_due(self, policy: UpkeepPolicy, version: int) -> bool:
        cadences = (policy.anchor_every, policy.merge_every)
        if policy.anchor_after_ratio is not None and self._since_anchor >= policy.anchor_after_ratio:
            self._since_anchor = 0.0
            return True
        if any(every is not None and version % every == 0 for every in cadences):
            return True
        return cadences == (None, None) and policy.keep_versions is not None and version % policy.keep_versions == 0

    def _is_free(self) -> bool:
        if self._process is None:
            return True
        code = self._process.poll()
        if code is None:
            return False
        if code != 0 and self._log is not None:
            self._log.seek(0)
            lines = self._log.read().decode(errors="replace").splitlines()
            logger.warning("upkeep of %s failed (status %d): %s", self._order.sync_dir, code, (lines or ["?"])[-1])
        if self._log is not None:
            self._log.close()
        self._process = self._log = None
        return True

    def _start(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - read when the process has ended
        # No thread of the trainer's must be waited for, nor its memory be copied: a new interpreter, not a fork.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SIDE],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        )
        if self._process.stdin is not None:
            self._process.stdin.write(self._order.model_dump_json().encode())
            self._process.stdin.close()


_SIDE: Final = (
    f"import os, sys; os.nice({_NICENESS}); from vllm_delta_snapshot.upkeep.upkeep import main; sys.exit(main())"
)
