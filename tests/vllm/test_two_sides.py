"""Trainer and sampler in two networks joined by a link of 100 Mbit/s: an S3 server is all that both see."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.two_sides import why_not

_WHY_NOT = why_not()


@pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))
def test_sampler_behind_a_slow_link_follows_exactly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.two_clusters_over_s3"]
    options = ["--model", "tiny", "--steps", "3", "--lr", "1e-3", "--out", str(tmp_path)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    arrivals = json.loads((tmp_path / "arrivals.json").read_text())
    assert [one["version"] for one in arrivals] == [1, 2, 3]
    assert all(0 < one["density"] < 1 for one in arrivals)
    assert all(one["published_s"] <= one["served_s"] for one in arrivals)
    # The last word comes after every live weight was compared with the version's, on the far side.
    assert done.stdout.strip().endswith("all live weights are those of version 3, bit for bit")
