"""What depends on the processor holds on those below this one, and vLLM's decisions are met as they fall with AMX."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processor import LEVELS, claimed, own_level

_ROOT = Path(__file__).parents[2]
_SELECTED = "plain_experts or shuffled_experts or (packed_layers and qwen3_moe) or product"


@pytest.mark.skipif(claimed() is not None, reason="runs as at another level already")
@pytest.mark.parametrize("level", LEVELS)
def test_other_processors_hold_what_this_one_does(level: str) -> None:
    names = list(LEVELS)
    if level == own_level():
        pytest.skip("this processor: the tests themselves are run on it")
    if level != "amx" and names.index(level) > names.index(own_level()):
        pytest.skip(f"the processor has nothing above {own_level()}")
    if level == "amx" and own_level() != "avx512_bf16":
        pytest.skip("vLLM's library for AMX needs AVX512_BF16")
    files = ("test_cpu_experts.py", "test_fitness.py", "../unit/engine/vllm_patches/test_cpu_linear.py")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.support.processor", level, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-p", "no:xdist", "--show-capture=no", "-k", _SELECTED),
            *(str(_ROOT / "tests/vllm" / name) for name in files),
        ],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
