"""Changes of both kinds: drawn by hypothesis, and said in a version's metadata."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from tests.support.strategies import bits_for, patches_for, seeds
from tests.support.tensors import apply_by_hand, patch_of
from tests.support.wire import METADATA
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.format.digest import format_digest, patch_digest
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.types import Change, TensorDifference, TensorPatch, TensorSpec


def difference_of(spec: TensorSpec, moves: dict[int, int], absolute: Sequence[int] = ()) -> TensorDifference:
    """Return a difference of these positions and moves; at the positions in `absolute`, of new values."""
    width = 8 * spec.element.itemsize
    patch = patch_of(spec, {position: move % (1 << width) for position, move in moves.items()})
    mask = np.isin(patch.positions, absolute)
    return TensorDifference(spec, patch.positions, patch.values, mask if mask.any() else None)


def as_difference(patch: TensorPatch, old: Bits) -> TensorDifference:
    """Return what a patch is against the tensor's old bits."""
    return TensorDifference(patch.spec, patch.positions, patch.values - old[patch.positions])


@st.composite
def differences_for(draw: st.DrawFn, spec: TensorSpec, *, may_be_mixed: bool = True) -> TensorDifference:
    """Draw a difference of a (small) tensor; some of its values may be absolute."""
    positions = draw(patches_for(spec)).positions
    wide = TensorSpec("moves", (positions.size,), f"U{8 * spec.element.itemsize}")
    values = draw(st.one_of(bits_for(wide, positions.size), st.just(np.ones(positions.size, wide.element.bits))))
    mask = np.random.default_rng(draw(seeds)).random(positions.size) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    return TensorDifference(spec, positions, values, mask if may_be_mixed and mask.any() else None)


def changes_for(spec: TensorSpec) -> st.SearchStrategy[Change]:
    """Draw a patch, a difference, or one with some absolute values."""
    return st.one_of(patches_for(spec), differences_for(spec))


@st.composite
def published_for(draw: st.DrawFn, spec: TensorSpec, old: Bits) -> Change:
    """Draw what a trainer may publish against old bits: a patch or a difference, of elements that do change."""
    drawn = draw(st.one_of(patches_for(spec), differences_for(spec, may_be_mixed=False)))
    new = apply_by_hand(old, drawn)
    positions = np.flatnonzero(new != old).astype(drawn.positions.dtype)
    patch = TensorPatch(spec, positions, new[positions])
    return patch if isinstance(drawn, TensorPatch) else as_difference(patch, old)


def metadata_of(version: int, changes: Sequence[Change], before: dict[str, Bits]) -> DeltaMetadata:
    """Return the metadata of one version, with the digests of a trainer that has the state before."""
    entries = [_entry(change, before[change.spec.name]) for change in changes]
    fields = METADATA | {
        "format_version": 3,
        "version": version,
        "base_version": version - 1,
        "tensors": entries,
        "layer_names": [entry["name"] for entry in entries],
        "layer_shapes": [entry["shape"] for entry in entries],
        "changed_elements": sum(change.changed for change in changes),
    }
    return DeltaMetadata.model_validate_json(DeltaMetadata.model_validate(fields, strict=False).model_dump_json())


def _entry(change: Change, old: Bits) -> dict[str, object]:
    spec, positions = change.spec, change.positions
    new = apply_by_hand(old, change)
    return {
        "name": spec.name,
        "shape": list(spec.shape),
        "dtype": spec.dtype,
        "changed": change.changed,
        "encoding": "raw" if isinstance(change, TensorPatch) else "raw_difference",
        "file": 0,
        "old_digest": format_digest(patch_digest(spec, positions, old[positions])),
        "new_digest": format_digest(patch_digest(spec, positions, new[positions])),
    }
