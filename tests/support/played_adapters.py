"""Plays cases of `shard_adapters` in processes of their own, and says what is wrong with what they published."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.support.tensors import bits_of
from vllm_delta_snapshot.checkpoint import Checkpoint
from vllm_delta_snapshot.runs.materialize import materialize
from vllm_delta_snapshot.runs.run_folder import RunFolder
from vllm_delta_snapshot.store.posix import PosixStore

ROOT = Path(__file__).parents[2]


def play(work: Path, *names: str) -> dict[str, list[dict[str, Any]]]:
    """Return what each rank of each case saw."""
    command = [sys.executable, "-m", "tests.support.shard_adapters", str(work), *names]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def wrong_tensors(folder: Path, versions: int, scratch: Path) -> list[str]:
    """Compare every version of a case with what its model was in all; return the tensors that differ."""
    run, base = RunFolder(PosixStore(folder / "run")), Checkpoint(folder / "base")
    wrong = [] if run.versions() == list(range(1, versions + 1)) else [f"versions {run.versions()}"]
    for version in run.versions():
        materialize(run, base, version, scratch / str(version))
        found, expected = Checkpoint(scratch / str(version)), load_file(folder / f"expected-{version}.safetensors")
        wrong += [
            f"{version}/{name}"
            for name in found.specs
            if name not in expected or bits_of(expected[name]).tolist() != found.bits(name).tolist()
        ]
        if run.read_version(version).changed_elements == 0:
            wrong.append(f"{version} changes nothing")
    return wrong
