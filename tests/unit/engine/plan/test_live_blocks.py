"""A worker's part of a tensor in blocks: every element once, read and written where it lives, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.pieces import ramp, segment_of
from tests.support.tensors import rng_of
from vllm_delta_snapshot.engine.plan import live_blocks as module
from vllm_delta_snapshot.engine.plan.live_blocks import live_blocks
from vllm_delta_snapshot.host.places import Piece, Table

FIRST = 1000
"""What the storage's first element holds; each further one holds one more."""

SOURCE, TARGET = ramp(6, 4, 5), ramp(200)


def table_of_size(size: int) -> Table:
    """Return a table of any places, in no order."""
    rng = rng_of("table", size)
    source = np.sort(rng.choice(3 * size + 1, size, replace=False)).astype(np.int64)
    return Table(0, source, rng.choice(4 * size + 1, size, replace=False).astype(np.int64))


def view(*strides: int, shape: tuple[int, ...], offset: int = 0) -> torch.Tensor:
    return TARGET.as_strided(shape, strides, offset)


PIECES = {
    "all of it": segment_of(SOURCE, TARGET[:120].view(6, 4, 5)),
    "further on": segment_of(SOURCE, TARGET[7:127].view(6, 4, 5)),
    "some rows": segment_of(SOURCE[2:4], TARGET[:40].view(2, 4, 5)),
    "some columns": segment_of(SOURCE[:, 1:3], TARGET[:60].view(6, 2, 5)),
    "a corner": segment_of(SOURCE[1:3, 1:3, 1:4], TARGET[3:15].view(2, 2, 3)),
    "every second": segment_of(SOURCE[::2, ::2, ::2], view(9, 4, 1, shape=(3, 2, 3))),
    "transposed": segment_of(SOURCE[0].T, TARGET[:20].view(5, 4)),
    "permuted": segment_of(SOURCE.permute(2, 0, 1), TARGET[:120].view(5, 6, 4)),
    "with gaps": segment_of(SOURCE, view(31, 7, 1, shape=(6, 4, 5))),
    "one element": segment_of(SOURCE[3, 2, 1], TARGET[77]),
    "rows of nothing": segment_of(ramp(4, 0), TARGET[:0].view(4, 0)),
    "nothing": segment_of(SOURCE[:0], TARGET[:0].view(0, 4, 5)),
    "table": table_of_size(40),
    "table of one": Table(0, np.array([3]), np.array([11])),
    "table of none": Table(0, np.empty(0, np.int64), np.empty(0, np.int64)),
}
pieces = pytest.mark.parametrize("piece", PIECES.values(), ids=PIECES.keys())
sizes = pytest.mark.parametrize("block", [1, 4, 7, 20, 1 << 16])


@pytest.fixture
def _block(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", block)


def places(piece: Piece) -> dict[int, int]:
    """Return where each element of the checkpoint tensor lies, by a loop over all of them."""
    if isinstance(piece, Table):
        return dict(zip(piece.source.tolist(), piece.target.tolist(), strict=True))
    found = {}
    for index in np.ndindex(*piece.shape):
        source = piece.source_offset + sum(i * step for i, step in zip(index, piece.source_stride, strict=True))
        found[source] = piece.target_offset + sum(i * step for i, step in zip(index, piece.target_stride, strict=True))
    return found


@pytest.mark.usefixtures("_block")
@pieces
@sizes
def test_blocks_have_every_element_once_and_read_it_where_it_lives(piece: Piece, block: int):
    flat = torch.arange(FIRST, FIRST + 400, dtype=torch.int32)
    seen: dict[int, int] = {}
    for part in live_blocks(piece, flat):
        values = part.read().tolist()
        assert 0 < len(values) <= block
        assert len(values) == len(part.positions)
        assert not set(part.positions.tolist()) & seen.keys()
        seen.update(zip(part.positions.tolist(), values, strict=True))
    assert seen == {source: FIRST + target for source, target in places(piece).items()}


@pytest.mark.usefixtures("_block")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64], ids=str)
@pieces
@sizes
def test_what_is_written_is_read_back_and_nothing_else_changes(piece: Piece, block: int, dtype: torch.dtype):
    flat = torch.arange(400).remainder(101).to(dtype)
    expected = flat.tolist()
    content = torch.from_numpy(rng_of("content").integers(0, 127, 400)).to(dtype)
    for source, target in places(piece).items():
        expected[target] = content[source].item()
    for part in live_blocks(piece, flat):
        assert part.write(content[torch.from_numpy(part.positions)])
    assert flat.tolist() == expected
    for part in live_blocks(piece, flat):
        assert part.read().tolist() == content[torch.from_numpy(part.positions)].tolist()


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("shape", [(3, 70_000), (70_000, 3), (2, 3, 40_000), (1 << 16,), ((1 << 16) + 1,)], ids=str)
def test_pieces_over_the_size_of_a_block_come_in_several(shape: tuple[int, ...], gap: int):
    source = ramp(*shape)
    rows, width = source.numel() // shape[-1], shape[-1] + gap
    flat = torch.arange(rows * width + 5, dtype=torch.int32)
    target = ramp(flat.numel())[5:].view(*shape[:-1], width)[..., : shape[-1]]
    parts = list(live_blocks(segment_of(source, target), flat))
    assert all(part.positions.size <= 1 << 16 for part in parts)
    assert len(parts) > 1 or source.numel() <= 1 << 16
    assert np.array_equal(np.concatenate([part.positions for part in parts]), np.arange(source.numel()))
    assert torch.equal(torch.cat([part.read() for part in parts]), target.reshape(-1).to(torch.int32))


def test_large_table_comes_in_several_blocks():
    piece = table_of_size((1 << 16) + 10)
    flat = torch.zeros(4 * piece.size + 1, dtype=torch.int16)
    parts = list(live_blocks(piece, flat))
    assert [part.positions.size for part in parts] == [1 << 16, 10]
    assert all(part.write(torch.ones(part.positions.size, dtype=torch.int16)) for part in parts)
    assert int(flat.sum()) == piece.size
    assert bool(flat[torch.from_numpy(piece.target)].all())


def test_write_that_does_not_hold_says_so():
    # Two elements in one place: what was written first is gone.
    twice = Table(0, np.array([0, 1]), np.array([4, 4]))
    (part,) = live_blocks(twice, torch.zeros(8, dtype=torch.int16))
    assert not part.write(torch.tensor([1, 2], dtype=torch.int16))
    assert part.write(torch.tensor([3, 3], dtype=torch.int16))


def test_blocks_of_a_segment_share_the_memory_of_the_weights():
    flat = torch.zeros(120, dtype=torch.int16)
    (part,) = live_blocks(PIECES["all of it"], flat)
    assert part.index is None
    assert part.live.data_ptr() == flat.data_ptr()
