"""Adapters on sharded models that need vLLM to be imported; see tests/unit/test_sharded_integrations.py."""

import importlib.util
from pathlib import Path

import pytest

from tests.support.played_adapters import play, wrong_tensors

needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")


@pytest.mark.parametrize("name", ["vllm", pytest.param("trl", marks=needs_trl)])
def test_every_rank_publishes_its_part_and_the_first_drives_the_engines(name: str, tmp_path: Path) -> None:
    ranks = play(tmp_path, name)[name]
    assert [(of_rank["version"], of_rank["served"]) for of_rank in ranks] == [(2, [1, 2]), (2, [])]
    assert wrong_tensors(tmp_path / name, 2, tmp_path / "out") == []
