"""Prepare: an update is proven against the live weights of all workers before anything is written."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.changes import as_difference, difference_of
from tests.support.tensors import apply_by_hand, bits_of, random_bits, random_patch, rng_of, to_torch
from tests.support.toys import Toy
from vllm_delta_snapshot.engine import agree
from vllm_delta_snapshot.engine.plan.load_plan import record_load_plan
from vllm_delta_snapshot.engine.ways import Choice
from vllm_delta_snapshot.engine.write import transaction
from vllm_delta_snapshot.engine.write.fitness import Fitness
from vllm_delta_snapshot.engine.write.lanes import write_lanes
from vllm_delta_snapshot.engine.write.transaction import PreparedUpdate, prepare
from vllm_delta_snapshot.engine.write.updates import Update
from vllm_delta_snapshot.errors import ApplyError, BaseMismatch
from vllm_delta_snapshot.format.digest import format_digest, patch_digest
from vllm_delta_snapshot.host.mapping import map_update
from vllm_delta_snapshot.types import Change, TensorDifference, TensorSpec

SPECS = {spec.name: spec for spec in (TensorSpec("a", (6, 4), "BF16"), TensorSpec("b", (6, 5), "BF16"))}


class Worker:
    """A worker that holds some rows of both tensors, side by side."""

    def __init__(self, rows: slice) -> None:
        def load(toy: Toy, name: str, tensor: torch.Tensor) -> None:
            columns = {"a": slice(0, 4), "b": slice(4, 9)}[name]
            toy.w.data[:, columns].copy_(tensor[rows])

        height = len(range(6)[rows])
        self.toy = Toy(load, w=(height, 9))
        self.old = {name: random_bits("BF16", spec.numel, name) for name, spec in SPECS.items()}
        self.toy.load_weights((name, to_torch(bits, SPECS[name])) for name, bits in self.old.items())
        plan = record_load_plan(self.toy, SPECS)
        self.fitness = Fitness(plan, SPECS, {name: Choice("scatter", "") for name in SPECS})

    def update(
        self, changes: list[Change], *, is_old_known: bool = True, moves: dict[str, int] | None = None
    ) -> Update:
        """Map an update for this worker, with what the trainer says of it."""
        digests: dict[str, tuple[int, int]] = {}
        for change in changes:
            spec, positions, old = change.spec, change.positions, self.old[change.spec.name]
            states = (old, apply_by_hand(old, change))
            before, after = (patch_digest(spec, positions, bits[positions]) for bits in states)
            digests[spec.name] = (before, after)
        has_differences = any(isinstance(change, TensorDifference) for change in changes)
        told = {name: after - before for name, (before, after) in digests.items()} | (moves or {})
        return Update(
            1,
            "",
            {change.spec.name: change.changed for change in changes},
            {name: format_digest(before) if is_old_known else None for name, (before, _) in digests.items()},
            {name: format_digest(move) for name, move in told.items()} if has_differences else {},
            map_update(changes, self.fitness.plan.places),
            lambda: changes,
        )


def changes_of(kind: str) -> list[Change]:
    """An update of most elements of both tensors."""
    made: list[Change] = []
    for number, spec in enumerate(SPECS.values()):
        patch = random_patch(spec, spec.numel - 3)
        old = random_bits("BF16", spec.numel, spec.name)
        difference = as_difference(patch, old)
        if kind == "mixed":
            mask = rng_of(spec.name).random(patch.changed) < 0.5
            difference = TensorDifference(spec, patch.positions, np.where(mask, patch.values, difference.values), mask)
        made.append(patch if kind == "patches" or (kind == "side by side" and number) else difference)
    return made


KINDS = ["patches", "differences", "mixed", "side by side"]
kinds = pytest.mark.parametrize("kind", KINDS)


class Group:
    """The workers of one engine, each on a thread of its own."""

    def __init__(self, *rows: slice) -> None:
        self.workers = [Worker(each) for each in rows]
        self._barrier = threading.Barrier(len(rows), timeout=20)
        self._values: list[Any] = [None] * len(rows)
        self._rank = threading.local()

    def gather(self, value: Any) -> list[Any]:
        """Stand for `gather_from_workers`."""
        self._values[self._rank.number] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def prepare(self, update_of: Callable[[Worker], Update]) -> list[PreparedUpdate | BaseException]:
        """Prepare an update on all workers; return what became of it on each."""
        results: list[PreparedUpdate | BaseException] = []

        def run(rank: int) -> PreparedUpdate | BaseException:
            self._rank.number = rank
            try:
                return prepare(self.workers[rank].fitness, update_of(self.workers[rank]))
            except BaseException as error:  # noqa: BLE001
                return error

        found: dict[int, PreparedUpdate | BaseException] = {}
        threads = [
            threading.Thread(target=lambda rank=rank: found.update({rank: run(rank)}))
            for rank in range(len(self.workers))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        results += [found[rank] for rank in range(len(self.workers))]
        return results


ENGINES = {
    "one": (slice(0, 6),),
    "slices": (slice(0, 2), slice(2, 6)),
    "replicas": (slice(0, 6), slice(0, 6)),
    "one without": (slice(0, 6), slice(6, 6)),
}


@pytest.fixture(params=ENGINES.values(), ids=ENGINES)
def group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Group:
    group = Group(*request.param)
    for module in (transaction, agree):
        monkeypatch.setattr(module, "gather_from_workers", group.gather)
    return group


@kinds
@pytest.mark.parametrize("is_old_known", [True, False], ids=["old digests known", "only moves"])
def test_update_against_the_published_weights_is_proven_and_leads_to_the_new_ones(
    kind: str, is_old_known: bool, group: Group
) -> None:
    changes = changes_of(kind)
    before = [worker.toy.bits() for worker in group.workers]
    results = group.prepare(lambda worker: worker.update(changes, is_old_known=is_old_known or kind == "patches"))
    assert [worker.toy.bits() for worker in group.workers] == before
    for worker, prepared in zip(group.workers, results, strict=True):
        assert isinstance(prepared, PreparedUpdate)
        assert prepared.proven == 2
        assert all(write_lanes(prepared.lanes))
        new = {change.spec.name: apply_by_hand(worker.old[change.spec.name], change) for change in changes}
        written = bits_of(worker.toy.w).tolist()
        worker.toy.load_weights((name, to_torch(bits, SPECS[name])) for name, bits in new.items())
        assert bits_of(worker.toy.w).tolist() == written


@kinds
@pytest.mark.parametrize("is_old_known", [True, False], ids=["old digests known", "only moves"])
def test_one_wrong_bit_anywhere_under_the_update_is_refused_by_all_workers(
    kind: str, is_old_known: bool, group: Group
) -> None:
    changes = changes_of(kind)
    [*touched] = {int(index) for lane in group.workers[0].update(changes).lanes for index in lane.index}
    for number, place in enumerate(sorted(touched)[:: max(1, len(touched) // 8)]):
        bit = (0, 15)[number % 2]
        flat = group.workers[0].fitness.plan.storages[0].flat
        wrong = torch.tensor(-(2**15) if bit == 15 else 1 << bit, dtype=torch.int16)
        flat[place] ^= wrong
        results = group.prepare(lambda worker: worker.update(changes, is_old_known=is_old_known or kind == "patches"))
        assert all(isinstance(result, BaseMismatch) for result in results)
        flat[place] ^= wrong


def test_drift_beside_the_update_is_none_of_its_business(group: Group) -> None:
    changes: list[Change] = [difference_of(SPECS["a"], {0: 1, 23: 2})]
    flat = group.workers[0].fitness.plan.storages[0].flat
    flat[1] ^= 1
    assert all(isinstance(r, PreparedUpdate) for r in group.prepare(lambda worker: worker.update(changes)))


def test_difference_that_leads_elsewhere_is_refused_by_all_workers(group: Group) -> None:
    changes = changes_of("differences")
    results = group.prepare(lambda worker: worker.update(changes, moves={"b": 5}))
    assert all(isinstance(result, BaseMismatch) and result.tensor == "b" for result in results)


def test_digest_that_moves_while_nothing_changes_is_refused_by_all_workers(group: Group) -> None:
    changes: list[Change] = [difference_of(SPECS["a"], {0: 1}), difference_of(SPECS["b"], {})]
    results = group.prepare(lambda worker: worker.update(changes, is_old_known=False, moves={"b": 5}))
    assert all(isinstance(result, BaseMismatch) and result.tensor == "b" for result in results)


@pytest.mark.parametrize("group", list(ENGINES.values())[1:], ids=list(ENGINES)[1:], indirect=True)
def test_workers_that_found_the_update_in_two_forms_all_refuse_it_and_can_ask_again(group: Group) -> None:
    forms = {id(group.workers[0]): changes_of("differences"), id(group.workers[1]): changes_of("patches")}
    results = group.prepare(lambda worker: worker.update(forms[id(worker)]))
    assert all(isinstance(result, ApplyError) for result in results)
    again = group.prepare(lambda worker: worker.update(changes_of("patches")))
    assert all(isinstance(result, PreparedUpdate) for result in again)
