# SPDX-License-Identifier: Apache-2.0
"""The demo's settings, from ``DEMO_*`` environment variables, and the folders it writes."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from examples.grpo import ExampleError

OURS = {
    "sync": "run.json",
    "final": "delta_snapshot.json",
}
"""Folders of an earlier run that a new one replaces, and the file that shows that the demo wrote them."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What to run. The learning rate suits 135 M parameters; a tiny random model needs a much larger one.

    Attributes:
        steps: optimizer steps, each published and applied.
        out: where everything is written.
        cache: where the converted base checkpoint is kept from run to run.
        model: a local Hugging Face checkpoint to train instead of SmolLM2-135M-Instruct.
        tiny: make a random model of about 3 M parameters instead.
        learning_rate: AdamW's.
        questions: how many different questions.
        samples: completions per question and step, the group that rewards are normalised over.
        max_tokens: longest completion.
        seed: seeds questions, sampling and random weights.
    """

    steps: int
    out: Path
    cache: Path
    model: Path | None
    tiny: bool
    learning_rate: float
    questions: int = 6
    samples: int = 8
    max_tokens: int = 6
    seed: int = 0
    kind: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", "tiny" if self.tiny else "checkpoint" if self.model else "smollm2")

    @property
    def sync_dir(self) -> Path:
        """The run's folder: what trainer and server share."""
        return self.out / "sync"

    @property
    def final(self) -> Path:
        """The newest version as a plain checkpoint."""
        return self.out / "final"


def read_settings() -> Settings:
    """Read the environment.

    Raises:
        ExampleError: a variable has a value that makes no sense.
    """
    out = Path(os.environ.get("DEMO_OUT", "demo_out")).resolve()
    tiny = os.environ.get("DEMO_TINY", "0") not in ("", "0")
    model = os.environ.get("DEMO_MODEL")
    try:
        settings = Settings(
            steps=int(os.environ.get("DEMO_STEPS", "6")),
            out=out,
            cache=Path(os.environ.get("DEMO_CACHE", out / "cache")).resolve(),
            model=Path(model).resolve() if model else None,
            tiny=tiny,
            samples=16 if tiny else 8,
            learning_rate=float(os.environ.get("DEMO_LR", "3e-4" if tiny else "1e-5")),
            seed=int(os.environ.get("DEMO_SEED", "0")),
        )
    except ValueError as error:
        raise ExampleError(f"a DEMO_* variable is not a number: {error}") from error
    if settings.steps < 1:
        raise ExampleError("DEMO_STEPS must be at least 1")
    if tiny and model:
        raise ExampleError("set DEMO_MODEL or DEMO_TINY, not both")
    return settings


def clear_earlier_run(settings: Settings) -> None:
    """Remove what an earlier run of the demo left, so that this one starts a run of its own at version 0.

    Raises:
        ExampleError: a folder is in the way that the demo did not write.
    """
    settings.out.mkdir(parents=True, exist_ok=True)
    for name, proof in OURS.items():
        folder = settings.out / name
        if not folder.exists():
            continue
        if any(folder.iterdir()) and not (folder / proof).is_file():
            raise ExampleError(f"{folder} is in the way and was not written by this demo; move it or set DEMO_OUT")
        shutil.rmtree(folder)
