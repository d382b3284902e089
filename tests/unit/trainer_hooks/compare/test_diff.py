"""Diff: which elements changed, from what to what, in bits, in the serving dtype; compiled or not."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.kernels import compiled
from tests.support.reference import digest
from tests.support.strategies import bits_for, patches_for, specs
from tests.support.tensors import TORCH_CODES, apply_by_hand, bits_of, random_bits, rng_of, special_bits, to_torch
from trainer_hooks.compare import diff as diff_module
from trainer_hooks.compare.diff import (
    CHUNK_ELEMENTS,
    Piece,
    TensorDiff,
    check_castable,
    diff_piece,
    diff_tensor,
    join_pieces,
    pieces,
    tensor_bits,
)
from trainer_hooks.compare.kernel import Kernel, _load_kernel, load_kernel
from vllm_delta_snapshot.dtypes import Bits, dtype_of
from vllm_delta_snapshot.errors import SourceError
from vllm_delta_snapshot.types import TensorSpec, position_dtype

CASTABLE = ("F16", "BF16", "F32", "F64")


@pytest.fixture(params=["numpy", "kernel"], autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run every test in both ways, with buffers that no other test has."""
    kernel = compiled() if request.param == "kernel" else None
    monkeypatch.setattr(diff_module, "load_kernel", lambda: kernel)
    monkeypatch.setattr(diff_module, "_OF_THREAD", threading.local())


def diff(spec: TensorSpec, before: Bits, after: Bits) -> TensorDiff | None:
    return diff_tensor(spec, before, to_torch(after, spec))


def changes(found: TensorDiff | None) -> dict[int, int]:
    """Return the new values, by position."""
    return {} if found is None else dict(zip(found.positions.tolist(), found.new.tolist(), strict=True))


def check(found: TensorDiff | None, spec: TensorSpec, before: Bits, after: Bits) -> None:
    """Check all that a difference says."""
    places = [i for i, (b, a) in enumerate(zip(before.tolist(), after.tolist(), strict=True)) if a != b]
    if not places:
        assert found is None
        return
    assert found is not None
    assert found.spec == spec
    assert found.positions.tolist() == places
    assert found.positions.dtype == position_dtype(spec.numel)
    for values, digested, bits in ((found.old, found.old_digest, before), (found.new, found.new_digest, after)):
        assert values.dtype == spec.element.bits
        assert values.tolist() == bits[places].tolist()
        assert digested == digest(spec, places, bits[places].tolist())


def differing(before: Bits, after: Bits) -> dict[int, int]:
    return {i: a for i, (b, a) in enumerate(zip(before.tolist(), after.tolist(), strict=True)) if a != b}


@given(st.data())
def test_diff_of_any_patched_tensor_finds_exactly_what_differs(data: st.DataObject):
    spec = data.draw(specs)
    before = data.draw(bits_for(spec, spec.numel))
    after = apply_by_hand(before, data.draw(patches_for(spec)))
    check(diff(spec, before, after), spec, before, after)


def test_diff_of_random_bits_of_any_type_finds_exactly_what_differs():
    for code in TORCH_CODES:
        spec = TensorSpec("w", (20, 50), code)
        before, after = random_bits(code, 1000, "before"), random_bits(code, 1000, "after")
        after[::3] = before[::3]
        check(diff(spec, before, after), spec, before, after)


def test_diff_of_the_same_special_patterns_of_any_type_is_none():
    for code in TORCH_CODES:
        bits = special_bits(code)
        assert diff(TensorSpec("w", bits.shape, code), bits, bits) is None


def test_diff_to_special_patterns_of_any_type_keeps_every_bit():
    for code in TORCH_CODES:
        bits = special_bits(code)
        other = bits ^ np.array(1, dtype=bits.dtype)
        patch = diff(TensorSpec("w", bits.shape, code), other, bits)
        assert changes(patch) == dict(enumerate(bits.tolist()))


def one_bf16(before: int, after: int) -> TensorDiff | None:
    spec = TensorSpec("w", (1,), "BF16")
    return diff(spec, np.array([before], np.uint16), np.array([after], np.uint16))


def test_unchanged_nan_is_no_change():
    assert one_bf16(0x7FC1, 0x7FC1) is None


def test_nan_with_another_payload_is_a_change():
    assert changes(one_bf16(0x7FC1, 0x7FC2)) == {0: 0x7FC2}


@pytest.mark.parametrize(("before", "after"), [(0x0000, 0x8000), (0x8000, 0x0000)])
def test_changed_sign_of_zero_is_a_change(before: int, after: int):
    assert changes(one_bf16(before, after)) == {0: after}


BORDERS = [0, 1, CHUNK_ELEMENTS - 1, CHUNK_ELEMENTS, CHUNK_ELEMENTS + 1, 2 * CHUNK_ELEMENTS, 2 * CHUNK_ELEMENTS + 1]


@pytest.mark.parametrize("numel", BORDERS)
def test_diff_at_chunk_borders_finds_exactly_what_differs(numel: int):
    spec = TensorSpec("w", (numel,), "U8")
    before = np.zeros(numel, np.uint8)
    expected = {p: 7 for border in (0, CHUNK_ELEMENTS, 2 * CHUNK_ELEMENTS) for p in range(border - 2, border + 2)}
    expected = {p: value for p, value in expected.items() if 0 <= p < numel}
    after = before.copy()
    after[list(expected)] = 7
    assert changes(diff(spec, before, after)) == expected


@pytest.mark.parametrize("place", [0, CHUNK_ELEMENTS - 1, CHUNK_ELEMENTS, 2 * CHUNK_ELEMENTS])
def test_diff_with_a_single_change_near_a_border_finds_it(place: int):
    spec = TensorSpec("w", (2 * CHUNK_ELEMENTS + 1,), "BF16")
    tensor = torch.zeros(spec.numel, dtype=torch.bfloat16)
    tensor[place] = 1
    assert changes(diff_tensor(spec, np.zeros(spec.numel, np.uint16), tensor)) == {place: 0x3F80}


def test_diff_of_a_scalar_finds_its_change():
    spec = TensorSpec("w", (), "F32")
    assert changes(diff_tensor(spec, np.zeros(1, np.uint32), torch.tensor(1.0))) == {0: 0x3F800000}


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)], ids=str)
def test_diff_of_an_empty_tensor_is_none(shape: tuple[int, ...]):
    assert diff_tensor(TensorSpec("w", shape, "F32"), np.zeros(0, np.uint32), torch.zeros(shape)) is None


def grid() -> torch.Tensor:
    return torch.arange(60, dtype=torch.float32).reshape(3, 4, 5)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(grid().permute(2, 0, 1), id="permuted"),
        pytest.param(grid()[:, ::2], id="strided"),
        pytest.param(grid()[1:, 1:, 1:], id="sliced"),
        pytest.param(grid()[0, 0, :1].expand(4, 6), id="expanded"),
        pytest.param(grid()[0].T, id="transposed"),
        pytest.param(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last) + 1, id="channels last"),
        pytest.param(grid().requires_grad_(), id="with gradient"),
        pytest.param(torch.nn.Parameter(grid()), id="parameter"),
        pytest.param(torch._neg_view(grid()), id="lazily negated"),
        pytest.param(torch.complex(grid(), grid()).conj().imag, id="imaginary part of a conjugate"),
    ],
)
def test_diff_of_any_strides_is_that_of_a_contiguous_copy(view: torch.Tensor):
    spec = TensorSpec("w", tuple(view.shape), "F32")
    zeros = np.zeros(spec.numel, np.uint32)
    expected = differing(zeros, bits_of(view.detach().clone(memory_format=torch.contiguous_format)))
    assert changes(diff_tensor(spec, zeros, view)) == expected


@pytest.mark.parametrize("serving", CASTABLE)
def test_diff_rounds_to_the_serving_dtype_as_torch_does(serving: str):
    for training in CASTABLE:
        bits = special_bits(training)
        tensor = to_torch(bits, TensorSpec("w", bits.shape, training))
        expected = bits_of(tensor.to(getattr(torch, dtype_of(serving).torch_name)))
        patch = diff_tensor(TensorSpec("w", bits.shape, serving), ~expected, tensor)
        assert changes(patch) == dict(enumerate(expected.tolist()))


def test_diff_rounds_ties_to_even_and_next_to_ties_to_nearest():
    halves = np.array([0x3F80_8000, 0x3F81_8000, 0x3F80_7FFF, 0x3F80_8001, 0x7F7F_FFFF, 0x0000_8000], np.uint32)
    spec = TensorSpec("w", halves.shape, "BF16")
    patch = diff_tensor(spec, np.full(6, 0xFFFF, np.uint16), torch.from_numpy(halves.view(np.float32)))
    assert list(changes(patch).values()) == [0x3F80, 0x3F82, 0x3F80, 0x3F81, 0x7F80, 0x0000]


def test_change_below_the_serving_precision_is_no_change():
    spec = TensorSpec("w", (1,), "BF16")
    assert diff_tensor(spec, np.array([0x3F80], np.uint16), torch.tensor([1.0001])) is None


@pytest.mark.parametrize("shape", [(), (6,), (3, 2), (2, 3, 1), (2, 2), (0,)], ids=str)
def test_diff_of_another_shape_is_refused_and_named(shape: tuple[int, ...]):
    with pytest.raises(SourceError, match="another shape") as caught:
        diff_tensor(TensorSpec("model.w", (2, 3), "F32"), np.zeros(6, np.uint32), torch.zeros(shape))
    assert caught.value.tensor == "model.w"


@pytest.mark.parametrize(
    ("serving", "training"),
    [
        ("F32", torch.int64),
        ("I64", torch.float32),
        ("I32", torch.int64),
        ("U8", torch.bool),
        ("BOOL", torch.uint8),
        ("F8_E4M3", torch.float32),
        ("F8_E4M3", torch.float8_e5m2),
        ("F8_E8M0", torch.bfloat16),
        ("F32", torch.complex64),
        ("C64", torch.float32),
        ("C64", torch.complex128),
    ],
)
def test_diff_that_would_be_more_than_rounding_is_refused_and_named(serving: str, training: torch.dtype):
    with pytest.raises(SourceError, match="rounding alone") as caught:
        check_castable(TensorSpec("model.w", (2,), serving), torch.zeros(2, dtype=training))
    assert caught.value.tensor == "model.w"


def test_diff_of_the_same_dtype_is_never_refused():
    for code in TORCH_CODES:
        spec = TensorSpec("w", (3,), code)
        check_castable(spec, to_torch(random_bits(code, 3), spec))


def test_fp8_training_weights_may_be_served_as_bf16():
    tensor = torch.tensor([1.5, -0.0]).to(torch.float8_e4m3fn)
    patch = diff_tensor(TensorSpec("w", (2,), "BF16"), np.zeros(2, np.uint16), tensor)
    assert changes(patch) == {0: 0x3FC0, 1: 0x8000}


def test_diff_does_not_share_memory_with_weights_and_baseline():
    spec, tensor = TensorSpec("w", (4,), "F32"), torch.ones(4)
    baseline = np.zeros(4, np.uint32)
    found = diff_tensor(spec, baseline, tensor)
    tensor.zero_()
    baseline[:] = 7
    assert (found.old.tolist(), found.new.tolist()) == ([0] * 4, [0x3F800000] * 4)


def test_diff_leaves_weights_and_baseline_alone():
    spec, tensor, baseline = TensorSpec("w", (4,), "BF16"), torch.ones(4), np.zeros(4, np.uint16)
    diff_tensor(spec, baseline, tensor)
    assert (tensor.tolist(), baseline.tolist()) == ([1.0] * 4, [0] * 4)


def test_positions_are_int32_and_sorted():
    spec = TensorSpec("w", (CHUNK_ELEMENTS + 10,), "U8")
    patch = diff(spec, np.zeros(spec.numel, np.uint8), np.ones(spec.numel, np.uint8))
    assert patch.positions.dtype == np.int32
    assert np.all(np.diff(patch.positions) == 1)


def test_tensor_bits_of_the_serving_dtype_is_a_view():
    tensor = torch.zeros(4, dtype=torch.bfloat16)
    bits = tensor_bits(tensor, TensorSpec("w", (4,), "BF16"))
    tensor[0] = 1
    assert bits[0] == 0x3F80


SMALL = 16
"""A chunk, and a quarter of a piece, where the real ones would take long to compare by hand."""


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff_module, "CHUNK_ELEMENTS", SMALL)
    monkeypatch.setattr(diff_module, "PIECE_ELEMENTS", 4 * SMALL)


SIZES = sorted({n * SMALL + d for n in (0, 1, 2, 4, 8) for d in (-9, -8, -1, 0, 1, 7, 8, 9) if n * SMALL + d > 0})
CODES_OF_EACH_WIDTH = ("F8_E4M3", "BF16", "F32", "I64")


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("code", CODES_OF_EACH_WIDTH)
def test_diff_around_the_borders_of_chunks_and_pieces_finds_exactly_what_differs(code: str):
    for numel in SIZES:
        for share in (0.0, 0.05, 0.5, 1.0):
            spec = TensorSpec("w", (numel,), code)
            before = random_bits(code, numel)
            moved = rng_of(code, numel, share).random(numel) < share
            after = np.where(moved, ~before, before)
            check(diff(spec, before, after), spec, before, after)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("code", CODES_OF_EACH_WIDTH)
def test_diff_with_a_single_change_finds_it_wherever_it_is(code: str):
    numel = 5 * SMALL + 3
    spec = TensorSpec("w", (numel,), code)
    before = random_bits(code, numel)
    for place in range(numel):
        after = before.copy()
        after[place] ^= 1
        check(diff(spec, before, after), spec, before, after)


@pytest.mark.parametrize("code", CODES_OF_EACH_WIDTH)
@pytest.mark.parametrize("both", [True, False], ids=["both sides", "one side"])
def test_diff_of_arrays_that_start_anywhere_in_memory_finds_exactly_what_differs(code: str, both: bool):
    for skipped in range(8):
        spec = TensorSpec("w", (100,), code)
        memory = random_bits(code, 100 + skipped)
        baseline = memory[skipped:].copy()
        current = memory if not both else random_bits(code, 100 + skipped)
        current[skipped + 10 :: 7] ^= 1
        view = to_torch(current, TensorSpec("m", (100 + skipped,), code))[skipped:]
        check(diff_tensor(spec, memory[skipped:] if both else baseline, view), spec, baseline, current[skipped:])


@pytest.mark.parametrize(
    ("code", "start"),
    [
        ("F8_E4M3", 2**31 - 4),
        ("BF16", 2**31 - 4),
        ("BF16", 2**31),
        ("BF16", 3 * 2**32 + 7),
        ("F32", 2**31),
        ("I64", 3 * 2**32 + 7),
    ],
)
def test_positions_of_a_piece_far_into_a_large_tensor_are_exact(code: str, start: int):
    spec = TensorSpec("w", (2**35,), code)
    before = random_bits(code, 20)
    after = before.copy()
    after[[0, 3, 4, 19]] ^= 1
    found = diff_piece(Piece(spec, start, before, to_torch(after, TensorSpec("p", (20,), code)), is_last=False))
    assert found is not None
    assert found.positions.dtype == np.int64
    places = [start, start + 3, start + 4, start + 19]
    assert found.positions.tolist() == places
    for values, digested in ((found.old, found.old_digest), (found.new, found.new_digest)):
        assert digested == digest(spec, places, values.tolist())


def test_positions_of_the_last_piece_that_fits_32_bits_are_int32():
    spec = TensorSpec("w", (2**31,), "U8")
    found = diff_piece(Piece(spec, 2**31 - 4, np.zeros(4, np.uint8), torch.ones(4, dtype=torch.uint8), is_last=True))
    assert found is not None
    assert found.positions.dtype == np.int32
    assert found.positions.tolist() == list(range(2**31 - 4, 2**31))


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("numel", [0, 1, 4 * SMALL - 1, 4 * SMALL, 4 * SMALL + 1, 12 * SMALL])
def test_pieces_cover_a_tensor_once_and_the_last_one_says_so(numel: int):
    spec = TensorSpec("w", (numel,), "U8")
    baseline = np.arange(numel).astype(np.uint8)
    made = list(pieces(spec, baseline, torch.from_numpy(baseline.copy())))
    assert [piece.is_last for piece in made] == [False] * (len(made) - 1) + [True]
    assert [piece.start for piece in made] == list(range(0, max(1, numel), 4 * SMALL))
    assert np.concatenate([piece.baseline for piece in made]).tolist() == baseline.tolist()
    assert torch.cat([piece.current for piece in made]).tolist() == baseline.tolist()


@pytest.mark.usefixtures("_small")
def test_pieces_that_differ_are_joined_to_what_the_whole_tensor_is():
    spec = TensorSpec("w", (12 * SMALL,), "BF16")
    before = random_bits("BF16", spec.numel)
    after = before.copy()
    after[[3, 4 * SMALL, 12 * SMALL - 1]] ^= 1
    found = [diff_piece(piece) for piece in pieces(spec, before, to_torch(after, spec))]
    assert all(found)
    check(join_pieces([part for part in found if part]), spec, before, after)
    assert join_pieces(found[:1]) is found[0]


@pytest.mark.usefixtures("_small")
def test_pieces_of_a_tensor_may_be_compared_on_several_threads():
    spec = TensorSpec("w", (400 * SMALL,), "BF16")
    before = random_bits("BF16", spec.numel)
    after = before ^ np.uint16(1)
    found: dict[int, TensorDiff | None] = {}

    def work(part: list[Piece]) -> None:
        found.update({piece.start: diff_piece(piece) for piece in part})

    made = list(pieces(spec, before, to_torch(after, spec)))
    threads = [threading.Thread(target=work, args=(made[number::3],)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(join_pieces([part for _, part in sorted(found.items()) if part]), spec, before, after)


def test_results_of_a_thread_are_not_overwritten_by_its_next_piece():
    spec = TensorSpec("w", (8,), "BF16")
    first = diff(spec, np.zeros(8, np.uint16), np.full(8, 1, np.uint16))
    diff(spec, np.full(8, 7, np.uint16), np.full(8, 9, np.uint16))
    assert first is not None
    assert (first.old.tolist(), first.new.tolist()) == ([0] * 8, [1] * 8)


@pytest.mark.parametrize("value", ["0", "1", None])
def test_kernel_is_used_where_numba_is_and_the_environment_does_not_say_no(
    value: str | None, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("numba")
    monkeypatch.delenv("DELTA_SNAPSHOT_KERNEL", raising=False)
    if value is not None:
        monkeypatch.setenv("DELTA_SNAPSHOT_KERNEL", value)
    assert (_load_kernel.__wrapped__() is None) is (value == "0")


def test_kernel_is_not_used_where_numba_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DELTA_SNAPSHOT_KERNEL", "1")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert _load_kernel.__wrapped__() is None


@pytest.mark.parametrize("step", [2, -1])
def test_kernel_takes_no_strided_arrays(step: int):
    array = np.zeros(64, np.uint16)
    assert Kernel.takes(array, array)
    assert not Kernel.takes(array[::step], array[::step])
    assert not Kernel.takes(array[1:], array[:-1])


def test_threads_that_ask_for_the_kernel_at_once_share_one(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("numba")
    monkeypatch.setenv("DELTA_SNAPSHOT_KERNEL", "1")
    _load_kernel.cache_clear()
    start = threading.Barrier(4, timeout=20)

    def ask(_: int) -> Kernel | None:
        start.wait()
        return load_kernel()

    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(ask, range(4)))
    finally:
        _load_kernel.cache_clear()
    assert found[0] is not None
    assert all(kernel is found[0] for kernel in found)


def test_kernel_that_was_warmed_up_need_not_compile_for_the_diff() -> None:
    kernel = compiled()
    spec = TensorSpec("w", (1000,), "BF16")
    kernel.warm_up([spec])
    known = (len(kernel._find.signatures), len(kernel._digest.signatures))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("trainer_hooks.compare.diff.load_kernel", lambda: kernel)
        assert diff_tensor(spec, np.zeros(1000, np.uint16), torch.ones(1000, dtype=torch.bfloat16)) is not None
    assert (len(kernel._find.signatures), len(kernel._digest.signatures)) == known


@pytest.mark.usefixtures("_small")
def test_chunks_without_a_change_are_passed_over(monkeypatch: pytest.MonkeyPatch):
    if diff_module.load_kernel() is not None:
        pytest.skip("the kernel reads everything once")
    looked: list[int] = []
    real = diff_module._positions

    def positions(current: Bits, baseline: Bits) -> np.ndarray:
        looked.append(current.size)
        return real(current, baseline)

    monkeypatch.setattr(diff_module, "_positions", positions)
    spec = TensorSpec("w", (9 * SMALL + 3,), "BF16")
    before = random_bits("BF16", spec.numel)
    after = before.copy()
    after[[2 * SMALL, 7 * SMALL - 1, spec.numel - 1]] ^= 1
    check(diff(spec, before, after), spec, before, after)
    assert looked == [SMALL, SMALL, 3]


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("code", CODES_OF_EACH_WIDTH)
@pytest.mark.parametrize("step", [2, 3, -1])
def test_baseline_that_is_not_contiguous_gives_the_same(code: str, step: int):
    numel = 5 * SMALL + 3
    spec = TensorSpec("w", (numel,), code)
    before = random_bits(code, abs(step) * numel)[::step]
    after = before.copy()
    after[[0, SMALL, 4 * SMALL - 1, numel - 1]] ^= 1
    assert not before.flags.c_contiguous
    check(diff(spec, before, after), spec, before, after)
    assert diff(spec, before, before.copy()) is None


def test_arrays_are_equal_only_if_every_bit_is_and_strided_ones_are_not_compared():
    bits = special_bits("F32")
    other = bits.copy()
    assert diff_module._is_equal(bits, other)
    other[-1] ^= 1
    assert not diff_module._is_equal(bits, other)
    assert diff_module._is_equal(bits[:0], other[:0])
    assert not diff_module._is_equal(bits[::2], bits[::2])
