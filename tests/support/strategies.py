"""What hypothesis draws: tensors of every type, their bits, and patches."""

from __future__ import annotations

from functools import cache

import numpy as np
from hypothesis import strategies as st

from tests.support.tensors import special_bits
from vllm_delta_snapshot.dtypes import ALL_CODES, Bits
from vllm_delta_snapshot.types import Positions, TensorPatch, TensorSpec, position_dtype

codes = st.sampled_from(ALL_CODES)
shapes = st.one_of(
    st.just(()),
    st.sampled_from([(0,), (0, 3), (2, 0)]),
    st.tuples(st.integers(1, 40)),
    st.tuples(st.integers(1, 6), st.integers(1, 6)),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
)
specs = st.builds(TensorSpec, st.sampled_from(["w", "model.layers.0.w", "é"]), shapes, codes)


seeds = st.integers(0, 2**32 - 1)
"""Where values come from: drawing each of them takes far longer than what is tested."""


@cache
def _special(code: str) -> Bits:
    return special_bits(code)


def _bits(spec: TensorSpec, count: int, seed: int) -> Bits:
    rng = np.random.default_rng(seed)
    top = 1 if spec.dtype == "BOOL" else (1 << (8 * spec.element.itemsize)) - 1
    anything = rng.integers(0, top, count, spec.element.bits, endpoint=True)
    return np.where(rng.random(count) < 0.5, rng.choice(_special(spec.dtype), count), anything)


def _positions(spec: TensorSpec, share: float, seed: int) -> Positions:
    is_in = np.random.default_rng(seed).random(spec.numel) < share
    return np.flatnonzero(is_in).astype(position_dtype(spec.numel))


def bits_for(spec: TensorSpec, count: int) -> st.SearchStrategy[Bits]:
    """Draw `count` bit patterns for a tensor: special ones and any others."""
    return st.builds(_bits, st.just(spec), st.just(count), seeds)


@st.composite
def patches_for(draw: st.DrawFn, spec: TensorSpec) -> TensorPatch:
    """Draw a patch of a (small) tensor: none, some or all of its elements."""
    positions = _positions(spec, draw(st.sampled_from([0.0, 0.05, 0.3, 0.8, 1.0])), draw(seeds))
    return TensorPatch(spec, positions, draw(bits_for(spec, positions.size)))
