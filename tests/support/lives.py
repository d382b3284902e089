"""Two lives of one folder: an old trainer, and a run that is begun anew where the old one's was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tests.support.faults import FaultyStore
from tests.support.runs import State, TinyTrainer, assert_same_state
from tests.support.tensors import apply_by_hand
from trainer_hooks import DeltaPublisher, ShardedPublisher
from vllm_delta_snapshot.audit.verify_run import verify_run
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.errors import StoreUnavailable
from vllm_delta_snapshot.runs.replay import opened_version
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store import Store
from vllm_delta_snapshot.store.base import HasFolders

KINDS: dict[str, tuple[Any, str]] = {
    "DeltaPublisher": (DeltaPublisher, "trainer_hooks.publisher.open_store"),
    "ShardedPublisher": (ShardedPublisher, "trainer_hooks.sharded_publisher.open_store"),
}


class MortalStore(FaultyStore):
    """A store before whose operation number `at` something happens, and whose user is dead from number `dies` on.

    Counting begins with `arm`.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.happens: Callable[[], object] = lambda: None
        self._from = 0
        self._moment: int | None = None
        self._dies: int | None = None

    def arm(self, at: int | None, dies: int | None, happens: Callable[[], object]) -> None:
        """Begin to count."""
        self._from, self._moment, self._dies, self.happens = len(self.log), at, dies, happens

    @property
    def made(self) -> list[str]:
        """What was asked for since then."""
        return self.log[self._from :]

    def remove_empty(self, folder: str) -> None:
        """See `HasFolders`."""
        if isinstance(self.inner, HasFolders):
            self.inner.remove_empty(folder)

    def _do(self, verb: str, action: Callable[[], Any], torn: Callable[[], None] | None = None) -> Any:
        number = len(self.log) - self._from
        if self._moment is not None and number == self._moment:
            self._moment = None
            self.happens()
        if self._dies is not None and number >= self._dies:
            self.log.append(verb)
            raise StoreUnavailable("dead")
        return super()._do(verb, action, torn)


def opened(kind: str, source: object, store: Store, base: Path, **options: Any) -> Any:
    """Open a publisher on a store."""
    publisher, opener = KINDS[kind]
    with mock.patch(opener, return_value=store):
        options = {"asynchronous": False, "threads": 1} | options
        return publisher(source, sync_dir=store.uri, base=base, **options)


class Life:
    """A trainer's life in a store: its steps, and what they were."""

    def __init__(self, store: Store, base: Path, *, seed: int, kind: str = "DeltaPublisher") -> None:
        self.store, self.base, self.kind = store, base, kind
        self.trainer, self.steps = TinyTrainer(), 100 * seed
        self.history: list[State] = [self.trainer.state()]
        self.publisher = opened(kind, self.trainer, store, base)

    def publish(self, versions: int = 1) -> None:
        """Make steps, and a version of each."""
        for _ in range(versions):
            self.steps += 1
            self.trainer.step(self.steps)
            assert self.publisher.publish().wait().version == len(self.history)
            self.history.append(self.trainer.state())

    def restart(self) -> None:
        """Begin a new publisher, as a trainer that was started again."""
        self.publisher = opened(self.kind, self.trainer, self.store, self.base)

    def check(self) -> None:
        """Check that what lies in the store is this life, whole and exact, and nothing of another."""
        folder = RunFolder(self.store)
        assert folder.read_run().run_id == self.publisher.run_id
        assert folder.versions() == list(range(1, len(self.history)))
        assert verify_run(folder).problems == []
        checkpoint = Checkpoint(self.base)
        state = {spec.name: np.array(bits) for spec, bits in checkpoint.items()}
        for version in folder.versions():
            with opened_version(folder, folder.read_version(version), checkpoint.specs) as (_, changes):
                for change in changes:
                    state[change.spec.name] = apply_by_hand(state[change.spec.name], change)
            assert_same_state(state, self.history[version])


def wipe(store: Store, folder: str = "") -> None:
    """Delete all that lies in a folder of a store, in the order of names."""
    for name in store.list(folder):
        key = f"{folder}/{name}".lstrip("/")
        if "." in name:
            store.delete(key)
        else:
            wipe(store, key)
    if isinstance(store, HasFolders) and folder:
        store.remove_empty(folder)
