"""Places: what a piece maps equals brute force, whatever the views; and they survive a file."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.pieces import ramp, segment_of, table_of
from vllm_delta_snapshot.errors import CorruptFile
from vllm_delta_snapshot.host.places import Piece, PlaceMap, Segment, Table


@st.composite
def views(draw: st.DrawFn, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """Draw a strided view of a ramp; of this shape, if one is given."""
    if shape is None:
        view = ramp(*draw(st.lists(st.integers(1, 5), max_size=4)))
        for dim in range(view.ndim):
            first = draw(st.integers(0, view.shape[dim] - 1))
            last = draw(st.integers(first, view.shape[dim]))
            step = draw(st.integers(1, 2))
            view = view[(slice(None),) * dim + (slice(first, last, step),)]
        return view.permute(draw(st.permutations(range(view.ndim))))
    order = draw(st.permutations(range(len(shape))))
    before, after = (draw(st.lists(st.integers(0, 2), min_size=len(shape), max_size=len(shape))) for _ in range(2))
    padded = ramp(*(before[dim] + shape[dim] + after[dim] for dim in order))
    for place, dim in enumerate(order):
        padded = padded.narrow(place, before[dim], shape[dim])
    return padded.permute([order.index(dim) for dim in range(len(shape))])


@st.composite
def subsets(draw: st.DrawFn, size: int) -> np.ndarray:
    """Draw sorted positions below `size`: none, few, some or all."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return np.flatnonzero(rng.random(size) < draw(st.sampled_from([0.0, 0.01, 0.5, 1.0])))


def mapped(piece: Piece, positions: np.ndarray) -> dict[int, int]:
    """What a piece maps, as pairs; positions are asked for in order."""
    selected, index = piece.map(positions)
    assert index.dtype == np.int64
    assert positions[selected].shape == index.shape
    return dict(zip(positions[selected].tolist(), index.tolist(), strict=True))


@settings(max_examples=100)
@given(st.data())
def test_segment_maps_as_brute_force_does(data: st.DataObject) -> None:
    source = data.draw(views())
    target = data.draw(views(tuple(source.shape)))
    expected = dict(zip(source.reshape(-1).tolist(), target.reshape(-1).tolist(), strict=True))
    segment = segment_of(source, target)
    positions = data.draw(subsets(5**4))
    assert segment.is_nested or segment.size == 0
    assert mapped(segment, positions) == {p: expected[p] for p in positions.tolist() if p in expected}


@settings(max_examples=60)
@given(st.data())
def test_segment_extent_and_box_are_those_of_its_elements(data: st.DataObject) -> None:
    source = data.draw(views().filter(lambda view: view.numel() > 0))
    target = data.draw(views(tuple(source.shape)))
    segment = segment_of(source, target)
    assert segment.size == source.numel()
    assert segment.extent == (int(target.min()), int(target.max()))
    turned = source.permute(data.draw(st.permutations(range(source.ndim))))
    again = segment_of(turned, data.draw(views(tuple(turned.shape))))
    assert again.box == segment.box  # the same elements, in whatever order and wherever they lie


@pytest.mark.parametrize(
    ("source", "target", "dims"),
    [
        (ramp(2, 3, 4), ramp(2, 3, 4), [(1, 24, 1)]),
        (ramp(2, 3, 4)[1], ramp(3, 4), [(1, 12, 1)]),
        (ramp(4, 6)[:, 2:5], ramp(4, 3), [(6, 4, 3), (1, 3, 1)]),
        (ramp(4, 6), ramp(6, 4).t(), [(6, 4, 1), (1, 6, 4)]),
        (ramp(4, 6).t(), ramp(6, 4), [(6, 4, 1), (1, 6, 4)]),
        (ramp(4, 6).t(), ramp(4, 6).t(), [(1, 24, 1)]),
        (ramp(4, 6), ramp(4, 8)[:, :6], [(6, 4, 8), (1, 6, 1)]),
        (ramp(4, 6), ramp(8, 6)[::2], [(6, 4, 12), (1, 6, 1)]),
        (ramp(4, 1, 6, 1), ramp(4, 1, 6, 1), [(1, 24, 1)]),
        (ramp(12)[::2], ramp(6), [(2, 6, 1)]),
        (ramp(12)[5], ramp(3)[1], []),
    ],
)
def test_segment_has_as_few_dims_as_can_be(source: torch.Tensor, target: torch.Tensor, dims: list) -> None:
    assert segment_of(source, target).dims == dims


def test_replicas_have_equal_boxes_wherever_each_worker_keeps_them() -> None:
    plain, padded, turned = ramp(4, 6), ramp(4, 8)[:, :6], ramp(6, 4).t()
    boxes = {segment_of(ramp(4, 6), target).box for target in (plain, padded, turned)}
    assert len(boxes) == 1


def test_boxes_of_different_elements_differ() -> None:
    whole = ramp(4, 6)
    parts = [whole, whole[:2], whole[2:], whole[:, :3], whole[:, 3:], whole[::2], whole[1::2], whole[:, ::2], whole[0]]
    assert len({segment_of(part, part).box for part in parts}) == len(parts)


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((4, 6), (0, 1)), ((2,), (0,)), ((3, 3), (1, 1)), ((2, 3), (2, 1)), ((2, 2, 2), (4, 2, 0)), ((5, 2), (1, 4))],
)
def test_segment_that_repeats_or_interlocks_is_not_nested(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    assert not Segment(0, shape, 0, stride, 0, stride).is_nested


@pytest.mark.parametrize(("shape", "stride"), [((1, 4), (0, 1)), ((2, 2), (4, 3)), ((3, 2), (2, 1)), ((), ())])
def test_segment_without_repeats_is_nested(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    assert Segment(0, shape, 0, stride, 0, stride).is_nested


def test_contiguous_segment_selects_by_a_slice() -> None:
    selected, index = segment_of(ramp(8, 6)[2:4], ramp(2, 6)).map(np.array([0, 12, 13, 23, 24]))
    assert selected == slice(1, 4)
    assert index.tolist() == [0, 1, 11]


@pytest.mark.parametrize("base", [2**31, 2**32, 3 * 2**32])
def test_segment_maps_positions_that_no_32_bits_hold(base: int) -> None:
    width = 2 * base
    segment = Segment(0, (3, width), base, (width + 1, 1), 2 * base, (width, 1))
    positions = np.array([base - 1, base, base + width, base + width + 1, base + 3 * width + 1, base + 3 * width + 2])
    assert mapped(segment, positions) == {
        base: 2 * base,
        base + width + 1: 2 * base + width,
        base + 3 * width + 1: 2 * base + 3 * width - 1,
    }
    turned = Segment(0, (3, width), 0, (1, 3), 0, (width, 1))
    assert mapped(turned, np.array([3 * width - 1, 3 * width])) == {3 * width - 1: 3 * width - 1}


@given(st.data())
def test_table_maps_as_a_dictionary_does(data: st.DataObject) -> None:
    pairs = data.draw(st.dictionaries(st.integers(0, 60), st.integers(0, 2**40), min_size=1))
    table = Table(0, np.array(sorted(pairs), np.int64), np.array([pairs[p] for p in sorted(pairs)], np.int64))
    positions = data.draw(subsets(64))
    assert mapped(table, positions) == {p: pairs[p] for p in positions.tolist() if p in pairs}
    assert table.extent == (min(pairs.values()), max(pairs.values()))
    assert table.size == len(pairs)


def test_table_maps_positions_that_no_32_bits_hold() -> None:
    table = Table(0, np.array([2**31, 2**32, 2**33]), np.array([2**33, 0, 2**32]))
    assert mapped(table, np.array([0, 2**32, 2**33, 2**34])) == {2**32: 0, 2**33: 2**32}


def place_map() -> PlaceMap:
    return PlaceMap(
        {
            "model.embed": [segment_of(ramp(4, 6)[:, :3], ramp(3, 4).t())],
            "é": [table_of((0, 5), (7, 2**33)), segment_of(ramp(3), ramp(3), storage=2), table_of((1, 9), storage=1)],
            "nowhere": [],
        }
    )


def described(places: PlaceMap) -> list[object]:
    return [
        (name, piece if isinstance(piece, Segment) else (piece.storage, piece.source.tolist(), piece.target.tolist()))
        for name, piece in places
    ]


def test_places_saved_and_loaded_are_the_same(tmp_path: Path) -> None:
    places = place_map()
    places.save(tmp_path / "area" / places.id)
    loaded = PlaceMap.load(tmp_path / "area" / places.id)
    assert loaded.id == places.id
    assert list(loaded.pieces) == ["model.embed", "é", "nowhere"]
    assert described(loaded) == described(places)
    positions = np.arange(24)
    for (_, one), (_, other) in zip(places, loaded, strict=True):
        assert mapped(one, positions) == mapped(other, positions)


def test_empty_places_can_be_saved_and_loaded(tmp_path: Path) -> None:
    PlaceMap({}).save(tmp_path / "p")
    assert PlaceMap.load(tmp_path / "p").id == PlaceMap({}).id


def test_places_with_the_same_content_have_the_same_id() -> None:
    assert place_map().id == place_map().id


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"w": []},
        {"v": [Segment(0, (4,), 0, (1,), 0, (1,))]},
        {"w": [Segment(1, (4,), 0, (1,), 0, (1,))]},
        {"w": [Segment(0, (4,), 1, (1,), 0, (1,))]},
        {"w": [Segment(0, (4,), 0, (1,), 0, (2,))]},
        {"w": [Segment(0, (4,), 0, (1,), 0, (1,))] * 2},
        {"w": [table_of((0, 0), (1, 1), (2, 2), (3, 3))]},
        {"w": [table_of((0, 0), (1, 1), (2, 3), (3, 2))]},
    ],
)
def test_places_with_other_content_have_another_id(other: dict) -> None:
    assert PlaceMap(other).id != PlaceMap({"w": [Segment(0, (4,), 0, (1,), 0, (1,))]}).id


@pytest.mark.parametrize("is_same_object", [True, False])
def test_workers_that_save_at_once_leave_one_whole_folder(is_same_object: bool, tmp_path: Path) -> None:
    # Two processes may well hold their places at the same address, as one object does here.
    one = place_map()
    workers = [one if is_same_object else place_map() for _ in range(4)]
    for attempt in range(10):
        barrier = Barrier(len(workers))
        folder = tmp_path / str(attempt) / one.id

        def save(places: PlaceMap, folder: Path = folder, barrier: Barrier = barrier) -> None:
            barrier.wait()
            places.save(folder)

        with ThreadPoolExecutor(len(workers)) as pool:
            list(pool.map(save, workers))
        assert [path.name for path in folder.parent.iterdir()] == [one.id]
        assert PlaceMap.load(folder).id == one.id


def test_places_that_are_there_already_are_left_alone(tmp_path: Path) -> None:
    place_map().save(tmp_path / "p")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "p").iterdir()}
    place_map().save(tmp_path / "p")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "p").iterdir()} == before


def test_places_that_cannot_be_written_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        place_map().save(tmp_path / "file" / "p")


def _edit(path: Path, name: str, index: int, value: object) -> None:
    fields = json.loads(path.read_text())
    fields[name][index] = value
    path.write_text(json.dumps(fields))


@pytest.mark.parametrize(
    "harm",
    [
        lambda p: (p / "places.json").unlink(),
        lambda p: (p / "places.json").write_bytes(b""),
        lambda p: (p / "places.json").write_bytes(b"\xff"),
        lambda p: (p / "places.json").write_text("[1]"),
        lambda p: (p / "places.json").write_text('{"w": 3}'),
        lambda p: _edit(p / "places.json", "model.embed", 0, [0, [1]]),
        lambda p: _edit(p / "places.json", "é", 0, {"size": 2}),
        lambda p: (p / "0.npy").unlink(),
        lambda p: (p / "0.npy").write_bytes(b""),
        lambda p: (p / "0.npy").write_bytes((p / "0.npy").read_bytes()[:-9]),
        lambda p: (p / "0.npy").write_bytes((p / "0.npy").read_bytes()[:-1] + b"\x01"),
        lambda p: (p / "0.npy").write_bytes((p / "1.npy").read_bytes()),
    ],
)
def test_damaged_places_are_corrupt_and_named(harm, tmp_path: Path) -> None:
    place_map().save(tmp_path / "p")
    harm(tmp_path / "p")
    with pytest.raises(CorruptFile, match="places cannot be read") as caught:
        PlaceMap.load(tmp_path / "p")
    assert caught.value.file == str(tmp_path / "p" / "places.json")


@pytest.mark.parametrize(
    ("pieces", "shared"),
    [
        ({"a": [segment_of(ramp(4), ramp(4))], "b": [segment_of(ramp(4), ramp(8)[4:])]}, set()),
        ({"a": [segment_of(ramp(4), ramp(4))], "b": [segment_of(ramp(4), ramp(4), storage=1)]}, set()),
        ({"a": [segment_of(ramp(4), ramp(4), storage=3)], "tied": [segment_of(ramp(4), ramp(4), storage=3)]}, {3}),
        ({"a": [segment_of(ramp(4), ramp(4))], "b": [segment_of(ramp(4), ramp(7)[3:])]}, {0}),
        ({"gate": [segment_of(ramp(4), ramp(8)[::2])], "up": [segment_of(ramp(4), ramp(8)[1::2])]}, {0}),
        ({"a": [segment_of(ramp(4), ramp(4))] * 2}, {0}),
        ({"wide": [segment_of(ramp(9), ramp(9))], "in": [table_of((0, 4), storage=0)]}, {0}),
        ({"void": [segment_of(ramp(0, 4), ramp(0, 4))] * 2}, set()),
        ({}, set()),
    ],
    ids=["side by side", "two storages", "tied", "one element", "interleaved", "twice", "inside", "empty", "none"],
)
def test_storages_in_which_pieces_may_overlap_are_known(pieces: dict, shared: set[int]) -> None:
    assert PlaceMap(pieces).shared == shared
