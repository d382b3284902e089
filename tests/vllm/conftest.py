"""Tests on a real vLLM engine: all marked, and each with a stage folder of its own."""

from pathlib import Path

import pytest

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies here, and let vLLM's own imports warn as they like."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(autouse=True)
def _own_stage_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTA_SNAPSHOT_STAGE_DIR", str(tmp_path / "stage"))
