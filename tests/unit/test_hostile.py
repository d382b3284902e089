"""What a hostile store may hold is refused with an error of ours, soon, and without taking memory for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.runs import make_run

ROOT = Path(__file__).parents[2]
MOST_S = 20.0
"""A case takes less than a second; machines that test it may be busy."""


@pytest.mark.slow
def test_hostile_input_is_refused_within_bounded_time_and_memory(
    ram_path: Path, record_property: Callable[[str, object], None]
):
    run = make_run(ram_path, 1, encoding="dense")
    (ram_path / "work").mkdir()
    command = [sys.executable, "-m", "tests.support.hostile", str(run.sync_dir), str(ram_path / "work")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=300)
    found = json.loads(done.stdout)
    assert len(found) > 30
    refused = ("CorruptFile", "LimitExceeded", "UnsupportedFormat", "ObjectNotFound", "StoreError")
    wrong = {name: case for name, case in found.items() if not case["error"].startswith(refused)}
    assert wrong == {}
    slow = {name: case for name, case in found.items() if case["seconds"] > MOST_S or case["grown_mb"] > 700}
    assert slow == {}
    for name, case in found.items():
        record_property("hostile", f"{name}|`{case['error'].replace(': ', '`: ', 1)}")
