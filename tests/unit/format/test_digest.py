"""The state digest: additive, tied to every element's place, and equal to a second implementation."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import reference
from tests.support.strategies import bits_for, patches_for, specs
from tests.support.tensors import apply_by_hand, random_bits, random_patch, special_bits
from vllm_delta_snapshot.dtypes import ALL_CODES, Bits
from vllm_delta_snapshot.format.digest import (
    add_digests,
    file_digest,
    format_digest,
    patch_digest,
    seeded_digests,
    state_digest,
    tensor_digest,
    term_seeds,
)
from vllm_delta_snapshot.types import TensorPatch, TensorSpec

CHUNK = 65536
BORDERS = (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1)


def all_positions(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32)


def test_digest_of_no_elements_is_zero():
    assert tensor_digest(TensorSpec("w", (0, 4), "BF16"), np.zeros(0, np.uint16)) == 0


def test_digest_of_zeros_is_not_zero():
    assert tensor_digest(TensorSpec("w", (4,), "BF16"), np.zeros(4, np.uint16)) != 0


@pytest.mark.parametrize("code", ALL_CODES)
def test_tensor_digest_of_special_patterns_equals_reference(code: str):
    bits = special_bits(code)[:300]
    spec = TensorSpec("model.w", (bits.size,), code)
    expected = reference.digest(spec, list(range(bits.size)), bits.tolist())
    assert tensor_digest(spec, bits) == expected


@given(st.data())
def test_patch_digest_of_any_patch_equals_reference(data: st.DataObject):
    patch = data.draw(specs.flatmap(patches_for))
    expected = reference.digest(patch.spec, patch.positions.tolist(), patch.values.tolist())
    assert patch_digest(patch.spec, patch.positions, patch.values) == expected


def test_patch_digest_of_int64_positions_past_2_to_31_equals_reference():
    spec = TensorSpec("w", (3_000_000_000,), "BF16")
    patch = random_patch(spec, 50, "far")
    assert patch.positions.dtype == np.int64
    expected = reference.digest(spec, patch.positions.tolist(), patch.values.tolist())
    assert patch_digest(spec, patch.positions, patch.values) == expected


def test_patch_digest_does_not_depend_on_the_width_of_positions():
    spec = TensorSpec("w", (1000,), "BF16")
    patch = random_patch(spec, 100)
    wide = patch_digest(spec, patch.positions.astype(np.int64), patch.values)
    assert wide == patch_digest(spec, patch.positions, patch.values)


@pytest.mark.parametrize("count", BORDERS)
def test_tensor_digest_at_chunk_borders_equals_sum_of_single_elements(count: int):
    spec = TensorSpec("w", (count,), "BF16")
    bits = random_bits("BF16", count)
    near = [p for border in (0, CHUNK, 2 * CHUNK) for p in range(border - 3, border + 3) if 0 <= p < count]
    rest = np.setdiff1d(all_positions(count), np.array(near, dtype=np.int32)).astype(np.int32)
    by_hand = reference.digest(spec, near, bits[near].tolist())
    assert tensor_digest(spec, bits) == add_digests(by_hand, patch_digest(spec, rest, bits[rest]))


@pytest.mark.parametrize("count", BORDERS)
def test_patch_digest_of_all_elements_at_chunk_borders_equals_tensor_digest(count: int):
    spec = TensorSpec("w", (count,), "F32")
    bits = random_bits("F32", count)
    assert patch_digest(spec, all_positions(count), bits) == tensor_digest(spec, bits)


@given(st.data())
def test_digest_updated_by_a_patch_equals_full_recompute(data: st.DataObject):
    spec = data.draw(specs)
    before = data.draw(bits_for(spec, spec.numel))
    patch = data.draw(patches_for(spec))
    old = patch_digest(spec, patch.positions, before[patch.positions])
    new = patch_digest(spec, patch.positions, patch.values)
    moved = add_digests(tensor_digest(spec, before), new, -old)
    assert moved == tensor_digest(spec, apply_by_hand(before, patch))


def test_digest_of_a_split_patch_is_the_sum_of_its_parts():
    spec = TensorSpec("w", (1000,), "F16")
    patch = random_patch(spec, 100)
    parts = [patch_digest(spec, patch.positions[i::3], patch.values[i::3]) for i in range(3)]
    assert add_digests(*parts) == patch_digest(spec, patch.positions, patch.values)


def seeded(patches: list[TensorPatch]) -> list[int]:
    """The digests of runs that follow each other, as a lane has them."""
    seeds = np.concatenate([term_seeds(p.spec, p.positions) for p in patches])
    bits = np.concatenate([p.values for p in patches])
    starts = np.cumsum([0, *(p.changed for p in patches[:-1])])
    return seeded_digests(seeds, bits, starts).tolist()


@pytest.mark.parametrize("code", ALL_CODES)
def test_seeded_digests_of_special_patterns_equal_the_patches(code: str):
    bits = special_bits(code)
    spec = TensorSpec("w", (bits.size,), code)
    patches = [TensorPatch(spec, all_positions(bits.size), bits), TensorPatch(spec, all_positions(1), bits[:1])]
    assert seeded(patches) == [patch_digest(p.spec, p.positions, p.values) for p in patches]


near_borders = st.one_of(st.integers(1, 9), st.sampled_from([s for s in BORDERS if s]), st.integers(1, 3 * CHUNK))


@settings(max_examples=60)
@given(st.sampled_from(["I8", "BF16", "F32", "F64"]), st.lists(near_borders, min_size=1, max_size=6))
def test_seeded_digests_of_any_runs_equal_the_patches(code: str, sizes: list[int]):
    patches = [random_patch(TensorSpec(f"{i}", (size + 7,), code), size) for i, size in enumerate(sizes)]
    assert seeded(patches) == [patch_digest(p.spec, p.positions, p.values) for p in patches]


@pytest.mark.parametrize("sizes", [[CHUNK] * 2, [CHUNK, 1, CHUNK - 1, 1], [1] * (CHUNK + 2), [2 * CHUNK, 1]], ids=len)
def test_seeded_digests_of_runs_that_end_at_chunk_borders_equal_the_patches(sizes: list[int]):
    whole = random_patch(TensorSpec("w", (sum(sizes),), "BF16"), sum(sizes))
    starts = np.cumsum([0, *sizes[:-1]])
    found = seeded_digests(term_seeds(whole.spec, whole.positions), whole.values, starts)
    some = np.unique(np.r_[0 : len(sizes) : 1 + len(sizes) // 50, len(sizes) - 3 : len(sizes)].clip(0))
    for run in some.tolist():
        part = slice(starts[run], starts[run] + sizes[run])
        assert int(found[run]) == patch_digest(whole.spec, whole.positions[part], whole.values[part])
    assert add_digests(*found.tolist()) == patch_digest(whole.spec, whole.positions, whole.values)


def test_seeded_digests_of_no_runs_are_none():
    nothing = np.zeros(0, np.uint64)
    assert seeded_digests(nothing, np.zeros(0, np.uint16), np.zeros(0, np.int64)).tolist() == []


def test_term_seeds_of_positions_past_32_bits_equal_reference():
    spec = TensorSpec("w", (2**34,), "BF16")
    patch = random_patch(spec, 50, "far")
    assert seeded([patch]) == [reference.digest(spec, patch.positions.tolist(), patch.values.tolist())]


def state(seed: int = 0) -> list[tuple[TensorSpec, Bits]]:
    table = [TensorSpec(f"w{i}", (257 * (i + 1),), code) for i, code in enumerate(ALL_CODES)]
    return [(spec, random_bits(spec.dtype, spec.numel, seed)) for spec in table]


def test_state_digest_is_the_sum_over_tensors():
    assert state_digest(state()) == add_digests(*(tensor_digest(*item) for item in state()))


def test_state_digest_does_not_depend_on_the_order_of_tensors():
    assert state_digest(state()) == state_digest(reversed(state()))


@pytest.mark.parametrize("threads", [0, 1, 2, 7])
def test_state_digest_does_not_depend_on_the_number_of_threads(threads: int):
    assert state_digest(state(), threads=threads) == state_digest(state())


def test_tensor_digest_from_many_threads_at_once_is_the_same():
    spec, bits = TensorSpec("w", (200_000,), "BF16"), random_bits("BF16", 200_000)
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: tensor_digest(spec, bits), range(8)))
    assert found == {tensor_digest(spec, bits)}


def patched(positions: list[int], values: list[int]) -> int:
    spec = TensorSpec("w", (1000,), "BF16")
    return patch_digest(spec, np.array(positions, dtype=np.int32), np.array(values, dtype=np.uint16))


@pytest.mark.parametrize(
    ("positions", "values"),
    [
        pytest.param([1, 5, 9], [10, 11, 13], id="wrong value"),
        pytest.param([1, 5, 9], [11, 10, 12], id="swapped values"),
        pytest.param([1, 6, 9], [10, 11, 12], id="misplaced"),
        pytest.param([2, 6, 10], [10, 11, 12], id="shifted"),
        pytest.param([1, 5], [10, 11], id="missed"),
        pytest.param([1, 5, 9, 9], [10, 11, 12, 12], id="doubled"),
        pytest.param([1, 5, 9, 10], [10, 11, 12, 0], id="one too many"),
    ],
)
def test_patch_digest_of_a_wrong_update_differs(positions: list[int], values: list[int]):
    assert patched(positions, values) != patched([1, 5, 9], [10, 11, 12])


@pytest.mark.parametrize(
    "other",
    [
        TensorSpec("v", (4, 6), "BF16"),
        TensorSpec("w", (6, 4), "BF16"),
        TensorSpec("w", (24,), "BF16"),
        TensorSpec("w", (4, 6), "F16"),
        TensorSpec("w", (4, 6), "U16"),
    ],
    ids=str,
)
def test_tensor_digest_of_the_same_bits_in_another_tensor_differs(other: TensorSpec):
    bits = random_bits("BF16", 24)
    assert tensor_digest(TensorSpec("w", (4, 6), "BF16"), bits) != tensor_digest(other, bits)


@pytest.mark.parametrize("bit", range(16))
def test_tensor_digest_of_one_flipped_bit_differs(bit: int):
    spec, bits = TensorSpec("w", (100,), "BF16"), random_bits("BF16", 100)
    flipped = bits.copy()
    flipped[37] ^= np.uint16(1 << bit)
    assert tensor_digest(spec, flipped) != tensor_digest(spec, bits)


def test_tensor_digest_of_minus_zero_differs_from_zero():
    spec = TensorSpec("w", (1,), "F32")
    minus = np.array([0x80000000], dtype=np.uint32)
    assert tensor_digest(spec, minus) != tensor_digest(spec, np.zeros(1, np.uint32))


def test_tensor_digest_of_an_unaligned_view_equals_that_of_a_copy():
    raw = np.frombuffer(b"x" + random_bits("F32", 100).tobytes(), dtype=np.uint8)
    view = raw[1:].view(np.uint32)
    spec = TensorSpec("w", (100,), "F32")
    assert tensor_digest(spec, view) == tensor_digest(spec, view.copy())


def test_add_digests_of_a_digest_and_its_negative_is_zero():
    assert add_digests(5, -5) == 0


def test_add_digests_wraps_at_64_bits():
    assert add_digests(2**64 - 1, 2) == 1


def test_format_digest_pads_to_16_digits():
    assert format_digest(0xAB) == "00000000000000ab"


def test_format_digest_of_a_negative_number_wraps():
    assert format_digest(-1) == "f" * 16


def test_file_digest_of_a_file_longer_than_a_block_is_its_xxh3_128(tmp_path):
    data = bytes(range(256)) * 20_000
    (tmp_path / "f").write_bytes(data)
    assert file_digest(tmp_path / "f") == xxhash.xxh3_128_hexdigest(data)


def test_digest_leaves_its_arguments_alone():
    spec = TensorSpec("w", (1000,), "BF16")
    patch: TensorPatch = random_patch(spec, 100)
    positions, values = patch.positions.copy(), patch.values.copy()
    patch_digest(spec, patch.positions, patch.values)
    assert (patch.positions.tolist(), patch.values.tolist()) == (positions.tolist(), values.tolist())
