"""The table of `doctor --model`: what a real engine would do with each tensor, refused ones included."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import tests.support.engines  # noqa: F401 - sets vLLM's environment
from tests.support.tiny_models import make_model
from vllm_delta_snapshot.engine.table import apply_table


@pytest.mark.parametrize(
    ("options", "ways"), [({}, {"scatter": 25}), ({"quantization": "fp8_per_channel"}, {"reload": 14, "scatter": 11})]
)
def test_each_tensor_has_its_way(options: dict[str, str], ways: dict[str, int], tmp_path: Path) -> None:
    make_model("qwen3", tmp_path / "base")
    choices = apply_table(str(tmp_path / "base"), options)
    assert Counter(choice.way for choice in choices.values()) == ways
    assert all(bool(choice.reason) == (choice.way == "reload") for choice in choices.values())
