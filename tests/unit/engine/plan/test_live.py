"""Reading and writing live weights: every width, around the borders of chunks and threads, by any number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.support.tensors import random_bits, rng_of
from vllm_delta_snapshot.engine.plan.live import gather, scatter, to_device

CHUNK, LEAST = 8192, 1 << 16
SIZES = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, LEAST - 1, LEAST, 2 * LEAST - 1, 2 * LEAST, 2 * LEAST + 1, 5 * LEAST + 3]
CODE_OF_WIDTH = {1: "U8", 2: "U16", 4: "U32", 8: "U64"}
CPU = torch.device("cpu")


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Let torch, and so live, use this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def storage_of(width: int, size: int) -> torch.Tensor:
    return to_device(random_bits(CODE_OF_WIDTH[width], size, "storage"), CPU)


def index_of(size: int, storage: int) -> torch.Tensor:
    return torch.from_numpy(rng_of("index", size).permutation(storage)[:size])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("size", SIZES)
def test_gather_and_scatter_do_what_indexing_does(size: int) -> None:
    index = index_of(size, size + 1000)
    for width, code in CODE_OF_WIDTH.items():
        flat = storage_of(width, size + 1000)
        new = to_device(random_bits(code, size, "new"), CPU)
        expected = flat.clone()
        old = gather(flat, index)
        assert torch.equal(old, expected[index])
        assert scatter(flat, index, new)
        expected[index] = new
        assert torch.equal(flat, expected)
        assert torch.equal(gather(flat, index), new)


def test_gather_returns_memory_of_its_own() -> None:
    flat = storage_of(2, 10)
    old = gather(flat, torch.arange(10))
    flat.zero_()
    assert old.count_nonzero()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("place", [0, CHUNK - 1, LEAST, 3 * LEAST - 2])
def test_scatter_of_different_values_to_one_position_says_that_it_failed(place: int) -> None:
    size = 3 * LEAST
    flat, index = storage_of(2, size), torch.arange(size)
    index[place] = place + 1 if place % CHUNK == 0 else place - 1
    new = torch.arange(size).to(torch.int16)
    assert not scatter(flat, index, new)


def test_scatter_of_equal_values_to_one_position_is_right() -> None:
    flat = storage_of(2, 4)
    assert scatter(flat, torch.tensor([2, 1, 2]), torch.tensor([7, 8, 7], dtype=torch.int16))
    assert flat[1:3].tolist() == [8, 7]


def test_scatter_to_memory_that_forgets_says_that_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(np.ndarray):
        def __setitem__(self, key: object, value: object) -> None:
            del key, value

    flat = torch.zeros(10, dtype=torch.int16)
    forgetful = flat.numpy().view(Forgetful)
    numpy_of = torch.Tensor.numpy
    monkeypatch.setattr(torch.Tensor, "numpy", lambda t: forgetful if t is flat else numpy_of(t))
    assert scatter(flat, torch.tensor([1]), torch.tensor([0], dtype=torch.int16))
    assert not scatter(flat, torch.tensor([1]), torch.tensor([5], dtype=torch.int16))


@pytest.mark.parametrize("width", CODE_OF_WIDTH)
def test_host_arrays_become_tensors_that_share_memory(width: int) -> None:
    bits = random_bits(CODE_OF_WIDTH[width], 5)
    tensor = to_device(bits, CPU)
    assert tensor.element_size() == width
    assert tensor.data_ptr() == bits.ctypes.data
    assert tensor.numpy().view(bits.dtype).tolist() == bits.tolist()
