"""The baseline: a copy of its own that moves only by patches."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.checkpoints import TINY_SPECS, snapshot_of, tiny_tensors, write_checkpoint
from tests.support.reference import digest
from tests.support.tensors import apply_by_hand, bits_of, patch_of, random_patch
from trainer_hooks.baseline import Baseline
from vllm_delta_snapshot.checkpoint import Checkpoint

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


def test_digested_patch_has_the_digests_of_what_it_replaces_and_brings(base: Path):
    baseline = Baseline(Checkpoint(base))
    patch = patch_of(SPEC, {3: 1, 50: 2})
    old = baseline.bits(SPEC.name)[np.array([3, 50])].tolist()
    digested = baseline.digested(patch)
    assert digested.patch is patch
    assert (digested.old_digest, digested.new_digest) == (digest(SPEC, [3, 50], old), digest(SPEC, [3, 50], [1, 2]))


def test_digested_patch_leaves_the_baseline_alone(base: Path):
    baseline = Baseline(Checkpoint(base))
    before = baseline.bits(SPEC.name).tolist()
    baseline.digested(random_patch(SPEC, 10))
    assert baseline.bits(SPEC.name).tolist() == before
