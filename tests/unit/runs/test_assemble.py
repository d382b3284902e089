"""Assembled updates: forward, back and absolute, they equal the versions one by one, and know how digests move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.changes import as_difference, difference_of, metadata_of, published_for
from tests.support.strategies import bits_for, specs
from tests.support.tensors import apply_by_hand, patch_of, random_bits
from vllm_delta_snapshot.changes.resolve import resolve
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.errors import BaseMismatch
from vllm_delta_snapshot.format.digest import add_digests, patch_digest
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.runs.assemble import assemble_absolute, assemble_back, assemble_forward
from vllm_delta_snapshot.runs.delta_folder import DigestedChange
from vllm_delta_snapshot.types import Change, TensorDifference, TensorPatch, TensorSpec

State = dict[str, Bits]


@dataclass
class Chain:
    """Versions made by hand: the state at each, the changes and metadata of each step."""

    states: list[State]
    steps: list[list[Change]]
    metadata: list[DeltaMetadata]

    def add(self, changes: Sequence[Change]) -> None:
        """Add a version."""
        before = self.states[-1]
        self.metadata.append(metadata_of(len(self.steps) + 1, changes, before))
        self.steps.append(list(changes))
        self.states.append(before | {c.spec.name: apply_by_hand(before[c.spec.name], c) for c in changes})

    def bits_at(self, version: int, reads: list[str]) -> object:
        """Return what reads tensors at a version, and notes which."""

        def bits(name: str) -> Bits:
            reads.append(name)
            found = self.states[version][name].copy()
            found.flags.writeable = False  # as the mapped file of a checkpoint
            return found

        return bits

    def update(self, base: int, version: int, start: int = 0) -> list[DigestedChange]:
        """Assemble the update between two versions, where only the state at `start` is at hand."""
        if base < version:
            return list(assemble_forward(self.steps[base:version], self.metadata[base:version]))
        reads: list[str] = []
        found = list(
            assemble_back(
                lambda: self.steps[start:version],
                self.steps[version:base],
                self.metadata[version:base],
                self.bits_at(start, reads),
            )
        )
        assert set(reads) == {item.change.spec.name for item in found if isinstance(item.change, TensorPatch)}
        return found

    def absolute(self, base: int, version: int, start: int = 0) -> list[DigestedChange]:
        """Assemble the update of absolute values."""
        update = self.update(base, version, min(start, version))
        return list(assemble_absolute(iter(update), lambda: self.steps[start:version], self.bits_at(start, [])))


def pairs(versions: int) -> Iterator[tuple[int, int]]:
    return permutations(range(versions + 1), 2)


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    """Draw two tensors and three to five versions of them."""
    drawn = draw(st.lists(specs, min_size=1, max_size=2))
    table = [TensorSpec(f"{place}.{spec.name}", spec.shape, spec.dtype) for place, spec in enumerate(drawn)]
    chain = Chain([{spec.name: draw(bits_for(spec, spec.numel)) for spec in table}], [], [])
    for _ in range(draw(st.integers(3, 5))):
        old = chain.states[-1]
        chain.add([draw(published_for(spec, old[spec.name])) for spec in table if draw(st.booleans())])
    return chain


def check(update: Sequence[DigestedChange], before: State, after: State) -> None:
    """Resolve against the true old state and compare; and compute the digests from the states."""
    state = dict(before)
    for item in update:
        change = item.change
        old = before[change.spec.name][change.positions]
        old_digest = patch_digest(change.spec, change.positions, old)
        assert item.old_digest in (None, old_digest)
        move = add_digests(item.new_digest, -(item.old_digest or 0))
        if isinstance(change, TensorDifference):
            patch = resolve(change, old, old_digest=item.old_digest, move=move)
        else:
            assert item.old_digest is not None
            patch = change
        new = after[change.spec.name][change.positions]
        assert move == add_digests(patch_digest(change.spec, change.positions, new), -old_digest)
        state[change.spec.name] = apply_by_hand(state[change.spec.name], patch)
    assert {name: bits.tolist() for name, bits in state.items()} == {n: b.tolist() for n, b in after.items()}


@settings(max_examples=25)
@given(chains())
def test_update_between_any_two_versions_equals_the_versions_one_by_one(chain: Chain) -> None:
    for base, version in pairs(len(chain.steps)):
        check(chain.update(base, version), chain.states[base], chain.states[version])


@settings(max_examples=25)
@given(chains(), st.data())
def test_update_back_is_the_same_wherever_the_start_is(chain: Chain, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(chain.steps) - 1))
    for version in range(start, len(chain.steps)):
        for base in range(version + 1, len(chain.steps) + 1):
            check(chain.update(base, version, start), chain.states[base], chain.states[version])


@settings(max_examples=25)
@given(chains(), st.data())
def test_absolute_update_has_no_differences_and_leads_there_too(chain: Chain, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(chain.steps)))
    for base, version in pairs(len(chain.steps)):
        if version < start:
            continue
        update = chain.absolute(base, version, start)
        assert all(isinstance(item.change, TensorPatch) for item in update)
        check(update, chain.states[base], chain.states[version])


@settings(max_examples=30)
@given(chains())
def test_absolute_update_is_made_from_the_state_that_it_leads_to(chain: Chain) -> None:
    for base, version in pairs(len(chain.steps)):
        found = assemble_absolute(iter(chain.update(base, version)), list, chain.bits_at(version, []))
        check(list(found), chain.states[base], chain.states[version])


@settings(max_examples=30)
@given(chains())
def test_update_there_and_back_is_nothing(chain: Chain) -> None:
    last = len(chain.steps)
    there, back = chain.update(1, last), chain.update(last, 1)
    assert [i.change.spec for i in there] == [i.change.spec for i in back]
    for one, other in zip(there, back, strict=True):
        moves = [add_digests(item.new_digest, -(item.old_digest or 0)) for item in (one, other)]
        assert add_digests(*moves) == 0
        assert one.change.positions.tolist() == other.change.positions.tolist()


SPEC = TensorSpec("w", (40,), "BF16")


def chain_of(*changes: Change) -> Chain:
    """A chain of one tensor."""
    chain = Chain([{"w": random_bits("BF16", 40)}], [], [])
    for change in changes:
        chain.add([change])
    return chain


def test_differences_are_turned_around_without_the_weights() -> None:
    chain = chain_of(difference_of(SPEC, {1: 1, 2: -1}), difference_of(SPEC, {2: -5, 3: 7}))
    [item] = assemble_back(lambda: pytest.fail("asked"), chain.steps, chain.metadata, lambda name: pytest.fail(name))
    assert isinstance(item.change, TensorDifference)
    assert dict(zip(item.change.positions.tolist(), item.change.values.view(np.int16).tolist(), strict=True)) == {
        1: -1, 2: 6, 3: -7
    }  # fmt: skip


def test_patches_alone_stay_patches_with_the_digest_of_what_they_replace() -> None:
    chain = chain_of(patch_of(SPEC, {1: 1, 2: 2}), patch_of(SPEC, {2: 3}))
    [item] = chain.update(0, 2)
    old = chain.states[0]["w"]
    assert item.old_digest == patch_digest(SPEC, np.array([1, 2]), old[[1, 2]])


@pytest.mark.parametrize(("base", "version"), [(0, 2), (2, 0)])
def test_changes_that_add_up_to_nothing_are_left_out(base: int, version: int) -> None:
    chain = chain_of(difference_of(SPEC, {1: 1, 2: -1}), difference_of(SPEC, {1: -1, 2: 1}))
    assert chain.update(base, version) == []


@pytest.mark.parametrize(("base", "version"), [(0, 2), (2, 0)])
def test_digest_that_moves_while_nothing_changes_is_passed_on_to_be_found(base: int, version: int) -> None:
    chain = chain_of(difference_of(SPEC, {1: 1}), difference_of(SPEC, {1: -1}))
    entry = chain.metadata[1].tensors[0]
    forged = entry.model_copy(update={"new_digest": "0" * 16})
    chain.metadata[1] = chain.metadata[1].model_copy(update={"tensors": (forged,)})
    [item] = chain.update(base, version)
    assert (item.change.changed, item.old_digest) == (0, None)
    with pytest.raises(BaseMismatch):
        check([item], chain.states[base], chain.states[version])


def test_earlier_versions_are_asked_for_once_and_only_if_values_are_looked_up() -> None:
    first, second = difference_of(SPEC, {1: 1}), patch_of(SPEC, {1: 9})
    other = TensorSpec("v", (4,), "F32")
    chain = Chain([{"w": random_bits("BF16", 40), "v": random_bits("F32", 4)}], [], [])
    chain.add([first, difference_of(other, {0: 1})])
    chain.add([second, patch_of(other, {0: 5, 1: 6})])
    asked: list[int] = []

    def before() -> list[list[Change]]:
        asked.append(1)
        return chain.steps[:1]

    back = assemble_back(before, chain.steps[1:], chain.metadata[1:], chain.bits_at(0, []))
    check(list(back), chain.states[2], chain.states[1])
    assert asked == [1]


def test_absolute_update_keeps_what_is_absolute() -> None:
    chain = chain_of(patch_of(SPEC, {1: 1, 2: 2}))
    update = chain.update(0, 1)
    assert list(assemble_absolute(iter(update), lambda: pytest.fail("asked"), lambda name: pytest.fail(name))) == update


@pytest.mark.parametrize("at", [0, 17, 39])
def test_absolute_values_come_from_wherever_they_were_set_last(at: int) -> None:
    chain = chain_of(patch_of(SPEC, {at: 7}), difference_of(SPEC, {at: 2}), difference_of(SPEC, {at: 3, 20: 1}))
    [item] = chain.absolute(2, 3)
    assert isinstance(item.change, TensorPatch)
    assert dict(zip(item.change.positions.tolist(), item.change.values.tolist(), strict=True))[at] == 12


@pytest.mark.parametrize("bit", [0, 15])
@pytest.mark.parametrize(("base", "version"), [(0, 1), (0, 3), (3, 0), (2, 1)])
def test_absolute_update_from_a_start_with_one_wrong_bit_is_refused(base: int, version: int, bit: int) -> None:
    chain = chain_of(*(difference_of(SPEC, {17: 1, number: 2}) for number in range(3)))
    update = chain.update(base, version)
    for start in (0, version):
        bits = chain.states[start]["w"].copy()
        bits[17] ^= np.uint16(1 << bit)
        made = assemble_absolute(iter(update), lambda start=start: chain.steps[start:version], lambda _, b=bits: b)
        with pytest.raises(BaseMismatch) as caught:
            list(made)
        assert caught.value.tensor == "w"


@pytest.mark.parametrize("steps", [[], [[]], [[], []]])
def test_update_of_no_changes_is_empty(steps: list[list[Change]]) -> None:
    metadata = [metadata_of(n + 1, [], {}) for n in range(len(steps))]

    def never(*names: str) -> object:
        return pytest.fail("asked")

    assert list(assemble_forward(steps, metadata)) == []
    assert list(assemble_back(never, steps, metadata, never)) == []
    assert list(assemble_back(lambda: steps, [], [], never)) == []
    assert list(assemble_absolute(iter([]), never, never)) == []


def test_differences_of_two_kinds_of_versions_resolve_to_the_same() -> None:
    old = random_bits("BF16", 40)
    patch = patch_of(SPEC, {3: 1, 39: 0x8000})
    by_patch, by_difference = (chain_of(change) for change in (patch, as_difference(patch, old)))
    assert by_patch.states[1]["w"].tolist() == by_difference.states[1]["w"].tolist()
    assert [m.tensors[0].moves_digest for m in by_patch.metadata] == [
        m.tensors[0].moves_digest for m in by_difference.metadata
    ]
