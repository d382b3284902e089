# SPDX-License-Identifier: Apache-2.0
"""Ranks: the processes of a trainer that publish together, and how they agree.

Everything they say to each other goes through `Ranks.round`: each does its work, rank 0 hears from all and decides,
all hear what it decided. If one fails, all fail, with its error. Messages are small JSON objects, sent point to point
over a gloo group of their own: no collective, and never a weight. A process that dies closes its connections, so rank
0, or who waits for rank 0, learns of it at once and by name; a host that falls silent is noticed after the timeout.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from vllm_delta_snapshot.errors import DeltaSnapshotError, RankFailed, error_of_fields

__all__ = ["Ranks"]

logger = logging.getLogger(__name__)

JSON = Any

T = TypeVar("T")

_LAST_WORDS: Final[list[object]] = []
"""What ranks that left have said: to let go of it before it is heard would take it back."""

_GONE: Final = (RuntimeError, ValueError)
"""What torch raises where the other end is gone, or the process group was destroyed."""

_HINT: Final = "Start the trainer again; it continues the run."


class Ranks:
    """See the module. Making one is collective over the group; without `torch.distributed` there is one rank.

    Args:
        group: the ranks that hold the model together; ``None`` for all.
        timeout_s: how long a rank may keep the others waiting before it is given up.

    Attributes:
        rank: this process's number in the group.
        size: how many there are.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_s: float = 1800.0) -> None:
        self._lost: str | None = None
        self._timeout_s = timeout_s
        self._deaf: set[int] = set()  # who does not listen any more, or may not
        self._unheard: list[tuple[dist.Work | None, torch.Tensor]] = []
        self._number = 0
        if not dist.is_initialized():
            self.rank, self.size = 0, 1
            return
        self._members = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        self.rank, self.size = self._members.index(dist.get_rank()), len(self._members)
        # Rank 0 waits for the others as long as it may, and they for what it says then: longer.
        patience = timedelta(seconds=3 * timeout_s)
        self._group = dist.new_group(self._members, timeout=patience, backend="gloo", use_local_synchronization=True)

    def round(self, work: Callable[[], JSON], decide: Callable[[list[JSON]], Sequence[JSON] | JSON]) -> JSON:
        """Let every rank work, and rank 0 decide on the results. Collective; blocks until all have ended.

        Args:
            work: called on every rank; returns something that JSON can hold.
            decide: called on rank 0 if all have worked, with their results by rank. A list is taken for one answer a
                rank, in their order; anything else is the answer to all.

        Returns:
            The answer to this rank.

        Raises:
            RankFailed: another rank died, or failed in a way that is none of this project's errors. If one died, every
                later round fails too.
            DeltaSnapshotError: another rank raised it; the message names the rank.
            Exception: what `work`, or on rank 0 `decide`, raised here.
        """
        if self._lost is not None:
            raise RankFailed(self._lost, hint=_HINT)
        self._number += 1
        result, error = _try(work)
        if error is not None and not isinstance(error, Exception):
            self._lost = f"rank {self.rank} was interrupted"
        try:
            answers = self._lead(result, error, decide) if self.rank == 0 else self._follow(result, error)
        except Exception:
            raise
        except BaseException:  # perhaps in the middle of a message: what comes next would be taken for its rest
            self._lost = f"rank {self.rank} was interrupted"
            raise
        if error is not None:
            error.add_note(f"on rank {self.rank} of {self.size}")
            raise error
        return answers

    def all_do(self, work: Callable[[], T]) -> T:
        """Let every rank work; if one fails, all do. Collective; blocks until all have ended.

        Returns:
            What this rank's `work` returned.

        Raises:
            RankFailed, DeltaSnapshotError, Exception: see `round`.
        """
        results: list[T] = []
        self.round(lambda: results.append(work()), lambda _: None)
        return results[0]

    def first_does(self, work: Callable[[], T], *, once: Callable[[], object] = lambda: None) -> T | None:
        """Let rank 0 work while the others wait; if it fails, all do. Collective; blocks.

        Args:
            work: what to do; only rank 0's is called.
            once: what every rank does before, which may fail.

        Returns:
            On rank 0 what `work` returned, elsewhere ``None``.

        Raises:
            RankFailed, DeltaSnapshotError, Exception: see `round`.
        """
        results: list[T] = []

        def before() -> None:
            once()

        self.round(before, lambda _: results.append(work()))
        return results[0] if results else None

    def leave(self, why: str) -> None:
        """Take part no more, and have the others learn it at their next round. Not collective; does not block.

        Args:
            why: what to tell them, after this rank's name.
        """
        if self._lost is not None or self.size == 1:
            return
        self._lost = f"rank {self.rank} {why}"
        self._number += 1
        said = {"error": RankFailed(why, hint=_HINT).to_fields(), "is_gone": True, "is_interrupted": True}
        message = _failure([0], said, is_lost=True) if self.rank == 0 else said
        for rank in range(1, self.size) if self.rank == 0 else (0,):
            with contextlib.suppress(*_GONE):  # who is gone need not hear it
                self._send(rank, message, is_awaited=False)
        _LAST_WORDS.extend(self._unheard)

    def _lead(self, result: JSON, error: BaseException | None, decide: Callable[[list[JSON]], Any]) -> JSON:
        heard = [_said(result, error), *self._hear_all()]
        for rank, said in enumerate(heard):
            if said.get("is_interrupted"):
                self._deaf.add(rank)
                self._lost = f"rank {rank} {said['error']['what'] if said.get('is_gone') else 'was interrupted'}"
        failed = [rank for rank, said in enumerate(heard) if "error" in said]
        if failed:
            self._answer([_failure(failed, heard[failed[0]], is_lost=self._lost is not None)] * self.size)
            if failed[0] != 0:
                raise _error_of(_failure(failed, heard[failed[0]]))
            return None
        answers, failure = _try(lambda: decide([said["result"] for said in heard]))
        if failure is not None:
            if not isinstance(failure, Exception):
                self._lost = "rank 0 was interrupted"
            self._answer([_failure([0], _said(None, failure), is_lost=self._lost is not None)] * self.size)
            raise failure
        mine = answers if isinstance(answers, list) else [answers] * self.size
        self._answer([{"result": answer} for answer in mine])
        return mine[0]

    def _follow(self, result: JSON, error: BaseException | None) -> JSON:
        try:
            # Not awaited: rank 0 may be waiting for another one that says nothing, and this one has to hear of it.
            self._send(0, _said(result, error), is_awaited=False)
            if self._lost is not None:
                return None
            answer = self._receive(0)
        except _GONE as gone:
            self._lost = "rank 0 is gone"
            raise RankFailed(self._lost, hint=_HINT) from gone
        self._unheard.clear()
        if "error" not in answer:
            return answer["result"]
        if answer["is_lost"]:
            self._lost = answer["error"]["what"]
        if error is None:
            raise _error_of(answer)
        return None

    def _hear_all(self) -> list[JSON]:
        """Hear what all others have to say; or that one of them says nothing, in which case the rest is not waited for.

        On a thread: a wait that times out makes gloo close all connections, and then nobody could be told.
        """
        said: queue.SimpleQueue[JSON] = queue.SimpleQueue()
        try:
            threading.Thread(target=self._hear_into, args=(said,), daemon=True).start()
        except RuntimeError:  # no thread is to be had: the others still wait for an answer
            self._hear_into(said)
        deadline = time.monotonic() + self._timeout_s
        heard: list[JSON] = []
        while len(heard) < self.size - 1:
            try:
                heard.append(said.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                self._deaf.add(len(heard) + 1)
                heard.append(self._silence(len(heard) + 1, f"did not answer within {self._timeout_s:g} s"))
                break
        return heard

    def _hear_into(self, said: queue.SimpleQueue[JSON]) -> None:
        for rank in range(1, self.size):
            try:
                message = self._receive(rank)
            except _GONE as gone:
                logger.debug("lost rank %d: %s", rank, gone)
                message = self._silence(rank, "is gone")
            said.put(message)

    def _silence(self, rank: int, how: str) -> JSON:
        self._lost = f"rank {rank} {how}"
        return {"error": RankFailed(how, hint=_HINT).to_fields(), "is_gone": True}

    def _answer(self, answers: Sequence[JSON]) -> None:
        for rank in range(1, self.size):
            try:
                # Who says nothing may not listen either; if it was only slow, it will be told.
                self._send(rank, answers[rank], is_awaited=rank not in self._deaf)
            except _GONE as gone:
                # What was decided stands; that this one is gone is for the next round to say.
                logger.warning("rank %d is gone: %s", rank, gone)
                self._lost = f"rank {rank} is gone"

    def _send(self, rank: int, message: JSON, *, is_awaited: bool = True) -> None:
        data = json.dumps({"number": self._number, **message}).encode()
        for tensor in (torch.tensor([len(data)]), torch.frombuffer(bytearray(data), dtype=torch.uint8)):
            if is_awaited:
                dist.send(tensor, dst=self._members[rank], group=self._group)
            else:
                work = dist.isend(tensor, dst=self._members[rank], group=self._group)
                self._unheard.append((work, tensor))

    def _receive(self, rank: int) -> JSON:
        of = self._members[rank]
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, src=of, group=self._group)
        data = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(data, src=of, group=self._group)
        message = json.loads(data.numpy().tobytes())
        if message["number"] != self._number:
            raise RuntimeError(f"rank {rank} is at its call {message['number']}, this one at {self._number}")
        return message


def _try(function: Callable[[], JSON]) -> tuple[JSON, BaseException | None]:
    try:
        return function(), None
    except BaseException as error:  # noqa: BLE001 - others wait for it; it is raised again once they know
        return None, error


def _said(result: JSON, error: BaseException | None) -> JSON:
    if error is None:
        return {"result": result}
    if isinstance(error, DeltaSnapshotError):
        return {"error": error.to_fields()}
    fields = RankFailed(f"{type(error).__name__}: {error}"[:2000]).to_fields()
    return {"error": fields, "is_interrupted": not isinstance(error, Exception)}


def _failure(failed: Sequence[int], first: JSON, *, is_lost: bool = False) -> JSON:
    """Say which rank failed, to those that did not."""
    fields = dict(first["error"])
    separator = " " if first.get("is_gone") else ": "
    more = f" (and ranks {', '.join(map(str, failed[1:9]))} failed too)" if len(failed) > 1 else ""
    fields["what"] = f"rank {failed[0]}{separator}{fields['what']}{more}"
    return {"error": fields, "is_lost": is_lost}


def _error_of(answer: JSON) -> DeltaSnapshotError:
    return error_of_fields(answer["error"])
