"""Which encoding a change gets: what a policy allows, and what is the smallest."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.encodings import as_read, is_dense
from tests.support.tensors import random_bits, rng_of
from vllm_delta_snapshot.dtypes import ALL_CODES, Bits
from vllm_delta_snapshot.errors import UnsupportedFormat
from vllm_delta_snapshot.format.blocks import Block, Placed, encode_block
from vllm_delta_snapshot.format.choose import POLICIES, Chosen, choose, encodings_of
from vllm_delta_snapshot.format.encodings import ENCODINGS, encoding_of
from vllm_delta_snapshot.format.encodings.base import Stated
from vllm_delta_snapshot.types import Positions, TensorDifference, TensorSpec, position_dtype

each_policy = pytest.mark.parametrize("policy", POLICIES)


def change(spec: TensorSpec, share: float, kind: str, seed: int = 0) -> tuple[Positions, Bits, Bits]:
    """Return positions, old and new values: a `step` of training, weights `replaced` by others, or `any` bits."""
    rng = rng_of(spec, share, kind, seed)
    count = round(share * spec.numel)
    positions = np.sort(rng.permutation(spec.numel)[:count]).astype(position_dtype(spec.numel))
    if kind == "any":
        return positions, random_bits(spec.dtype, count, seed, "old"), random_bits(spec.dtype, count, seed, "new")
    old, other = ((rng.normal(0, 0.02, count).astype("<f4").view("<u4") >> 16).astype("<u2") for _ in range(2))
    if kind == "replaced":
        return positions, old, other
    moves = np.where(rng.random(count) < 0.97, rng.choice([1, 0xFFFF], count), rng.integers(2, 40, count))
    return positions, old, old + moves.astype("<u2")


def choose_for(policy: str, spec: TensorSpec, positions: Positions, old: Bits, new: Bits) -> tuple[Chosen, str, int]:
    """Return what is chosen, the encoding it is written in, and its bytes; check that it brings the new values."""
    chosen = choose(policy, spec, positions, old, new)
    [block] = encode_block(Block(chosen.encoding, (Placed(0, chosen.change, chosen.encoding),)))
    stated = [Stated(spec, positions.size)]
    [found] = encoding_of(block.encoding).decode(stated, as_read(block.parts))
    patch = found.resolve(old) if isinstance(found, TensorDifference) else found
    assert patch.positions.tolist() == positions.tolist()
    assert patch.values.tolist() == new.tolist()
    return chosen, block.encoding, block.num_bytes


@each_policy
@given(
    st.sampled_from(ALL_CODES),
    st.sampled_from([(), (0,), (1,), (7,), (5, 8), (33, 33)]),
    st.sampled_from([0.0, 0.01, 0.12, 0.13, 0.5, 1.0]),
    st.integers(0, 9),
)
def test_every_choice_is_allowed_and_brings_the_new_values(
    policy: str, code: str, shape: tuple[int, ...], share: float, seed: int
):
    spec = TensorSpec("w", shape, code)
    chosen, written, _ = choose_for(policy, spec, *change(spec, share, "any", seed))
    assert {chosen.encoding, written} <= set(encodings_of(policy))


@each_policy
def test_every_choice_for_a_large_tensor_brings_the_new_values(policy: str):
    spec = TensorSpec("w", (200, 200), "BF16")
    for kind in ("step", "replaced"):
        for share in (0.001, 0.02, 0.3, 1.0):
            choose_for(policy, spec, *change(spec, share, kind))


@pytest.mark.parametrize("name", ENCODINGS)
def test_encoding_that_is_forced_is_chosen(name: str):
    spec = TensorSpec("w", (200, 200), "BF16")
    for kind in ("step", "replaced"):
        for share in (1.0,) if is_dense(encoding_of(name)) else (0.002, 0.3, 1.0):
            chosen = choose(name, spec, *change(spec, share, kind))
            assert chosen.encoding == name
            assert isinstance(chosen.change, TensorDifference) == encoding_of(name).is_difference


def test_dense_is_only_for_tensors_of_which_all_elements_change():
    spec = TensorSpec("w", (200, 200), "BF16")
    positions, old, new = change(spec, 1.0, "step")
    few = slice(0, None, 50)
    assert choose("dense", spec, positions[1:], old[1:], new[1:]).encoding == "bitmap"
    assert choose("dense", spec, positions[few], old[few], new[few]).encoding == "packed"
    assert choose("dense_difference", spec, positions[1:], old[1:], new[1:]).encoding == "bitmap_difference"
    assert choose("dense_difference", spec, positions[few], old[few], new[few]).encoding == "difference"


BY_DENSITY = [(0, "packed"), (1, "packed"), (99, "packed"), (100, "bitmap"), (799, "bitmap"), (800, "dense")]


@pytest.mark.parametrize(("changed", "expected"), BY_DENSITY)
def test_absolute_policy_chooses_by_density(changed: int, expected: str):
    spec = TensorSpec("w", (800,), "BF16")
    positions, old, new = change(spec, changed / 800, "step")
    assert positions.size == changed
    assert choose("absolute", spec, positions, old, new).encoding == expected


@pytest.mark.parametrize(("changed", "expected"), BY_DENSITY)
def test_automatic_policy_chooses_differences_of_a_step_by_density(changed: int, expected: str):
    spec = TensorSpec("w", (800,), "BF16")
    name = {"packed": "difference"}.get(expected, f"{expected}_difference")
    assert choose("auto", spec, *change(spec, changed / 800, "step")).encoding == name


@pytest.mark.parametrize(("share", "expected"), [(0.01, "packed"), (0.3, "bitmap"), (1.0, "dense")])
def test_automatic_policy_writes_replaced_tensors_as_they_are(share: float, expected: str):
    spec = TensorSpec("w", (300, 300), "BF16")
    assert choose("auto", spec, *change(spec, share, "replaced")).encoding == expected


@pytest.mark.parametrize("code", ["U8", "BF16", "F32", "F64"])
def test_automatic_policy_writes_noise_as_it_is(code: str):
    spec = TensorSpec("w", (100, 100), code)
    assert choose("auto", spec, *change(spec, 1.0, "any")).encoding == "dense"


def test_tensor_that_becomes_one_value_is_written_as_it_is():
    spec = TensorSpec("w", (100, 100), "BF16")
    positions, old, new = change(spec, 1.0, "replaced")
    assert choose("auto", spec, positions, old, np.zeros_like(new)).encoding == "dense"


@pytest.mark.parametrize("kind", ["step", "replaced"])
@pytest.mark.parametrize("share", [0.002, 0.1, 0.2, 1.0])
@pytest.mark.parametrize("policy", ["auto", "absolute"])
def test_choice_is_nearly_the_smallest_that_is_allowed(policy: str, kind: str, share: float):
    spec = TensorSpec("w", (300, 300), "BF16")
    moved = change(spec, share, kind)
    _, _, found = choose_for(policy, spec, *moved)
    assert found <= 1.06 * min(choose_for(name, spec, *moved)[2] for name in encodings_of(policy))


@pytest.mark.parametrize("policy", ["absolute", "raw", "packed", "bitmap", "dense"])
def test_policies_for_receivers_without_old_values_allow_no_differences(policy: str):
    assert not any(encoding_of(name).is_difference for name in encodings_of(policy))


def test_automatic_policy_allows_every_encoding():
    assert set(encodings_of("auto")) == set(ENCODINGS)


def test_every_encoding_is_a_policy_that_allows_it():
    assert all(name in encodings_of(name) for name in ENCODINGS)
    assert set(POLICIES) == {"auto", "absolute", *ENCODINGS}


@pytest.mark.parametrize("policy", ["", "zip", "Auto", "raw "])
def test_unknown_policy_is_unsupported(policy: str):
    with pytest.raises(UnsupportedFormat, match="unknown encoding") as caught:
        encodings_of(policy)
    assert "auto" in str(caught.value.expected)
    with pytest.raises(UnsupportedFormat, match="unknown encoding"):
        choose(policy, TensorSpec("w", (0,), "U8"), np.empty(0, np.int32), np.empty(0, np.uint8), np.empty(0, np.uint8))
