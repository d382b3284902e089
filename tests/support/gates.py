"""A store that can be stopped: writes wait at a gate until they are let through."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tests.support.faults import FaultyStore, When
from vllm_delta_snapshot.store import Store

PATIENCE_S = 120.0


class GatedStore(FaultyStore):
    """Passes everything on to a store; `put` and `create` wait while the gate is shut.

    Attributes:
        is_reached: set when a write has come to the shut gate.
    """

    def __init__(self, inner: Store, at: int | None = None, **faults: Any) -> None:
        super().__init__(inner, at, **faults)
        self.is_reached = threading.Event()
        self._is_open = threading.Event()
        self._is_open.set()
        self._armed: str | None = None

    def shut(self) -> None:
        """Stop every write from now on."""
        self.is_reached.clear()
        self._is_open.clear()

    def open(self) -> None:
        """Let writes through."""
        self._is_open.set()

    def fail(self, verb: str, when: When = When.BEFORE, *, down: bool = False) -> None:
        """Have the next operation of a kind fail, and with `down` every one after it."""
        self._armed, self._when, self._down = verb, when, down

    def heal(self) -> None:
        """Fail no more."""
        super().heal()
        self._armed = None

    def _do(self, verb: str, action: Callable[[], Any], torn: Callable[[], None] | None = None) -> Any:
        if verb in ("put", "create") and not self._is_open.is_set():
            self.is_reached.set()
            assert self._is_open.wait(PATIENCE_S), "the gate was never opened"
        if verb == self._armed:
            self._at, self._armed = len(self.log), None
        return super()._do(verb, action, torn)
