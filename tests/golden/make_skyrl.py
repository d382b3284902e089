"""Make the committed SkyRL deltas: ``python -m tests.golden.make_skyrl``. Never run by the tests.

They start from `base`, whose tensors have every element type. The format is not ours: what these bytes are read as must
not change. Version 1 changes every tensor, 2 is as early writers wrote it, in two files, 3 changes nothing.
"""

from __future__ import annotations

import json
import shutil

import torch

from tests.golden.make import FOLDER, SPECS, State, base_state
from tests.support.skyrl import write_skyrl_delta
from tests.support.tensors import to_torch

VERSIONS = (1, 2, 3)


def states() -> list[State]:
    """Return the state at every version, from 0: a fixed pattern of changes, to values that use every bit."""
    found = [base_state()]
    for version in VERSIONS:
        state = {name: bits.copy() for name, bits in found[-1].items()}
        for place, spec in enumerate(SPECS):
            if version == 3 or (version == 2 and place % 2):
                continue
            for position in range((place + version) % 2, spec.numel, 2 + place % 3):
                top = 1 if spec.dtype == "BOOL" else (1 << (8 * spec.element.itemsize)) - 1
                state[spec.name][position] = (top - version - place * position * position) % (top + 1)
        found.append(state)
    return found


def main() -> None:
    """Write everything anew."""
    folder = FOLDER / "skyrl"
    shutil.rmtree(folder, ignore_errors=True)
    weights = [_tensors(state) for state in states()]
    for version in VERSIONS:
        write_skyrl_delta(
            folder / f"delta-{version:08d}",
            weights[version - 1],
            weights[version],
            version=version,
            is_early=version == 2,
            tensors_a_file=6 if version == 2 else 1000,
        )
    expected = [{name: bits.tobytes().hex() for name, bits in state.items()} for state in states()]
    (FOLDER / "expected_skyrl.json").write_text(json.dumps({"states": expected}, indent=1) + "\n")


def _tensors(state: State) -> dict[str, torch.Tensor]:
    return {spec.name: to_torch(state[spec.name], spec) for spec in SPECS}


if __name__ == "__main__":
    main()
