"""The CPU's matrix product of plain weights: the same numbers as torch's, whatever the processor has."""

from __future__ import annotations

import pytest
import torch

from vllm_delta_snapshot.engine import cpu_linear
from vllm_delta_snapshot.engine.cpu_linear import plain_linear


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 7), (5, 7), (2, 3, 7), (0, 7)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_widened_product_is_the_rounded_exact_one(
    dtype: torch.dtype, shape: tuple[int, ...], has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_linear, "_is_fast", lambda _: False)
    monkeypatch.setattr(cpu_linear, "_BLOCK_ELEMENTS", 21)  # three rows a block, the last one short
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(dtype)
    weight = torch.randn(11, 7, generator=generator).to(dtype)
    bias = torch.randn(11, generator=generator).to(dtype) if has_bias else None
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(plain_linear(x, weight, bias), exact.to(dtype))


def test_product_sees_a_weight_that_changed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "_is_fast", lambda _: False)
    x, weight = torch.ones(8, 4).bfloat16(), torch.zeros(3, 4).bfloat16()
    assert plain_linear(x, weight).sum() == 0
    weight.add_(1)
    assert torch.equal(plain_linear(x, weight), torch.full((8, 3), 4.0).bfloat16())


def test_full_precision_goes_to_torch() -> None:
    x, weight = torch.randn(8, 4), torch.randn(3, 4)
    assert torch.equal(plain_linear(x, weight), torch.nn.functional.linear(x, weight))
