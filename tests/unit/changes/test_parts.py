"""Parts of one tensor, from several trainers: joined to one change, or refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.golden.make import COMPACT_SPECS
from vllm_delta_snapshot.changes.decode import decode
from vllm_delta_snapshot.changes.parts import join_parts
from vllm_delta_snapshot.errors import CorruptFile
from vllm_delta_snapshot.format import metadata as metadata_module
from vllm_delta_snapshot.format.metadata import DeltaMetadata
from vllm_delta_snapshot.types import Change, TensorDifference, TensorPatch, TensorSpec

FOLDER = Path(__file__).parents[2] / "golden" / "parts" / "deltas" / "00000002-00000002"
FIELDS = json.loads((FOLDER / "metadata.json").read_text())
SPEC = TensorSpec("w", (9,), "BF16")
OTHER = TensorSpec("v", (9,), "BF16")


def patch(*positions: int, spec: TensorSpec = SPEC) -> TensorPatch:
    return TensorPatch(spec, np.array(positions, np.int32), np.array(positions, np.uint16) + np.uint16(100))


def difference(*positions: int, absolute: bool = False) -> TensorDifference:
    values = np.array(positions, np.uint16) + np.uint16(100)
    flags = np.ones(len(positions), bool) if absolute else None
    return TensorDifference(SPEC, np.array(positions, np.int32), values, flags)


@pytest.mark.parametrize(
    "parts",
    [[(0, 1), (4, 8)], [(4, 8), (0, 1)], [(0, 3, 6), (1, 4, 7), (2, 5, 8)], [(), (5,)], [(8,), (), (0, 7)]],
    ids=str,
)
@pytest.mark.parametrize("make", [patch, difference])
def test_parts_are_joined_in_order(parts: list[tuple[int, ...]], make: Any):
    [joined] = join_parts([make(*positions) for positions in parts])
    expected = sorted(position for positions in parts for position in positions)
    assert joined.positions.tolist() == expected
    assert joined.values.tolist() == [100 + position for position in expected]
    assert joined.positions.dtype == np.int32
    assert type(joined) is type(make(0))


def test_parts_without_any_change_are_none():
    [joined] = join_parts([patch(), patch()])
    assert joined.changed == 0


def test_tensors_that_are_whole_keep_their_changes():
    changes: list[Change] = [patch(1), patch(2, spec=OTHER)]
    assert join_parts(changes)[0] is changes[0]
    assert join_parts(changes)[1] is changes[1]


@pytest.mark.parametrize("parts", [[(0, 4), (4, 8)], [(0, 4, 8), (5, 8)], [(3,), (1,), (3,)]], ids=str)
def test_parts_that_overlap_are_corrupt(parts: list[tuple[int, ...]]):
    with pytest.raises(CorruptFile, match="parts of a tensor overlap") as caught:
        join_parts([patch(*positions) for positions in parts])
    assert caught.value.tensor == "w"


@pytest.mark.parametrize(
    "parts", [[patch(0), difference(1)], [difference(0), difference(1, absolute=True)]], ids=["kinds", "mixture"]
)
def test_parts_of_different_kinds_are_corrupt(parts: list[Change]):
    with pytest.raises(CorruptFile, match="parts of a tensor are of different kinds"):
        join_parts(parts)


def refused(**changes: object) -> str:
    with pytest.raises(CorruptFile) as caught:
        DeltaMetadata.from_json(json.dumps(FIELDS | changes).encode(), file="f")
    return str(caught.value)


def tensors(number: int, **changes: object) -> list[dict[str, object]]:
    return [entry | changes if at == number else entry for at, entry in enumerate(FIELDS["tensors"])]


def test_parts_that_do_not_stand_together_are_corrupt():
    order = [*range(1, len(FIELDS["tensors"])), 0]
    assert FIELDS["layer_names"][0] == FIELDS["layer_names"][1]
    moved = {name: [FIELDS[name][at] for at in order] for name in ("tensors", "layer_names", "layer_shapes")}
    assert "appears twice" in refused(**moved)


def test_parts_before_version_4_are_corrupt():
    assert "appears twice" in refused(format_version=3)


def test_a_part_that_does_not_say_its_block_is_corrupt():
    fields = [{key: value for key, value in entry.items() if key != "block"} for entry in FIELDS["tensors"]]
    assert "in which block" in refused(tensors=fields)


def test_parts_of_different_types_are_corrupt():
    assert "differ in shape or type" in refused(tensors=tensors(1, dtype="F8_E5M2"))


def test_more_parts_than_are_read_are_corrupt(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metadata_module, "MAX_PARTS", 2)
    assert "at most 2 are read" in refused()


def test_a_block_before_version_4_has_the_number_of_its_first_tensor():
    compact = FOLDER.parents[2] / "compact" / "deltas" / "00000001-00000001" / "metadata.json"
    fields = json.loads(compact.read_text())
    fields["tensors"][0]["block"] = 1
    with pytest.raises(CorruptFile, match="number of its first tensor"):
        DeltaMetadata.from_json(json.dumps(fields).encode(), file="f")


def test_parts_whose_digests_do_not_add_up_are_corrupt():
    metadata = DeltaMetadata.from_json(json.dumps(FIELDS | {"state_digest": "0" * 16}).encode(), file="f")
    with pytest.raises(CorruptFile, match="does not lead to the state"):
        decode(metadata, FOLDER, {spec.name: spec for spec in COMPACT_SPECS})


def test_a_tensor_has_the_sums_of_its_parts():
    metadata = DeltaMetadata.from_json(json.dumps(FIELDS).encode(), file="f")
    for joined in metadata.by_tensor:
        parts = [entry for entry in metadata.tensors if entry.name == joined.name]
        assert joined.changed == sum(part.changed for part in parts)
        for field in ("old_digest", "new_digest"):
            assert int(getattr(joined, field), 16) == sum(int(getattr(part, field), 16) for part in parts) % 2**64
