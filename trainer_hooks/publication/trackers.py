# SPDX-License-Identifier: Apache-2.0
"""Observers that write what was published into experiment trackers: TensorBoard and Weights & Biases.

Neither library is a dependency: a writer or a run is handed in, or made here by the library that is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from trainer_hooks.publication.publication import PublishReport
from vllm_delta_snapshot.errors import CompatibilityError, DeltaSnapshotError

__all__ = ["ScalarWriter", "TensorBoardObserver", "WandbObserver", "WandbRun"]

PREFIX = "delta_snapshot/"


class ScalarWriter(Protocol):
    """What is needed of a ``torch.utils.tensorboard.SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Write one number."""
        ...


class WandbRun(Protocol):
    """What is needed of a ``wandb.Run``."""

    def define_metric(self, name: str, step_metric: str) -> object:
        """Say over what a metric is drawn."""
        ...

    def log(self, data: dict[str, float]) -> object:
        """Write numbers."""
        ...


class TensorBoardObserver:
    """A `PublishObserver` that writes scalars, over the optimizer step, or over the version where none is given.

    Args:
        writer: a ``SummaryWriter``, or the folder for a new one.

    Raises:
        CompatibilityError: a folder was given, and tensorboard is not installed.
    """

    def __init__(self, writer: ScalarWriter | str) -> None:
        self._writer = _open_writer(writer) if isinstance(writer, str) else writer

    def published(self, report: PublishReport, step: int | None, metrics: Mapping[str, float]) -> None:
        """See `PublishObserver`."""
        for name, value in _numbers(report).items():
            self._writer.add_scalar(PREFIX + name, value, report.version if step is None else step)

    def failed(self, error: DeltaSnapshotError) -> None:
        """See `PublishObserver`. A failure is no number."""


class WandbObserver:
    """A `PublishObserver` that logs to a Weights & Biases run, over the version.

    The run's own step is left to the trainer: it may only rise, and a publisher does not know where it is.

    Args:
        run: the run; by default the one that ``wandb.init`` began.

    Raises:
        CompatibilityError: no run was given, and wandb is not installed or has begun none.
    """

    def __init__(self, run: WandbRun | None = None) -> None:
        self._run = _current_run() if run is None else run
        self._run.define_metric(f"{PREFIX}*", step_metric=f"{PREFIX}version")

    def published(self, report: PublishReport, step: int | None, metrics: Mapping[str, float]) -> None:
        """See `PublishObserver`."""
        data = {PREFIX + name: value for name, value in _numbers(report).items()}
        self._run.log(data | {f"{PREFIX}version": report.version} | ({} if step is None else {f"{PREFIX}step": step}))

    def failed(self, error: DeltaSnapshotError) -> None:
        """See `PublishObserver`. A failure is no number."""


def _numbers(report: PublishReport) -> dict[str, float]:
    return {
        "density": report.density,
        "changed_tensors": report.changed_tensors,
        "payload_bytes": report.payload_bytes,
        "payload_share": report.payload_bytes / max(1, report.checkpoint_bytes),
        "diff_s": report.diff_s,
        "blocked_s": report.blocked_s,
        "publish_s": report.total_s,
    }


def _open_writer(folder: str) -> ScalarWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise CompatibilityError(
            "a folder for TensorBoard needs tensorboard", hint="pip install tensorboard"
        ) from error
    writer: ScalarWriter = SummaryWriter(folder)
    return writer


def _current_run() -> WandbRun:
    try:
        import wandb
    except ImportError as error:
        raise CompatibilityError("logging to Weights & Biases needs wandb", hint="pip install wandb") from error
    run: WandbRun | None = wandb.run
    if run is None:
        raise CompatibilityError("no Weights & Biases run has begun", hint="Call wandb.init() first, or hand in a run.")
    return run
