"""Adapters on sharded models that need vLLM to be imported; the others are under tests/unit."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.support.played_adapters import play, wrong_tensors

HAS_TRL = importlib.util.find_spec("trl") is not None
needs_trl = pytest.mark.skipif(not HAS_TRL, reason="TRL is not installed")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    work = tmp_path_factory.mktemp("sharded")
    return work, play(work, "vllm", *(["trl"] if HAS_TRL else []))


@pytest.mark.parametrize("name", ["vllm", pytest.param("trl", marks=needs_trl)])
def test_every_rank_publishes_its_part_and_the_first_drives_the_engines(
    played: tuple[Path, dict[str, Any]], name: str, tmp_path: Path
) -> None:
    work, seen = played
    assert [(of_rank["version"], of_rank["served"]) for of_rank in seen[name]] == [(2, [1, 2]), (2, [])]
    assert wrong_tensors(work / name, 2, tmp_path / "out") == []
