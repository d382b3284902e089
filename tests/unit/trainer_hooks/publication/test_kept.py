"""What a publication keeps until it is committed: as it is, or encoded beyond a budget; never anything else."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.changes import published_for
from tests.support.strategies import bits_for, specs
from tests.support.tensors import TORCH_CODES, apply_by_hand, random_bits
from trainer_hooks.publication.kept import KeptChanges
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.format.blocks import EncodedBlock, Placed, encode_block, group_blocks
from vllm_delta_snapshot.format.choose import POLICIES, choose
from vllm_delta_snapshot.types import Change, TensorDifference, TensorSpec

Item = tuple[TensorSpec, Bits, Bits]


def blocks_of(policy: str, items: list[Item]) -> list[EncodedBlock]:
    """Encode how tensors differ, as a publication does."""
    placed = []
    for place, (spec, old, new) in enumerate(items):
        positions = np.flatnonzero(old != new).astype(np.int32)
        chosen = choose(policy, spec, positions, old[positions], new[positions])
        placed.append(Placed(place, chosen.change, chosen.encoding))
    return [encoded for block in group_blocks(placed) for encoded in encode_block(block)]


def items_of(share: float) -> list[Item]:
    """Tensors of every type, of which a share changes: one half by one unit, the other to anything."""
    items = []
    for code in TORCH_CODES:
        for name in ("a", "b"):
            spec = TensorSpec(f"{name}.{code}", (300,), code)
            old, other = random_bits(code, 300, name), random_bits(code, 300, name, "new")
            new = old ^ old.dtype.type(1) if name == "a" else other
            items.append((spec, old, np.where(np.arange(300) < 300 * share, new, old)))
    return items


def check(kept: KeptChanges, items: list[Item]) -> None:
    """Check that what was kept leads from the old bits to the new, and that there is one change a tensor."""
    state = {spec.name: old for spec, old, _ in items}
    changes = list(kept.changes())
    assert len({change.spec.name for change in changes}) == len(changes)
    for change in changes:
        state[change.spec.name] = apply_by_hand(state[change.spec.name], change)
    assert {n: b.tolist() for n, b in state.items()} == {spec.name: new.tolist() for spec, _, new in items}


def kept_of(blocks: list[EncodedBlock], budget: int) -> KeptChanges:
    kept = KeptChanges(budget)
    for block in blocks:
        kept.add(block)
    return kept


@pytest.mark.parametrize("policy", POLICIES)
def test_kept_changes_lead_to_the_new_weights_within_and_beyond_the_budget(policy: str) -> None:
    for share in (0.1, 1.0):
        items = items_of(share)
        for budget in (0, 1, 700, 5_000, 1 << 20):
            check(kept_of(blocks_of(policy, items), budget), items)


@pytest.mark.parametrize("budget", [0, 64, 1 << 20])
@given(st.data())
def test_any_changes_are_kept(budget: int, data: st.DataObject) -> None:
    items: list[Item] = []
    for place in range(data.draw(st.integers(0, 3))):
        drawn = data.draw(specs)
        spec = TensorSpec(f"{place}.{drawn.name}", drawn.shape, drawn.dtype)
        old = data.draw(bits_for(spec, spec.numel))
        items.append((spec, old, apply_by_hand(old, data.draw(published_for(spec, old)))))
    policy = data.draw(st.sampled_from(["auto", "absolute", "difference"]))
    check(kept_of(blocks_of(policy, items), budget), items)


def test_changes_within_the_budget_are_kept_as_they_are() -> None:
    blocks = blocks_of("auto", items_of(0.1))
    expected = [member.change for block in blocks for member in block.members]
    found = list(kept_of(blocks, 1 << 20).changes())
    assert all(one is other for one, other in zip(found, expected, strict=True))


def test_changes_may_be_asked_for_again() -> None:
    items = items_of(0.1)
    kept = kept_of(blocks_of("auto", items), 1_000)
    check(kept, items)
    check(kept, items)


def test_changes_beyond_the_budget_are_not_held_decoded() -> None:
    blocks = blocks_of("difference", items_of(0.5))
    kept = kept_of(blocks, 0)
    arrays = [weakref.ref(member.change.positions) for block in blocks for member in block.members]
    del blocks
    gc.collect()
    assert [array for array in arrays if array() is not None] == []
    assert all(isinstance(change, TensorDifference) for change in kept.changes())


def test_block_that_does_not_fit_leaves_its_room_to_smaller_ones() -> None:
    zeros, one = np.zeros(900, "<u2"), np.eye(1, 900, 5, dtype="<u2")[0]
    [large] = blocks_of("packed", [(TensorSpec("l", (900,), "BF16"), zeros, zeros + np.uint16(1))])
    [small] = blocks_of("packed", [(TensorSpec("s", (900,), "BF16"), zeros, one)])
    kept = kept_of([large, small], 100)
    changes: list[Change] = list(kept.changes())
    assert changes[0] is small.members[0].change
    assert [change.spec.name for change in changes] == ["s", "l"]
