"""Assembled updates: forward and back, they equal the versions one by one, and know the values they replace."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.strategies import bits_for, patches_for, specs
from tests.support.tensors import apply_by_hand
from tests.support.wire import METADATA
from vllm_delta_snapshot.delta_folder import DigestedPatch
from vllm_delta_snapshot.dtypes import Bits
from vllm_delta_snapshot.format.digest import format_digest, patch_digest
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.stage.assemble import assemble_back, assemble_forward
from vllm_delta_snapshot.types import TensorPatch, TensorSpec

State = dict[str, Bits]


@dataclass
class Chain:
    """Versions made by hand: the state at each, the patches and metadata of each step."""

    states: list[State]
    steps: list[list[TensorPatch]]
    metadata: list[DeltaMetadata]

    def forward(self, base: int, version: int) -> list[DigestedPatch]:
        """Assemble the update between two versions."""
        return assemble_forward(self.steps[base:version], self.metadata[base:version])

    def back(self, base: int, version: int, start: int) -> list[DigestedPatch]:
        """Assemble the update that goes back, where only the state at `start` is at hand."""
        reads: list[str] = []

        def start_bits(name: str) -> Bits:
            reads.append(name)
            bits = self.states[start][name].copy()
            bits.flags.writeable = False  # as the mapped file of a checkpoint
            return bits

        found = assemble_back(self.steps[start:version], self.steps[version:base], start_bits)
        assert set(reads) == {item.patch.spec.name for item in found}
        return found


def _entry(patch: TensorPatch, old: Bits) -> dict[str, object]:
    spec, positions = patch.spec, patch.positions
    return {
        "name": spec.name,
        "shape": list(spec.shape),
        "dtype": spec.dtype,
        "changed": patch.changed,
        "encoding": "raw",
        "file": 0,
        "old_digest": format_digest(patch_digest(spec, positions, old[positions])),
        "new_digest": format_digest(patch_digest(spec, positions, patch.values)),
    }


def _metadata(version: int, entries: list[dict[str, object]]) -> DeltaMetadata:
    fields = METADATA | {
        "version": version,
        "base_version": version - 1,
        "tensors": entries,
        "layer_names": [entry["name"] for entry in entries],
        "layer_shapes": [entry["shape"] for entry in entries],
        "changed_elements": sum(int(str(entry["changed"])) for entry in entries),
    }
    return DeltaMetadata.model_validate_json(DeltaMetadata.model_validate(fields, strict=False).model_dump_json())


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    """Draw two tensors and three to five versions of them."""
    drawn = draw(st.lists(specs, min_size=1, max_size=2))
    table = [TensorSpec(f"{place}.{spec.name}", spec.shape, spec.dtype) for place, spec in enumerate(drawn)]
    chain = Chain([{spec.name: draw(bits_for(spec, spec.numel)) for spec in table}], [], [])
    for version in range(1, draw(st.integers(3, 5)) + 1):
        old = chain.states[-1]
        patches = [draw(patches_for(spec)) for spec in table if draw(st.booleans())]
        chain.steps.append(patches)
        chain.metadata.append(_metadata(version, [_entry(patch, old[patch.spec.name]) for patch in patches]))
        chain.states.append(old | {p.spec.name: apply_by_hand(old[p.spec.name], p) for p in patches})
    return chain


def check(update: list[DigestedPatch], before: State, after: State) -> None:
    """Apply by hand and compare; and compute the digests from the states."""
    state = dict(before)
    for item in update:
        patch = item.patch
        old = before[patch.spec.name][patch.positions]
        assert item.old_digest == patch_digest(patch.spec, patch.positions, old)
        assert item.new_digest == patch_digest(patch.spec, patch.positions, patch.values)
        state[patch.spec.name] = apply_by_hand(state[patch.spec.name], patch)
    assert {name: bits.tolist() for name, bits in state.items()} == {n: b.tolist() for n, b in after.items()}


@settings(max_examples=60)
@given(st.data())
def test_update_forward_equals_the_versions_one_by_one(data: st.DataObject) -> None:
    chain = data.draw(chains())
    last = len(chain.steps)
    base = data.draw(st.integers(0, last - 1))
    version = data.draw(st.integers(base + 1, last))
    check(chain.forward(base, version), chain.states[base], chain.states[version])


@settings(max_examples=100)
@given(st.data())
def test_update_back_undoes_the_versions_wherever_the_start_is(data: st.DataObject) -> None:
    chain = data.draw(chains())
    start = data.draw(st.integers(0, 2))
    version = data.draw(st.integers(start, len(chain.steps) - 1))
    base = data.draw(st.integers(version + 1, len(chain.steps)))
    check(chain.back(base, version, start), chain.states[base], chain.states[version])


@settings(max_examples=30)
@given(st.data())
def test_update_there_and_back_is_nothing(data: st.DataObject) -> None:
    chain = data.draw(chains())
    last = len(chain.steps)
    there, back = chain.forward(1, last), chain.back(last, 1, 0)
    assert [i.patch.spec for i in there] == [i.patch.spec for i in back]
    for one, other in zip(there, back, strict=True):
        assert (one.old_digest, one.new_digest) == (other.new_digest, other.old_digest)
        assert one.patch.positions.tolist() == other.patch.positions.tolist()


@pytest.mark.parametrize("steps", [[], [[]], [[], []]])
def test_update_of_no_changes_is_empty(steps: list[list[TensorPatch]]) -> None:
    assert assemble_forward(steps, [_metadata(n + 1, []) for n in range(len(steps))]) == []
    assert assemble_back([], steps, lambda name: pytest.fail(name)) == []
    assert assemble_back(steps, [], lambda name: pytest.fail(name)) == []
