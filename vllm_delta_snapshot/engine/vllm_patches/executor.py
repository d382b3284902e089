# SPDX-License-Identifier: Apache-2.0
"""Keep vLLM's multi-process executor in step after a worker call that failed.

vLLM 0.32 stops reading the workers' answers at the first failure. The answers of the workers behind it stay in their
queues and are taken for answers to the next call, and so on for ever: a failed update would make later, unrelated calls
fail, and an update that failed could be taken for one that succeeded. Here the rest of the answers is read before the
failure is passed on. Calls that succeed, and calls that ask one worker only, are not touched.

A failure must not keep the queues alive either. vLLM's future and the failure refer to each other, and through the
frames of its traceback to whatever the call had at hand, until the garbage collector comes; a queue that is freed by
the collector may hang it for ever (pyzmq then waits for a context whose sockets it does not know any more). So after a
failed update an engine in this process might never end. Therefore a failed call is left without its queues.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

from vllm_delta_snapshot.engine.log import logger

__all__ = ["keep_answers_in_step"]

_MARK: Final = "_delta_snapshot_in_step"
_LONGEST_WAIT_S: Final = 600.0


def keep_answers_in_step(module: ModuleType) -> None:
    """Act on ``vllm.v1.executor.multiproc_executor``. Does nothing twice."""
    executor: Any = module.__dict__["MultiprocExecutor"]
    plain = executor.collective_rpc
    if getattr(plain, _MARK, False):
        return

    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("non_block") or kwargs.get("unique_reply_rank") is not None or len(args) > 3:
            return plain(self, method, *args, **kwargs)
        queues = self.response_mqs
        answers = [_Answer(queue) for queue in queues]
        self.response_mqs = answers
        try:
            return plain(self, method, *args, **kwargs)
        except RuntimeError:
            _read_the_rest(answers)
            for answer in answers:
                answer.let_go()
            raise
        finally:
            self.response_mqs = queues
            del queues  # the failure's traceback has this frame

    setattr(collective_rpc, _MARK, True)
    executor.collective_rpc = collective_rpc


class _Answer:
    """A worker's queue that remembers whether this call's answer was taken from it."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.is_taken = False

    def dequeue(self, *args: Any, **kwargs: Any) -> Any:
        answer = self._queue.dequeue(*args, **kwargs)
        self.is_taken = True
        return answer

    def let_go(self) -> None:
        self._queue = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


def _read_the_rest(answers: list[_Answer]) -> None:
    # No answer taken: the call was never sent, and nothing will come.
    if not any(answer.is_taken for answer in answers):
        return
    for rank, answer in enumerate(answers):
        if not answer.is_taken:
            try:
                answer.dequeue(timeout=_LONGEST_WAIT_S)
            except TimeoutError:
                logger.error("worker %d did not answer a call that another worker failed", rank)
