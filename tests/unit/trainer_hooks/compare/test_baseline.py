"""The baseline: a copy of its own that moves only by committed changes."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.changes import changes_for, difference_of
from tests.support.checkpoints import TINY_SPECS, snapshot_of, tiny_tensors, write_checkpoint
from tests.support.tensors import apply_by_hand, bits_of, random_bits, random_patch, to_torch
from trainer_hooks.compare.baseline import Baseline
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.types import TensorSpec

SPEC = TINY_SPECS[0]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "base", tiny_tensors())


def test_baseline_starts_as_the_base(base: Path):
    baseline = Baseline(Checkpoint(base))
    assert {s.name: b.tolist() for s, b in baseline.items()} == {
        n: bits_of(t).tolist() for n, t in tiny_tensors().items()
    }


def test_baseline_advanced_has_the_patch_applied(base: Path):
    baseline, patch = Baseline(Checkpoint(base)), random_patch(SPEC, 10)
    expected = apply_by_hand(baseline.bits(SPEC.name), patch)
    baseline.advance([patch])
    assert baseline.bits(SPEC.name).tolist() == expected.tolist()


def test_baseline_advanced_does_not_touch_the_base(base: Path):
    before, baseline = snapshot_of(base), Baseline(Checkpoint(base))
    baseline.advance([random_patch(SPEC, 10)])
    assert snapshot_of(base) == before


@given(st.data())
def test_baseline_advanced_by_any_changes_has_them_applied_in_turn(tmp_path_factory, data: st.DataObject):
    spec = TensorSpec("w", (30,), data.draw(st.sampled_from(["F8_E4M3", "BF16", "F32", "I64"])))
    bits = random_bits(spec.dtype, spec.numel)
    base = write_checkpoint(tmp_path_factory.mktemp("base"), {"w": to_torch(bits, spec)})
    changes = data.draw(st.lists(changes_for(spec), max_size=4))
    baseline = Baseline(Checkpoint(base))
    baseline.advance(changes)
    for change in changes:
        bits = apply_by_hand(bits, change)
    assert baseline.bits("w").tolist() == bits.tolist()
    assert baseline.bits("w").dtype == spec.element.bits


def test_baseline_advanced_leaves_changes_alone(base: Path):
    baseline = Baseline(Checkpoint(base))
    difference = difference_of(SPEC, {3: 1, 50: -1}, absolute=(50,))
    baseline.advance([difference])
    baseline.advance([difference])
    assert difference.values.tolist() == [1, 0xFFFF]


def test_baseline_has_what_a_trainer_may_write_to_copied(base: Path):
    baseline = Baseline(Checkpoint(base))
    assert all(bits.flags.owndata and bits.flags.writeable for _, bits in baseline.items())
