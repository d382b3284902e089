"""Steps of a mirror from version to version, and back, with the states they lead to worked out by hand.

Imported without torch: what forks hundreds of times pays for every page that torch brings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.support.wire import RUN_ID
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.format.digest import format_digest, patch_digest, state_digest
from vllm_delta_snapshot.host.mirror import Mirror
from vllm_delta_snapshot.types import TensorPatch, TensorSpec

State = dict[str, Bits]
"""The bits of every tensor at one version."""


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
    after = {name: bits.copy() for name, bits in before.items()}
    for patch in patches:
        for position, value in zip(patch.positions.tolist(), patch.values.tolist(), strict=True):
            after[patch.spec.name][position] = value
    old = {
        p.spec.name: format_digest(patch_digest(p.spec, p.positions, before[p.spec.name][p.positions])) for p in patches
    }
    return Step(before, after, patches, version, digest_of(specs, after), old)


def inverse_of(specs: Mapping[str, TensorSpec], step: Step, version: int) -> Step:
    """Return the step back."""
    patches = [TensorPatch(p.spec, p.positions, step.before[p.spec.name][p.positions]) for p in step.patches]
    return step_from(specs, step.after, patches, version)


def mirror_of(base: Path, folder: Path, version: int = 0) -> Mirror:
    """Make a mirror of a checkpoint."""
    checkpoint = Checkpoint(base)
    digest = checkpoint.state_digest
    return Mirror.create(folder, checkpoint, run_id=RUN_ID, version=version, state_digest=digest)


def flip_weights(folder: Path, *names: str) -> None:
    """Flip the lowest bit of every byte of some tensors of a checkpoint; of all, if none is named."""
    for file in Checkpoint(folder).files:
        data = np.memmap(file.path, np.uint8, "r+")
        for name, spec in file.specs.items():
            if not names or name in names:
                data[file.offset(name) : file.offset(name) + spec.num_bytes] ^= 1
        data.flush()


def reopened(folder: Path) -> Mirror:
    """Open a mirror that must be there."""
    mirror = Mirror.open(folder)
    assert mirror is not None
    return mirror
