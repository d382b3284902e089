"""Resolve: differences become values against the right old ones, and are refused against any others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.changes import difference_of, differences_for, metadata_of
from tests.support.strategies import bits_for, specs
from tests.support.tensors import apply_by_hand, patch_of, random_bits
from vllm_delta_snapshot.changes.resolve import resolve, resolve_all
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.errors import BaseMismatch
from vllm_delta_snapshot.format.digest import add_digests, patch_digest
from vllm_delta_snapshot.types import TensorDifference, TensorPatch, TensorSpec

SPEC = TensorSpec("w", (40,), "BF16")


def proof(change: TensorDifference, bits: Bits, *, is_old_known: bool) -> dict[str, Any]:
    """What the writer says of the old and new values."""
    new = apply_by_hand(bits, change)
    old, new = (patch_digest(change.spec, change.positions, values[change.positions]) for values in (bits, new))
    return {"old_digest": old if is_old_known else None, "move": add_digests(new, -old)}


known = pytest.mark.parametrize("is_old_known", [True, False], ids=["old digest known", "only the move"])


@known
@given(st.data())
def test_resolved_difference_equals_the_difference_applied_by_hand(is_old_known: bool, data: st.DataObject) -> None:
    spec = data.draw(specs)
    bits, change = data.draw(bits_for(spec, spec.numel)), data.draw(differences_for(spec))
    expected = apply_by_hand(bits, change)
    patch = resolve(change, bits[change.positions], **proof(change, bits, is_old_known=is_old_known))
    assert (patch.spec, patch.positions.tolist()) == (spec, change.positions.tolist())
    assert patch.values.dtype == spec.element.bits
    assert apply_by_hand(bits, patch).tolist() == expected.tolist()


@known
@settings(max_examples=20)
@given(st.data())
def test_old_values_with_one_wrong_bit_are_refused(is_old_known: bool, data: st.DataObject) -> None:
    spec = data.draw(specs.filter(lambda spec: spec.numel > 0))
    bits = data.draw(bits_for(spec, spec.numel))
    change = data.draw(differences_for(spec).filter(lambda change: change.changed > 0))
    at = data.draw(st.integers(0, change.changed - 1))
    # An element that does not move says nothing of its old value by moving; merging drops it, publishing makes none.
    change.values[at] |= 1
    told = proof(change, bits, is_old_known=is_old_known)
    wrong = bits[change.positions].copy()
    wrong[at] ^= wrong.dtype.type(1 << data.draw(st.integers(0, 8 * spec.element.itemsize - 1)))
    with pytest.raises(BaseMismatch) as caught:
        resolve(change, wrong, **told)
    assert caught.value.tensor == spec.name
    assert caught.value.hint


@known
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("bit", [0, 15])
def test_difference_with_one_wrong_bit_is_refused(is_old_known: bool, at: int, bit: int) -> None:
    bits = random_bits("BF16", 40)
    change = difference_of(SPEC, {3: 1, 7: 0x8000, 39: -3}, absolute=(7,))
    told = proof(change, bits, is_old_known=is_old_known)
    change.values[at] ^= np.uint16(1 << bit)
    with pytest.raises(BaseMismatch, match="do not lead") as caught:
        resolve(change, bits[change.positions], **told)
    assert caught.value.tensor == "w"


@known
def test_mask_that_is_another_is_refused(is_old_known: bool) -> None:
    bits = random_bits("BF16", 40)
    change = difference_of(SPEC, {3: 1, 7: 2}, absolute=(7,))
    told = proof(change, bits, is_old_known=is_old_known)
    with pytest.raises(BaseMismatch, match="do not lead"):
        resolve(difference_of(SPEC, {3: 1, 7: 2}), bits[change.positions], **told)


def test_wrong_old_values_are_told_from_a_wrong_difference_where_their_digest_is_known() -> None:
    bits = random_bits("BF16", 40)
    change = difference_of(SPEC, {3: 1})
    with pytest.raises(BaseMismatch, match="not the ones this delta was made against") as caught:
        resolve(change, ~bits[change.positions], **proof(change, bits, is_old_known=True))
    assert caught.value.expected == f"digest {patch_digest(SPEC, change.positions, bits[[3]]):016x}"


def test_digests_may_be_given_outside_of_64_bits() -> None:
    bits, change = random_bits("BF16", 40), difference_of(SPEC, {3: 1})
    told = proof(change, bits, is_old_known=True)
    patch = resolve(change, bits[[3]], old_digest=told["old_digest"] - 2**64, move=told["move"] - 2**64)
    assert patch.values.tolist() == [(int(bits[3]) + 1) % 2**16]


def test_empty_difference_resolves_to_an_empty_patch_unless_it_claims_a_move() -> None:
    none, empty = np.empty(0, np.uint16), difference_of(SPEC, {})
    assert resolve(empty, none, old_digest=None, move=0).changed == 0
    with pytest.raises(BaseMismatch, match="do not lead"):
        resolve(empty, none, old_digest=None, move=1)


def test_resolving_leaves_old_values_and_difference_alone() -> None:
    bits = random_bits("BF16", 40)
    change = difference_of(SPEC, {3: 1, 7: 2}, absolute=(7,))
    old, before = bits[change.positions], (change.values.tolist(), bits[change.positions].tolist())
    resolve(change, old, **proof(change, bits, is_old_known=True))
    assert (change.values.tolist(), old.tolist()) == before


def test_all_changes_of_a_delta_are_resolved_in_order_and_patches_pass() -> None:
    other = TensorSpec("v", (4,), "F32")
    state = {"w": random_bits("BF16", 40), "v": random_bits("F32", 4)}
    patch, difference = patch_of(other, {1: 7}), difference_of(SPEC, {2: 5})
    metadata = metadata_of(1, [patch, difference], state)
    reads: list[str] = []
    found = list(resolve_all(metadata, [patch, difference], lambda name: reads.append(name) or state[name]))
    assert found[0] is patch
    assert isinstance(found[1], TensorPatch)
    assert found[1].values.tolist() == [(int(state["w"][2]) + 5) % 2**16]
    assert reads == ["w"]


def test_delta_against_another_state_is_refused_and_names_the_tensor() -> None:
    state = {"w": random_bits("BF16", 40)}
    difference = difference_of(SPEC, {2: 5})
    metadata = metadata_of(1, [difference], state)
    with pytest.raises(BaseMismatch) as caught:
        list(resolve_all(metadata, [difference], lambda name: state[name] + np.uint16(1)))
    assert caught.value.tensor == "w"


def test_delta_with_fewer_changes_than_tensors_is_refused() -> None:
    difference = difference_of(SPEC, {2: 5})
    metadata = metadata_of(1, [difference], {"w": random_bits("BF16", 40)})
    with pytest.raises(ValueError, match="shorter"):
        list(resolve_all(metadata, [], lambda name: pytest.fail(name)))
