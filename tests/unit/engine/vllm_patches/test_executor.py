"""vLLM's multi-process executor after a call that a worker failed: answers in step, and no queue kept alive."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import ModuleType
from typing import Any

import pytest

from vllm_delta_snapshot.engine.vllm_patches.executor import keep_answers_in_step


class _Queue:
    """One worker's answers."""

    def __init__(self, *answers: object) -> None:
        self.answers = deque(answers)

    def dequeue(self, timeout: float | None = None) -> object:
        if not self.answers:
            raise TimeoutError
        return self.answers.popleft()


class _Executor:
    """As in vLLM: reads until the first failure, by way of a future that keeps what it raised."""

    def __init__(self, *queues: _Queue, is_failed: bool = False) -> None:
        self.response_mqs = list(queues)
        self.is_failed = is_failed

    def collective_rpc(self, method: str, timeout: float | None = None, non_block: bool = False) -> Any:
        if self.is_failed:
            raise RuntimeError("Executor failed.")
        queues = self.response_mqs

        def get_response() -> list[object]:
            answers = []
            for queue in queues:
                answer = queue.dequeue(timeout=timeout)
                if answer == "failure":
                    raise RuntimeError(f"Worker failed with error {answer!r}")
                answers.append(answer)
            return answers

        future = _Future(get_response)
        return future if non_block else future.result()


class _Future(Future[Any]):
    def __init__(self, get_response: Callable[[], Any]) -> None:
        super().__init__()
        self.get_response = get_response

    def result(self, timeout: float | None = None) -> Any:
        try:
            self.set_result(self.get_response())
        except Exception as error:  # noqa: BLE001 - it is passed on
            self.set_exception(error)
        return super().result()


@pytest.fixture
def executor_class() -> type[_Executor]:
    """Return a class of its own that the plugin has acted on, twice."""
    module = ModuleType("multiproc_executor")
    module.MultiprocExecutor = type("MultiprocExecutor", (_Executor,), {})  # type: ignore[attr-defined]
    keep_answers_in_step(module)
    keep_answers_in_step(module)
    return module.MultiprocExecutor  # type: ignore[attr-defined,no-any-return]


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Leave what refers to itself alone, as happens until the collector comes by."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_next_call_gets_its_own_answers_after_one_that_a_worker_failed(
    executor_class: type[_Executor], failing: int
) -> None:
    queues = [_Queue("failure" if rank == failing else "old", f"new {rank}") for rank in range(3)]
    executor = executor_class(*queues)
    with pytest.raises(RuntimeError, match="Worker failed"):
        executor.collective_rpc("update_weights")
    assert executor.collective_rpc("check_health") == ["new 0", "new 1", "new 2"]
    assert executor.response_mqs == queues


def test_answers_that_several_workers_fail_are_all_read(executor_class: type[_Executor]) -> None:
    executor = executor_class(_Queue("failure", 1), _Queue("failure", 2))
    with pytest.raises(RuntimeError):
        executor.collective_rpc("update_weights")
    assert executor.collective_rpc("check_health") == [1, 2]


def test_call_that_was_never_sent_reads_nothing(executor_class: type[_Executor]) -> None:
    executor = executor_class(_Queue(1), _Queue(2), is_failed=True)
    with pytest.raises(RuntimeError, match=r"Executor failed\."):
        executor.collective_rpc("update_weights")
    executor.is_failed = False
    assert executor.collective_rpc("check_health") == [1, 2]


def test_call_that_does_not_block_is_read_by_its_future(executor_class: type[_Executor]) -> None:
    executor = executor_class(_Queue(1), _Queue(2))
    future = executor.collective_rpc("execute_model", non_block=True)
    assert future.result() == [1, 2]


def test_time_out_is_passed_on(executor_class: type[_Executor]) -> None:
    with pytest.raises(TimeoutError):
        executor_class(_Queue()).collective_rpc("check_health", timeout=0.1)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("is_failed", [False, True])
def test_failure_keeps_no_queue_alive(executor_class: type[_Executor], is_failed: bool) -> None:
    executor = executor_class(_Queue(1), _Queue("failure"), is_failed=is_failed)
    queues = [weakref.ref(queue) for queue in executor.response_mqs]
    with pytest.raises(RuntimeError) as caught:
        executor.collective_rpc("update_weights")
    executor.response_mqs = []
    assert [queue() for queue in queues] == [None, None]
    assert caught.value.__traceback__ is not None
