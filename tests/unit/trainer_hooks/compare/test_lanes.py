"""Lanes over a backend that only notes what it is asked: the order of calls is what keeps weights right on a GPU."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

import pytest
import torch

from trainer_hooks.compare.lanes import LANES, StreamLanes, stream_lanes

DEVICE = torch.device("cuda", 3)


class Backend:
    """Streams and events by the names of ``torch.cuda``, noted and not done."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.made = 0

    def Stream(self, device: torch.device) -> Stream:  # noqa: N802 - as the backends name it
        assert device == DEVICE
        self.made += 1
        return Stream(self, f"side {self.made}")

    def current_stream(self, device: torch.device) -> Stream:
        assert device == DEVICE
        return Stream(self, "trainer's")

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.calls.append(f"enter {stream.name}")
        yield
        self.calls.append(f"leave {stream.name}")

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        assert device == DEVICE
        return 100, 1000

    def memory_reserved(self, device: torch.device) -> int:
        assert device == DEVICE
        return 50

    def memory_allocated(self, device: torch.device) -> int:
        assert device == DEVICE
        return 20


class Stream:
    def __init__(self, backend: Backend, name: str) -> None:
        self.name = name
        self._calls = backend.calls

    def record_event(self) -> str:
        self._calls.append(f"record on {self.name}")
        return f"event of {self.name}"

    def wait_event(self, event: str) -> None:
        self._calls.append(f"{self.name} waits for {event}")

    def synchronize(self) -> None:
        self._calls.append(f"host waits for {self.name}")


@pytest.mark.parametrize("fails", [False, True])
def test_lane_starts_after_the_mark_and_is_left_when_its_work_is_done_also_by_an_error(fails: bool):
    backend = Backend()
    lanes = StreamLanes(DEVICE, backend)
    mark = lanes.mark()
    with contextlib.suppress(ZeroDivisionError), lanes.take() as lane, lane.follow(mark):
        backend.calls.append("work")
        if fails:
            raise ZeroDivisionError
    side = next(call.split(" ", 1)[1] for call in backend.calls if call.startswith("enter"))
    expected = [
        "record on trainer's",
        f"{side} waits for event of trainer's",
        f"enter {side}",
        "work",
        f"host waits for {side}",
        f"leave {side}",
    ]
    assert backend.calls[:5] == expected[:5]
    assert backend.calls[5:] == ([] if fails else expected[5:])  # this backend does not note leaving by an error
    with contextlib.ExitStack() as stack:  # and all lanes are back
        for _ in range(LANES):
            stack.enter_context(lanes.take())
    assert backend.made == LANES


def test_no_two_threads_have_one_lane():
    lanes = StreamLanes(DEVICE, Backend())
    has_asked, has_got = threading.Event(), threading.Event()

    def ask() -> None:
        has_asked.set()
        with lanes.take():
            has_got.set()

    thread = threading.Thread(target=ask)
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(lanes.take()) for _ in range(LANES)]
        assert len(set(map(id, taken))) == LANES
        thread.start()
        assert has_asked.wait(20)
        assert not has_got.is_set()
    assert has_got.wait(20)
    thread.join(20)


def test_room_is_what_is_free_and_what_the_allocator_has_to_spare():
    assert StreamLanes(DEVICE, Backend()).room() == 130


@pytest.mark.skipif(torch.accelerator.is_available(), reason="here memory can be pinned")
def test_host_memory_that_cannot_be_pinned_is_plain_and_said_once(caplog: pytest.LogCaptureFixture):
    lanes = StreamLanes(DEVICE, Backend())
    with caplog.at_level(logging.WARNING), lanes.take() as lane, lane.follow(lanes.mark()):
        for size in (3, 4):
            buffer = lane.host_buffer(size, torch.int16)
            lane.copy(buffer, torch.arange(size, dtype=torch.int16))
            assert buffer.tolist() == list(range(size))
    assert len(caplog.records) == 1
    assert "cannot pin host memory" in caplog.text


def test_only_devices_with_streams_have_lanes():
    for name in ("cpu", "meta", "mps"):
        assert stream_lanes(torch.device(name)) is None
