"""Mapping: what lanes would write is what the loader writes, tensor by tensor; and lanes survive a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support import damage
from tests.support.changes import as_difference, difference_of
from tests.support.pieces import segment_of
from tests.support.tensors import bits_of, patch_of, random_bits, random_patch, rng_of, to_torch
from vllm_delta_snapshot.dtypes import ALL_CODES, Bits
from vllm_delta_snapshot.errors import ApplyError, CorruptFile, FormatError
from vllm_delta_snapshot.format.digest import add_digests, patch_digest, seeded_digests, term_seeds
from vllm_delta_snapshot.host.mapping import Lane, Run, map_update, read_lanes, write_lanes
from vllm_delta_snapshot.host.places import Piece, PlaceMap, Segment, Table
from vllm_delta_snapshot.types import Change, TensorDifference, TensorPatch, TensorSpec

HEAD = {"version": 7, "tensors": [["é", 3, "0" * 16]]}


def written_by_lanes(storages: list[Bits], lanes: list[Lane]) -> list[Bits]:
    """Write lanes by hand, one element after the other."""
    result = [bits.copy() for bits in storages]
    for lane in lanes:
        values = lane.resolve(storages[lane.storage][lane.index])
        for place, value in zip(lane.index.tolist(), values.tolist(), strict=True):
            result[lane.storage][place] = value
    return result


class Fused:
    """Two storages and the views of four checkpoint tensors that a loader copies into them."""

    def __init__(self, code: str) -> None:
        self.specs = [TensorSpec(name, shape, code) for name, shape in (("q", (4, 6)), ("k", (6, 3)), ("n", ()))]
        self.old = [random_bits(code, 80, "storage", number) for number in range(2)]
        self.tensors = {spec.name: random_bits(code, spec.numel, spec.name) for spec in self.specs}

    def views(self, tensors: dict[str, torch.Tensor], storages: list[torch.Tensor]) -> dict[str, list]:
        """By tensor, which views are copied where: a slice, a transpose, a stride, and an element."""
        wide, flat = storages[0].view(8, 10), storages[1]
        return {
            "q": [(tensors["q"][:, 2:], wide[:4, 1:5]), (tensors["q"][1:3, :2].t(), flat[::2][:4].view(2, 2))],
            "k": [(tensors["k"].t(), wide[5:8, 2:8])],
            "n": [(tensors["n"], flat[77])],
        }

    def places(self) -> PlaceMap:
        """Where they lie, as numbers."""
        tensors = {spec.name: torch.arange(spec.numel).view(spec.shape) for spec in self.specs}
        views = self.views(tensors, [torch.arange(80) for _ in range(2)])
        numbers = {"q": [0, 1], "k": [0], "n": [1]}
        return PlaceMap(
            {
                name: [segment_of(*pair, storage=s) for pair, s in zip(pairs, numbers[name], strict=True)]
                for name, pairs in views.items()
            }
        )

    def loaded(self, patches: list[TensorPatch]) -> list[Bits]:
        """What the storages are after loading all of the patched tensors, where they start with the tensors' values."""
        bits = {name: values.copy() for name, values in self.tensors.items()}
        for patch in patches:
            bits[patch.spec.name][patch.positions] = patch.values
        return self._load(bits)

    def _load(self, bits: dict[str, Bits]) -> list[Bits]:
        flat = {spec.name: TensorSpec(spec.name, (spec.numel,), spec.dtype) for spec in self.specs}
        tensors = {spec.name: to_torch(bits[spec.name], flat[spec.name]).view(spec.shape) for spec in self.specs}
        storages = [to_torch(old, TensorSpec("s", (80,), self.specs[0].dtype)) for old in self.old]
        for pairs in self.views(tensors, storages).values():
            for source, target in pairs:
                target.copy_(source)
        return [bits_of(storage) for storage in storages]


def in_the_form_of(kind: str, patches: list[TensorPatch], tensors: dict[str, Bits]) -> list[Change]:
    """The same update as patches, as differences, as a mix in every tensor, or of one kind and the other."""
    made: list[Change] = []
    for number, patch in enumerate(patches):
        difference = as_difference(patch, tensors[patch.spec.name])
        if kind == "mixed":
            mask = rng_of(patch.spec.name).random(patch.changed) < 0.5
            values = np.where(mask, patch.values, difference.values)
            difference = TensorDifference(patch.spec, patch.positions, values, mask)
        made.append(patch if kind == "patches" or (kind == "side by side" and number % 2) else difference)
    return made


@pytest.mark.parametrize("kind", ["patches", "differences", "mixed", "side by side"])
@pytest.mark.parametrize("code", ["BOOL", "F8_E4M3", "BF16", "F32", "I64"])
def test_lanes_write_what_the_loader_writes(kind: str, code: str) -> None:
    fused = Fused(code)
    for share in (0.0, 0.3, 1.0):
        patches = [random_patch(spec, round(share * spec.numel), "patch") for spec in fused.specs]
        lanes = map_update(in_the_form_of(kind, patches, fused.tensors), fused.places())
        is_relative = kind != "patches" and share > 0
        assert any(lane.relative is not None for lane in lanes) == is_relative
        found = written_by_lanes(fused.loaded([]), lanes)
        assert [f.tolist() for f in found] == [e.tolist() for e in fused.loaded(patches)]
        if share == 1.0:
            assert sum(lane.size for lane in lanes) == 16 + 4 + 18 + 1


def test_lanes_are_one_for_each_storage_and_type() -> None:
    specs = [TensorSpec("a", (4,), "BF16"), TensorSpec("b", (4,), "F32"), TensorSpec("c", (4,), "BF16")]
    places = PlaceMap(
        {
            "a": [Segment(1, (4,), 0, (1,), 0, (1,))],
            "b": [Segment(1, (4,), 0, (1,), 4, (1,)), Segment(0, (2,), 2, (1,), 0, (1,))],
            "c": [Segment(1, (4,), 0, (1,), 8, (1,))],
        }
    )
    patches = [random_patch(spec, 4) for spec in specs]
    lanes = {(lane.storage, lane.dtype): lane for lane in map_update(patches, places)}
    assert {key: [run.name for run in lane.runs] for key, lane in lanes.items()} == {
        (1, "BF16"): ["a", "c"],
        (1, "F32"): ["b"],
        (0, "F32"): ["b"],
    }
    assert lanes[1, "BF16"].index.tolist() == [0, 1, 2, 3, 8, 9, 10, 11]


def test_runs_say_which_piece_of_which_tensor_and_where_it_starts() -> None:
    fused = Fused("BF16")
    lanes = {lane.storage: lane for lane in map_update([random_patch(s, s.numel) for s in fused.specs], fused.places())}
    assert lanes[0].runs == (Run("q", 0, 0), Run("k", 0, 16))
    assert lanes[1].runs == (Run("q", 1, 0), Run("n", 0, 4))
    assert lanes[0].starts.tolist() == [0, 16]
    assert lanes[0].starts.dtype == np.int64


def test_no_run_is_empty() -> None:
    fused = Fused("BF16")
    corner = patch_of(fused.specs[0], {5: 1})  # row 0, column 5: in the first piece alone
    [lane] = map_update([corner], fused.places())
    assert lane.runs == (Run("q", 0, 0),)


def test_seeds_are_those_of_the_checkpoint_positions() -> None:
    fused = Fused("BF16")
    patch = random_patch(fused.specs[0], 20)
    for lane in map_update([patch], fused.places()):
        [run] = lane.runs
        selected, _ = fused.places().pieces["q"][run.piece].map(patch.positions.astype(np.int64))
        assert lane.seeds.tolist() == term_seeds(patch.spec, patch.positions[selected]).tolist()
        assert lane.values.tolist() == patch.values[selected].tolist()


def test_tensors_that_the_worker_does_not_hold_and_empty_patches_are_left_out() -> None:
    fused = Fused("BF16")
    patches = [random_patch(TensorSpec("elsewhere", (9,), "BF16"), 9), random_patch(fused.specs[0], 0)]
    assert map_update(patches, fused.places()) == []


def test_positions_past_32_bits_are_mapped() -> None:
    spec = TensorSpec("huge", (3, 2**32), "BF16")
    places = PlaceMap({"huge": [Segment(0, (3, 4), 2**32 - 4, (2**32, 1), 2**33, (4, 1))]})
    patch = patch_of(spec, {2**32 - 5: 1, 2**32 - 4: 2, 3 * 2**32 - 1: 3})
    [lane] = map_update([patch], places)
    assert lane.index.tolist() == [2**33, 2**33 + 11]
    assert lane.values.tolist() == [2, 3]


TIED = PlaceMap({name: [Segment(0, (4,), 0, (1,), 2, (1,))] for name in ("embed", "head")})
EMBED, HEAD_SPEC = TensorSpec("embed", (4,), "BF16"), TensorSpec("head", (4,), "BF16")


def test_tied_tensors_that_stay_equal_are_mapped() -> None:
    [lane] = map_update([patch_of(EMBED, {1: 7, 2: 8}), patch_of(HEAD_SPEC, {1: 7, 2: 8})], TIED)
    assert [run.name for run in lane.runs] == ["embed", "head"]
    assert lane.index.tolist() == [3, 4, 3, 4]


@pytest.mark.parametrize("head", [{1: 7, 2: 9}, {1: 9}, {0: 1, 2: 0x8008}])
def test_tied_tensors_that_become_different_are_refused_and_named(head: dict[int, int]) -> None:
    with pytest.raises(ApplyError, match=r"are to become different.*embed, head"):
        map_update([patch_of(EMBED, {1: 7, 2: 8}), patch_of(HEAD_SPEC, head)], TIED)


def test_tied_tensors_that_move_alike_are_mapped() -> None:
    [lane] = map_update([difference_of(EMBED, {1: 7, 2: -8}), difference_of(HEAD_SPEC, {1: 7, 2: -8})], TIED)
    assert lane.index.tolist() == [3, 4, 3, 4]
    assert lane.resolve(np.array([1, 8, 1, 8], np.uint16)).tolist() == [8, 0, 8, 0]


@pytest.mark.parametrize(
    "head",
    [
        difference_of(HEAD_SPEC, {1: 7, 2: 9}),
        difference_of(HEAD_SPEC, {1: 7, 2: 8}, absolute=(2,)),
        patch_of(HEAD_SPEC, {1: 7, 2: 8}),
    ],
    ids=["by another amount", "of which one is absolute", "to the same numbers"],
)
def test_tied_tensors_that_may_move_apart_are_refused_and_named(head: Change) -> None:
    with pytest.raises(ApplyError, match=r"are to become different.*embed, head"):
        map_update([difference_of(EMBED, {1: 7, 2: 8}), head], TIED)


def test_tied_tensors_that_move_alike_in_part_and_are_set_alike_are_mapped() -> None:
    tied = [difference_of(spec, {1: 7, 2: 8}, absolute=(2,)) for spec in (EMBED, HEAD_SPEC)]
    [lane] = map_update(tied, TIED)
    assert lane.relative is not None
    assert lane.relative.tolist() == [True, False, True, False]


def test_lane_of_patches_and_differences_adds_to_the_ones_and_replaces_the_others() -> None:
    places = PlaceMap({name: [Segment(0, (4,), 0, (1,), 4 * at, (1,))] for at, name in enumerate(("embed", "head"))})
    [lane] = map_update([difference_of(EMBED, {0: 1, 3: 0xFFFF}, absolute=(3,)), patch_of(HEAD_SPEC, {1: 5})], places)
    old = np.array([0xFFFF, 7, 7], np.uint16)
    assert lane.resolve(old).tolist() == [0, 0xFFFF, 5]
    assert old.tolist() == [0xFFFF, 7, 7]


@pytest.mark.parametrize("code", ALL_CODES)
def test_lane_resolves_to_bits_of_the_width_of_its_type(code: str) -> None:
    spec = TensorSpec("w", (4,), code)
    top = (1 << 8 * spec.element.itemsize) - 1
    places = PlaceMap({"w": [Segment(0, (4,), 0, (1,), 0, (1,))]})
    [lane] = map_update([difference_of(spec, {0: 1, 1: -1, 2: top, 3: 3}, absolute=(3,))], places)
    new = lane.resolve(np.array([top, 0, 5, 9], spec.element.bits))
    assert new.dtype == spec.element.bits
    assert new.tolist() == [0, top, 4, 3]


def test_tied_tensors_of_different_types_are_refused() -> None:
    wide = TensorSpec("head", (4,), "F32")
    with pytest.raises(ApplyError, match="are to become different"):
        map_update([patch_of(EMBED, {1: 0}), patch_of(wide, {1: 0})], TIED)


def test_tensors_that_only_interleave_may_differ() -> None:
    pieces: dict[str, list[Piece]] = {
        "embed": [Segment(0, (4,), 0, (1,), 0, (2,))],
        "head": [Table(0, np.arange(4), np.array([7, 5, 3, 1]))],
    }
    [lane] = map_update([patch_of(EMBED, {1: 7, 2: 8}), patch_of(HEAD_SPEC, {1: 9, 2: 9})], PlaceMap(pieces))
    assert lane.index.tolist() == [2, 4, 5, 3]


def lane_of(code: str, size: int, storage: int = 0, *, is_relative: bool = False) -> Lane:
    index = rng_of(code, size).integers(0, 2**40, size)
    seeds = rng_of(code, size, "seeds").integers(0, 2**64, size, dtype=np.uint64)
    runs = tuple(Run(f"é{place}", 2, place) for place in range(0, size, 5))
    relative = rng_of(code, size, "relative").random(size) < 0.5 if is_relative else None
    return Lane(storage, code, index, random_bits(code, size, "lane"), seeds, runs, relative)


def facts(lane: Lane) -> tuple[object, ...]:
    arrays = [(array.dtype, array.tolist()) for array in (lane.index, lane.values, lane.seeds)]
    relative = None if lane.relative is None else (lane.relative.dtype, lane.relative.tolist())
    return lane.storage, lane.dtype, arrays, relative, lane.runs


@pytest.mark.parametrize("sizes", [(0,), (1,), (7, 0, 13)])
def test_lanes_of_every_type_written_and_read_are_the_same(sizes: tuple[int, ...], tmp_path: Path) -> None:
    lanes = [
        lane_of(code, size, place, is_relative=is_relative)
        for place, code in enumerate(ALL_CODES)
        for size in sizes
        for is_relative in (False, True)
    ]
    write_lanes(tmp_path, lanes, HEAD)
    found, head = read_lanes(tmp_path)
    assert [facts(lane) for lane in found] == [facts(lane) for lane in lanes]
    assert head == HEAD


def test_no_lanes_written_and_read_are_none(tmp_path: Path) -> None:
    write_lanes(tmp_path, [], HEAD)
    assert read_lanes(tmp_path) == ([], HEAD)


def test_lanes_that_were_read_are_aligned(tmp_path: Path) -> None:
    write_lanes(tmp_path, [lane_of("U8", 7), lane_of("BF16", 3), lane_of("F64", 5)], HEAD)
    for lane in read_lanes(tmp_path)[0]:
        assert all(array.flags.aligned for array in (lane.index, lane.values, lane.seeds))


def test_lanes_that_were_read_can_be_written_and_the_file_stays(tmp_path: Path) -> None:
    write_lanes(tmp_path, [lane_of("BF16", 9)], HEAD)
    [file] = tmp_path.iterdir()
    before = file.read_bytes()
    [lane] = read_lanes(tmp_path)[0]
    for array in (lane.index, lane.values, lane.seeds):
        array[...] = 1
    assert file.read_bytes() == before
    [again] = read_lanes(tmp_path)[0]
    assert facts(again) == facts(lane_of("BF16", 9))


def test_lanes_that_were_read_prove_old_values_as_patches_do(tmp_path: Path) -> None:
    fused = Fused("F32")
    patch = random_patch(fused.specs[1], 9)
    write_lanes(tmp_path, map_update([patch], fused.places()), HEAD)
    digests = [seeded_digests(lane.seeds, lane.values, lane.starts) for lane in read_lanes(tmp_path)[0]]
    assert add_digests(*(int(d) for d in np.concatenate(digests))) == patch_digest(
        patch.spec, patch.positions, patch.values
    )


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _renamed(old: bytes, new: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(path.read_bytes().replace(old, new))


@pytest.mark.parametrize(
    "harm",
    [
        _cut,
        lambda path: path.write_bytes(b""),
        lambda path: damage.flip_first_byte(path),
        _renamed(b"delta_snapshot", b"delta_snapshut"),
        _renamed(b'\\"lanes\\"', b'\\"lames\\"'),
        _renamed(b'\\"head\\"', b'\\"hood\\"'),
        _renamed(b'\\"runs\\"', b'\\"rums\\"'),
        _renamed(b"0.index", b"0.indes"),
        _renamed(b"0.seeds", b"0.seats"),
        _renamed(b"0.values", b"0.valves"),
    ],
)
def test_damaged_lanes_are_refused_and_named(harm: Callable[[Path], None], tmp_path: Path) -> None:
    write_lanes(tmp_path, [lane_of("BF16", 9)], HEAD)
    [file] = tmp_path.iterdir()
    harm(file)
    with pytest.raises(FormatError) as caught:
        read_lanes(tmp_path)
    assert isinstance(caught.value, CorruptFile) or caught.value.what == "header too long"
    assert caught.value.file == str(file)
