"""Changes that an encoding can write, what a container makes of an encoded block, and zstd frames that lie."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from tests.support.tensors import random_bits, rng_of, same_patch, special_bits
from vllm_delta_snapshot.dtypes import ALL_CODES, Bits, dtype_of
from vllm_delta_snapshot.format.encodings import Encoding
from vllm_delta_snapshot.format.encodings.base import Parts, Stated
from vllm_delta_snapshot.types import Change, TensorDifference, TensorPatch, TensorSpec, position_dtype

_BITMAP_ELEMENTS = 1 << 24


def is_dense(encoding: Encoding) -> bool:
    """Say whether an encoding writes only tensors of which all elements change."""
    return encoding.name.startswith("dense")


def takes(encoding: Encoding, changes: Sequence[Change]) -> bool:
    """Say whether an encoding can write these changes, in an amount of memory that a test may use."""
    if len(changes) != 1 and not encoding.is_joint:
        return False
    if is_dense(encoding):
        return all(change.changed == change.spec.numel for change in changes)
    few = sum(change.spec.numel for change in changes) <= _BITMAP_ELEMENTS
    return few or not encoding.name.startswith("bitmap")


def of_kind(encoding: Encoding, patch: TensorPatch) -> Change:
    """Return the change that the encoding writes, with the arrays of a patch."""
    return TensorDifference(patch.spec, patch.positions, patch.values) if encoding.is_difference else patch


def change_at(encoding: Encoding, spec: TensorSpec, positions: Sequence[int] | range) -> Change:
    """Return a change at these positions. Half of the values are +1 or -1, the others are any."""
    array = np.array(positions, dtype=position_dtype(spec.numel))
    values = random_bits(spec.dtype, len(positions), spec, len(positions))
    if spec.dtype != "BOOL":
        rng = rng_of(spec, len(positions))
        top = (1 << (8 * spec.element.itemsize)) - 1
        small = rng.choice(np.array([1, top], spec.element.bits), len(positions))
        values = np.where(rng.random(len(positions)) < 0.5, small, values)
    return of_kind(encoding, TensorPatch(spec, array, values))


def example(encoding: Encoding, *, name: str = "w", code: str = "BF16") -> Change:
    """Return a change of a hundred elements."""
    if is_dense(encoding):
        return change_at(encoding, TensorSpec(name, (10, 10), code), range(100))
    positions = np.sort(rng_of(name).choice(1000, 100, replace=False))
    return change_at(encoding, TensorSpec(name, (1000,), code), positions.tolist())


def example_block(encoding: Encoding) -> list[Change]:
    """Return a block: three tensors if it may hold several."""
    names = ("w", "model.v", "é") if encoding.is_joint else ("w",)
    return [example(encoding, name=name) for name in names]


def as_read(parts: Parts) -> dict[str, tuple[str, np.ndarray]]:
    """Return parts as a container gives them: flat, unsigned, read-only, in memory of their own."""
    read = {}
    for name, (code, array) in parts.items():
        bits = np.frombuffer(np.ascontiguousarray(array).tobytes(), dtype=dtype_of(code).bits)
        read[name] = (code, bits)
    return read


def bytes_of(parts: Parts) -> dict[str, tuple[str, bytes]]:
    """Return parts to be compared."""
    return {name: (code, array.tobytes()) for name, (code, array) in parts.items()}


def stated_of(changes: Sequence[Change]) -> list[Stated]:
    """Return what metadata says of changes."""
    return [Stated(change.spec, change.changed) for change in changes]


def round_trip(encoding: Encoding, changes: Sequence[Change]) -> list[Change]:
    """Encode, and decode what was read."""
    return encoding.decode(stated_of(changes), as_read(encoding.encode(changes)))


def same_change(one: Change, other: Change) -> bool:
    """Say whether two changes are of one kind and the same in tensor, positions, bits and mask."""
    masks = [getattr(change, "absolute", None) for change in (one, other)]
    lists = [None if mask is None else mask.tolist() for mask in masks]
    return type(one) is type(other) and lists[0] == lists[1] and same_patch(one, other)


def assert_same_changes(found: Sequence[Change], expected: Sequence[Change]) -> None:
    """Compare two lists of changes."""
    assert [change.spec for change in found] == [change.spec for change in expected]
    assert all(same_change(f, e) for f, e in zip(found, expected, strict=True))


def assert_valid(stated: Sequence[Stated], changes: Sequence[Change]) -> None:
    """Check what `decode` may return for any bytes at all."""
    assert [(change.spec, change.changed) for change in changes] == [(item.spec, item.changed) for item in stated]
    for change in changes:
        assert change.positions.shape == change.values.shape == (change.changed,)
        assert change.positions.dtype in (np.int32, np.int64)
        assert change.values.dtype == change.spec.element.bits
        assert np.all(np.diff(change.positions.astype(np.int64)) > 0)
        assert not change.changed or 0 <= change.positions[0] <= change.positions[-1] < change.spec.numel
        mask = getattr(change, "absolute", None)
        assert mask is None or (mask.dtype == np.bool_ and mask.shape == (change.changed,))


@functools.cache
def _special(code: str) -> Bits:
    return special_bits(code)


def any_change(encoding: Encoding, spec: TensorSpec, share: float, rng: np.random.Generator) -> Change:
    """Return a change of about a share of a tensor: of any values, special ones, and +1 and -1."""
    share = 1.0 if is_dense(encoding) else share
    positions = np.flatnonzero(rng.random(spec.numel) < share).astype(position_dtype(spec.numel))
    top = 1 if spec.dtype == "BOOL" else (1 << (8 * spec.element.itemsize)) - 1
    kinds = [
        rng.integers(0, top, positions.size, spec.element.bits, endpoint=True),
        rng.choice(_special(spec.dtype), positions.size),
        np.full(positions.size, 1, spec.element.bits),
        np.full(positions.size, top, spec.element.bits),
    ]
    patch = TensorPatch(spec, positions, np.choose(rng.integers(0, len(kinds), positions.size), kinds))
    if encoding.name == "raw_difference" and rng.random() < 0.5:
        return TensorDifference(spec, positions, patch.values, rng.random(positions.size) < 0.5)
    return of_kind(encoding, patch)


_SHAPES = ((), (0,), (2, 0), (1,), (5,), (8,), (40,), (3, 5), (2, 3, 4), (70_001,))
_SHARES = (0.0, 0.05, 0.3, 0.8, 1.0)


def any_block(encoding: Encoding, width: int, shapes: Sequence[tuple[int, ...]], seed: int) -> list[Change]:
    """Return a block of tensors of these shapes and of any types of this width."""
    rng = np.random.default_rng(seed)
    codes = [code for code in ALL_CODES if dtype_of(code).itemsize == width]
    specs = [TensorSpec(f"w{i}", shape, str(rng.choice(codes))) for i, shape in enumerate(shapes)]
    # Few changes in the largest shape: it is there for its gaps.
    shares = [rng.choice(_SHARES) if spec.numel < 100 else 0.0001 for spec in specs]
    return [any_change(encoding, spec, share, rng) for spec, share in zip(specs, shares, strict=True)]


def blocks_for(encoding: Encoding) -> st.SearchStrategy[list[Change]]:
    """Draw blocks of changes of one width that the encoding can write.

    Values come from a drawn seed: drawing each of them takes far longer than what is tested.
    """
    return st.builds(
        any_block,
        st.just(encoding),
        st.sampled_from([1, 2, 4, 8]),
        st.lists(st.sampled_from(_SHAPES[: -1 if is_dense(encoding) else None]), min_size=1, max_size=_most(encoding)),
        st.integers(0, 2**32 - 1),
    )


def _most(encoding: Encoding) -> int:
    return 4 if encoding.is_joint else 1


def claiming_frame(size: int, blocks: bytes = b"\x01\x00\x00") -> np.ndarray:
    """Return a zstd frame whose header claims `size` bytes; its blocks hold none, or what is given."""
    return np.frombuffer(b"\x28\xb5\x2f\xfd\xe0" + size.to_bytes(8, "little") + blocks, np.uint8)
