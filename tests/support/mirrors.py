"""Steps of a mirror from version to version, and back, with the states they lead to worked out by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.support.runs import State
from tests.support.tensors import apply_by_hand, random_patch
from tests.support.wire import RUN_ID
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.format.digest import format_digest, patch_digest, state_digest
from vllm_delta_snapshot.stage.mirror import Mirror
from vllm_delta_snapshot.types import TensorPatch, TensorSpec


@dataclass(frozen=True)
class Step:
    """What `Mirror.advance` takes, and the states before and after."""

    before: State
    after: State
    patches: list[TensorPatch]
    version: int
    state_digest: str
    old_digests: dict[str, str]

    def take(self, mirror: Mirror) -> None:
        """Advance a mirror."""
        mirror.advance(self.patches, version=self.version, state_digest=self.state_digest, old_digests=self.old_digests)


def state_at(folder: Path) -> State:
    """Return a copy of the bits of a checkpoint."""
    return {spec.name: np.array(bits) for spec, bits in Checkpoint(folder).items()}


def digest_of(specs: Mapping[str, TensorSpec], state: State) -> str:
    """Return the digest of a state, from all its bits."""
    return format_digest(state_digest((specs[name], bits) for name, bits in state.items()))


def step_from(specs: Mapping[str, TensorSpec], before: State, patches: Iterable[TensorPatch], version: int) -> Step:
    """Return the step that these patches make."""
    patches = list(patches)
    after = before | {p.spec.name: apply_by_hand(before[p.spec.name], p) for p in patches}
    old = {
        p.spec.name: format_digest(patch_digest(p.spec, p.positions, before[p.spec.name][p.positions])) for p in patches
    }
    return Step(before, after, patches, version, digest_of(specs, after), old)


def inverse_of(specs: Mapping[str, TensorSpec], step: Step, version: int) -> Step:
    """Return the step back."""
    patches = [TensorPatch(p.spec, p.positions, step.before[p.spec.name][p.positions]) for p in step.patches]
    return step_from(specs, step.after, patches, version)


def random_step(specs: Mapping[str, TensorSpec], before: State, version: int, *seed: object) -> Step:
    """Return a step that changes about a third of every tensor, to any bit patterns."""
    patches = [random_patch(spec, -(-spec.numel // 3), version, *seed) for spec in specs.values()]
    return step_from(specs, before, patches, version)


def mirror_of(base: Path, folder: Path, version: int = 0) -> Mirror:
    """Make a mirror of a checkpoint."""
    checkpoint = Checkpoint(base)
    digest = checkpoint.state_digest
    return Mirror.create(folder, checkpoint, run_id=RUN_ID, version=version, state_digest=digest)


def reopened(folder: Path) -> Mirror:
    """Open a mirror that must be there."""
    mirror = Mirror.open(folder)
    assert mirror is not None
    return mirror
