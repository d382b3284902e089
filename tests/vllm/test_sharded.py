"""An engine follows a trainer of several processes, through the death of one and a restart with more of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.engines import engine
from tests.support.tiny_models import make_model
from vllm_delta_snapshot.drive import sync_llm, verify_llm

ROOT = Path(__file__).parents[2]


def train(work: Path, **options: int) -> list[dict[str, Any]]:
    """Have processes train and publish; return what each saw, or how it died."""
    given = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "tests.support.shard_engine", str(work), *given]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_engine_follows_a_sharded_trainer_through_a_death_and_a_restart(tmp_path: Path) -> None:
    make_model("qwen3_moe", tmp_path / "base")
    assert [seen["version"] for seen in train(tmp_path, ranks=2, steps=2)] == [2, 2]
    with engine(tmp_path / "base") as live:
        live.init(sync_dir=str(tmp_path / "run"))
        assert sync_llm(live.llm, 2, stage_timeout_s=60, run_id=live.run_id).version == 2
        second = live.checksums()
        dead = train(tmp_path, ranks=2, steps=3, dies_on=1)
        assert dead[1].keys() == {"death"}
        assert live.checksums() == second
        after = train(tmp_path, ranks=3, steps=4)
        assert [(seen["found"], seen["version"]) for seen in after] == [(2, 4)] * 3
        assert sync_llm(live.llm, 4, stage_timeout_s=60, run_id=live.run_id).version == 4
        verify_llm(live.llm)
        fourth = live.checksums()
    for steps, expected in ((2, second), (4, fourth)):
        with engine(tmp_path / f"saved-{steps}") as fresh:
            assert fresh.checksums() == expected
