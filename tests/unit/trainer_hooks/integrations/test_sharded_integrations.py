"""Adapters on sharded models: two processes train with FSDP2 in real frameworks; every version is the full model."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.played_adapters import play, wrong_tensors

pytest.importorskip("transformers")

pytestmark = pytest.mark.slow  # processes of several ranks

NAMES = ("accelerate", "transformers")


@pytest.fixture(scope="module")
def played(ram_root: Path) -> tuple[Path, dict[str, Any]]:
    work = ram_root / "sharded-adapters"
    work.mkdir()
    return work, play(work, *NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_publishes_its_part_and_the_first_drives_the_engines(
    played: tuple[Path, dict[str, Any]], name: str, tmp_path: Path
):
    work, seen = played
    assert [of_rank["kind"].startswith("FSDP") for of_rank in seen[name]] == [True, True]
    assert [of_rank["version"] for of_rank in seen[name]] == [2, 2]
    assert [of_rank["served"] for of_rank in seen[name]] == [[1, 2] if name == "accelerate" else [], []]
    assert wrong_tensors(work / name, 2, tmp_path) == []
