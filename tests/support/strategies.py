"""What hypothesis draws: tensors of every type, their bits, and patches."""

from __future__ import annotations

from functools import cache

import numpy as np
from hypothesis import strategies as st

from tests.support.tensors import special_bits
from vllm_delta_snapshot.dtypes import ALL_CODES, Bits, dtype_of
from vllm_delta_snapshot.types import TensorPatch, TensorSpec, position_dtype

codes = st.sampled_from(ALL_CODES)
shapes = st.one_of(
    st.just(()),
    st.sampled_from([(0,), (0, 3), (2, 0)]),
    st.tuples(st.integers(1, 40)),
    st.tuples(st.integers(1, 6), st.integers(1, 6)),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
)
specs = st.builds(TensorSpec, st.sampled_from(["w", "model.layers.0.w", "é"]), shapes, codes)


@cache
def _patterns(code: str) -> st.SearchStrategy[int]:
    """Return what draws special bit patterns of a type and any others; made once, which takes longer than a draw."""
    top = 1 if code == "BOOL" else (1 << (8 * dtype_of(code).itemsize)) - 1
    return st.one_of(st.sampled_from(special_bits(code).tolist()), st.integers(0, top))


@st.composite
def bits_for(draw: st.DrawFn, spec: TensorSpec, count: int) -> Bits:
    """Draw `count` bit patterns for a tensor: special ones and any others."""
    patterns = st.lists(_patterns(spec.dtype), min_size=count, max_size=count)
    return np.array(draw(patterns), dtype=spec.element.bits)


@st.composite
def patches_for(draw: st.DrawFn, spec: TensorSpec) -> TensorPatch:
    """Draw a patch of a (small) tensor: none, some or all of its elements."""
    positions = sorted(draw(st.sets(st.integers(0, spec.numel - 1)))) if spec.numel else []
    values = draw(bits_for(spec, len(positions)))
    return TensorPatch(spec, np.array(positions, dtype=position_dtype(spec.numel)), values)
