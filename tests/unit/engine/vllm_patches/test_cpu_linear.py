"""The CPU's matrix product of plain weights: the exact one's numbers, but for rounding, whatever the processor has."""

from __future__ import annotations

import pytest
import torch

from tests.support.rounding import Bounded
from vllm_delta_snapshot.engine.vllm_patches import cpu_linear
from vllm_delta_snapshot.engine.vllm_patches.cpu_linear import (
    is_plain_product,
    linear_for,
    plain_linear,
    widened_linear,
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 7), (5, 7), (2, 3, 7), (0, 7)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_widened_product_is_the_rounded_exact_one(
    dtype: torch.dtype, shape: tuple[int, ...], has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_linear, "_BLOCK_ELEMENTS", 21)  # three rows a block, the last one short
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(dtype)
    weight = torch.randn(11, 7, generator=generator).to(dtype)
    bias = torch.randn(11, generator=generator).to(dtype) if has_bias else None
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(widened_linear(x, weight, bias), exact.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 33])
def test_product_of_this_processor_is_within_what_rounding_allows(dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 257, generator=generator).to(dtype)
    weight = torch.randn(65, 257, generator=generator).to(dtype)
    exact = Bounded.of(x).linear(weight, dtype)
    for linear in (linear_for(dtype), plain_linear, widened_linear):
        assert exact.holds(linear(x, weight, None))
    assert not exact.holds(plain_linear(x, weight.roll(1, 0)))


@pytest.mark.parametrize("is_fast", [False, True])
def test_what_a_layer_is_set_up_with_is_decided_at_once(is_fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "_is_fast", lambda _: is_fast)
    linear = linear_for(torch.bfloat16)
    monkeypatch.setattr(cpu_linear, "_is_fast", lambda _: pytest.fail("asked while the layer runs"))
    x, weight = torch.ones(8, 4).bfloat16(), torch.zeros(3, 4).bfloat16()
    assert linear(x, weight, None).sum() == 0
    weight.add_(1)  # a product that had kept the weight would not see this
    assert torch.equal(linear(x, weight, None), torch.full((8, 3), 4.0).bfloat16())
    assert is_plain_product(linear)
    assert not is_plain_product(lambda x, weight, bias: linear(x, weight, bias))


def test_product_is_one_operator_for_a_compiler_whatever_the_rows() -> None:
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    compiled = torch.compile(widened_linear, fullgraph=True, dynamic=True, backend=backend)
    weight = torch.randn(3, 4).bfloat16()
    for rows in (2, 7, 31):
        x = torch.randn(rows, 4).bfloat16()
        assert torch.equal(compiled(x, weight, None), widened_linear(x, weight, None))
    assert seen == ["delta_snapshot.widened_linear"]


def test_operator_is_what_it_says() -> None:
    x, weight = torch.randn(8, 4).bfloat16(), torch.randn(3, 4).bfloat16()
    torch.library.opcheck(
        torch.ops.delta_snapshot.widened_linear.default,
        (x, weight, None),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_full_precision_goes_to_torch() -> None:
    assert linear_for(torch.float32) is torch.nn.functional.linear
    x, weight = torch.randn(8, 4), torch.randn(3, 4)
    assert torch.equal(plain_linear(x, weight), torch.nn.functional.linear(x, weight))
