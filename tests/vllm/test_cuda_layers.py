"""What CUDA engines do to quantized experts and to MLA, on a forced CUDA platform with the weights on the CPU (no GPU
needed): an update leads to what a fresh model has, and its undo takes back all that a reload touches."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.tiny_models import make_model, train_step

pytest.importorskip("vllm.v1.attention.backends.mla.cpu_mla", reason="this vLLM's CUDA paths are others")


@pytest.mark.parametrize(
    ("architecture", "experts", "derived"),
    [("deepseek", 1, 2), ("qwen3_moe", 2, 0)],
    ids=["MLA", "experts that are loaded by keyword"],
)
def test_quantized_experts_and_mla_are_updated_and_undone_whole(
    architecture: str, experts: int, derived: int, tmp_path: Path
) -> None:
    base, following = tmp_path / "base", tmp_path / "following"
    model = make_model(architecture, base)
    train_step(model, 1)
    model.to(torch.bfloat16).save_pretrained(following)
    shutil.copy(base / "config.json", following / "config.json")
    folders = [str(base), str(following), str(tmp_path / "rendezvous")]
    command = [sys.executable, "-m", "tests.support.cuda_layers", *folders, "fp8_per_tensor"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    found = json.loads(lines[-1])
    assert found["ways"] == ["reload", "scatter"]
    assert found["experts"] == experts
    assert len(found["derived"]) == derived
    assert found["moved"] > 20
    assert found["after the update"] == []
    assert found["after its undo"] == []
    assert found["after a failure"] == []
    assert found["rebuilt"] == []
