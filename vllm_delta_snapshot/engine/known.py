# SPDX-License-Identifier: Apache-2.0
"""What an engine's weights must be at a version: the digests of all tensors, and the content, held still meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from vllm_delta_snapshot.engine.agree import agree
from vllm_delta_snapshot.engine.write.reload import BitsOf
from vllm_delta_snapshot.engine.write.updates import Weights
from vllm_delta_snapshot.errors import RunMismatch
from vllm_delta_snapshot.host.handoff import Handoff

__all__ = ["known_state"]


@contextlib.contextmanager
def known_state(
    handoff: Handoff | None,
    at: Weights,
    version: int,
    *,
    needs_mirror: bool,
    timeout_s: float,
    check: Callable[[], None],
) -> Iterator[tuple[dict[str, str], BitsOf | None]]:
    """Give the digests of all tensors at a version, and its content if it is needed. Collective; blocks.

    Args:
        handoff: the worker's tie to its stager; ``None`` for an engine without a run.
        at: which weights the engine has.
        version: the version.
        needs_mirror: whether the content is needed.
        timeout_s: how long it may take to have them.
        check: what else this worker has to check before it votes.

    Raises:
        RunMismatch: the engine follows no run.
        NotStaged: they did not come in time.
        DeltaSnapshotError: they cannot be known, or `check` or another worker failed.
    """
    failure: BaseException | None = None
    expected: dict[str, str] = {}
    bits: BitsOf | None = None
    try:
        if handoff is None:
            raise RunMismatch("this engine follows no run, so it knows no versions", hint="Give init_info a sync_dir.")
        check()
        if needs_mirror:
            bits = handoff.mirror_at(version, timeout_s=timeout_s).bits
        expected = handoff.tensor_digests(version, timeout_s=timeout_s)
    except BaseException as error:  # noqa: BLE001 - the other workers must not wait for this one
        failure = error
    try:
        agree(failure, at)
        yield expected, bits
    finally:
        if handoff is not None:
            handoff.release()
